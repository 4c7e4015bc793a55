"""A value model's config in the shape of a policy's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megasetup.config.errors import Problems
from megasetup.config.schema import PolicyConfig
from megasetup.config.schema.conform import check
from megasetup.config.value_model import make_policy_like_config

VALUE: dict[str, Any] = {
    "model_name": "some/model",
    "precision": "bfloat16",
    "train_global_batch_size": 8,
    "megatron_cfg": {"train_iters": 5, "optimizer": {"lr": 1e-5}},
}


def test_what_the_value_model_says_is_kept() -> None:
    made = make_policy_like_config(VALUE | {"offload_optimizer_for_refit": False, "logprob_chunk_size": 128})
    assert {key: made[key] for key in VALUE} == VALUE
    assert (made["offload_optimizer_for_refit"], made["logprob_chunk_size"]) == (False, 128)


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("generation", None),
        ("pretrained_checkpoint", None),
        ("hf_config_overrides", {}),
        ("sequence_packing", {"enabled": False}),
        ("dynamic_batching", {"enabled": False}),
        ("reward_model_cfg", {"enabled": False}),
        ("router_replay", None),
        ("draft", None),
        ("logprob_chunk_size", None),
        ("offload_optimizer_for_logprob", False),
        ("offload_optimizer_for_refit", True),
    ],
)
def test_defaults(key: str, default: Any) -> None:
    assert make_policy_like_config(VALUE)[key] == default


def test_it_is_a_policy_config() -> None:
    problems = Problems()
    assert check(make_policy_like_config(VALUE), PolicyConfig, "policy", problems) == []
    problems.raise_any()


def test_the_input_is_not_changed_and_shares_nothing_with_the_result() -> None:
    before = copy.deepcopy(VALUE)
    made = make_policy_like_config(VALUE)
    made["megatron_cfg"]["optimizer"]["lr"] = 1.0
    made["sequence_packing"]["enabled"] = True
    assert before == VALUE
    assert make_policy_like_config(VALUE)["sequence_packing"] == {"enabled": False}


def test_the_same_input_gives_the_same_result() -> None:
    assert make_policy_like_config(VALUE) == make_policy_like_config(copy.deepcopy(VALUE))
