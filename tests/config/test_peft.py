"""LoRA needs the adapters' rank and weight, and nothing where it is not enabled."""

from __future__ import annotations

from typing import Any

import pytest

from megasetup.config.errors import MISSING, ConfigAssertionError
from megasetup.config.peft import validate_peft_config


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
