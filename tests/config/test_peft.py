"""LoRA needs the adapters' rank and weight, and becomes Bridge's own object with every setting in its place."""

from __future__ import annotations

from typing import Any

import bridge_providers  # noqa: F401 (skips this file where Megatron-Bridge is missing)
import pytest
import torch

from megasetup.config.errors import MISSING, ConfigAssertionError
from megasetup.config.peft import create_lora, validate_peft_config


@pytest.mark.parametrize("peft", [None, {}, {"enabled": False}, {"enabled": True, "dim": 8, "alpha": 16}])
def test_what_is_enough(peft: Any) -> None:
    validate_peft_config({"megatron_cfg": {"peft": peft}})


def test_nothing_is_needed_where_there_is_no_section() -> None:
    validate_peft_config({"megatron_cfg": {}})


def test_both_are_reported() -> None:
    with pytest.raises(ConfigAssertionError) as error:
        validate_peft_config({"megatron_cfg": {"peft": {"enabled": True, "alpha": None}}})
    assert [(problem.path, problem.found) for problem in error.value.problems] == [
        ("policy.megatron_cfg.peft.dim", MISSING),
        ("policy.megatron_cfg.peft.alpha", None),
    ]


def test_lora_takes_every_setting() -> None:
    peft = {
        "enabled": True,
        "target_modules": ["linear_qkv"],
        "exclude_modules": [],
        "dim": 4,
        "alpha": 16,
        "dropout": 0.1,
        "dropout_position": "post",
        "lora_A_init_method": "kaiming",
        "lora_B_init_method": "zero",
        "a2a_experimental": False,
        "lora_dtype": "bfloat16",
    }
    lora = create_lora({"megatron_cfg": {"peft": peft}})
    assert (lora.target_modules, lora.dim, lora.alpha, lora.dropout) == (["linear_qkv"], 4, 16, 0.1)
    assert (lora.dropout_position, lora.lora_A_init_method, lora.lora_dtype) == ("post", "kaiming", torch.bfloat16)
    assert create_lora({"megatron_cfg": {"peft": peft}}, lora_A_init_method="xavier").lora_A_init_method == "xavier"


def test_lora_leaves_its_defaults() -> None:
    peft = {"enabled": True, "dim": 4, "alpha": 16, "target_modules": None, "exclude_modules": None, "lora_dtype": None}
    lora = create_lora({"megatron_cfg": {"peft": peft}})
    assert lora.target_modules == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert lora.lora_dtype is None


@pytest.mark.parametrize("peft", [None, {}, {"enabled": False}])
def test_no_lora(peft: dict[str, Any] | None) -> None:
    assert create_lora({"megatron_cfg": {"peft": peft}}) is None


def test_lora_problems_come_together() -> None:
    with pytest.raises(ValueError, match="3 problems") as caught:
        create_lora({"megatron_cfg": {"peft": {"enabled": True, "rank": 4}}})
    for key in ("dim is missing", "alpha is missing", "rank is 4"):
        assert f"policy.megatron_cfg.peft.{key}" in str(caught.value)


def test_another_dtype_is_a_problem_among_the_others() -> None:
    with pytest.raises(ValueError, match=r"lora_dtype is 'half'.*must be one of"):
        create_lora({"megatron_cfg": {"peft": {"enabled": True, "dim": 4, "alpha": 8, "lora_dtype": "half"}}})
