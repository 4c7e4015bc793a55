"""Parallel sizes: each reaches its field as it is, and context parallelism has what it needs."""

from __future__ import annotations

from typing import Any

import pytest
from bridge_providers import changes, policy, provider

from megasetup.config.parallelism import (
    apply_parallelism_config,
    validate_layout,
    validate_parallelism_config,
)

PACKED = {"sequence_packing": {"enabled": True}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_model_parallel_size", 4),
        ("pipeline_model_parallel_size", 2),
        ("num_layers_in_first_pipeline_stage", 1),
        ("num_layers_in_last_pipeline_stage", 3),
        ("sequence_parallel", True),
    ],
)
def test_a_key_sets_its_field_and_no_other(key: str, value: Any) -> None:
    model_cfg = provider()
    apply_parallelism_config(model_cfg, policy(**{key: value}))
    assert changes(model_cfg) == {key: value}


def test_absent_keys_leave_the_provider_alone() -> None:
    model_cfg = provider()
    model_cfg.tensor_model_parallel_size = 8
    apply_parallelism_config(model_cfg, policy())
    assert changes(model_cfg) == {"tensor_model_parallel_size": 8}


def test_false_and_none_are_honoured() -> None:
    model_cfg = provider()
    model_cfg.sequence_parallel = True
    model_cfg.num_layers_in_first_pipeline_stage = 3
    apply_parallelism_config(model_cfg, policy(sequence_parallel=False, num_layers_in_first_pipeline_stage=None))
    assert changes(model_cfg) == {}


def test_context_parallelism_with_sequence_packing() -> None:
    model_cfg = provider()
    apply_parallelism_config(model_cfg, PACKED | policy(context_parallel_size=2))
    assert changes(model_cfg) == {"context_parallel_size": 2}


@pytest.mark.parametrize(("packing", "found"), [(None, "missing"), ({}, "missing"), ({"enabled": False}, "False")])
def test_context_parallelism_needs_sequence_packing(packing: Any, found: str) -> None:
    config = policy(context_parallel_size=2) | {"sequence_packing": packing}
    message = (
        rf"policy\.sequence_packing\.enabled is {found}: must be true, "
        r"because policy\.megatron_cfg\.context_parallel_size is 2"
    )
    with pytest.raises(AssertionError, match=message) as raised:
        apply_parallelism_config(provider(), config)
    assert isinstance(raised.value, ValueError)
    with pytest.raises(ValueError, match=message):
        validate_parallelism_config(config)


def test_context_parallelism_of_the_checkpoint_needs_sequence_packing_too() -> None:
    model_cfg = provider()
    model_cfg.context_parallel_size = 4
    with pytest.raises(AssertionError, match="context_parallel_size is 4"):
        apply_parallelism_config(model_cfg, policy())


def test_context_parallelism_excludes_fused_linear_logprobs() -> None:
    config = PACKED | policy(context_parallel_size=2, use_fused_linear_logprobs=True)
    with pytest.raises(AssertionError, match=r"use_fused_linear_logprobs is True: must be false, because"):
        apply_parallelism_config(provider(), config)
    apply_parallelism_config(provider(), PACKED | policy(context_parallel_size=2, use_fused_linear_logprobs=False))
    apply_parallelism_config(provider(), policy(context_parallel_size=1, use_fused_linear_logprobs=True))


def test_both_problems_come_together() -> None:
    with pytest.raises(ValueError, match="2 problems") as raised:
        validate_parallelism_config(policy(context_parallel_size=2, use_fused_linear_logprobs=True))
    assert "sequence_packing" in str(raised.value)
    assert "use_fused_linear_logprobs" in str(raised.value)


@pytest.mark.parametrize("config", [{}, {"megatron_cfg": None}])
def test_a_config_without_megatron_cfg_is_a_key_error(config: dict[str, Any]) -> None:
    with pytest.raises(KeyError) as raised:
        apply_parallelism_config(provider(), config)
    assert "policy.megatron_cfg is missing" in str(raised.value)


def test_a_section_that_is_no_mapping_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"policy\.megatron_cfg is \[1\]: must be a mapping"):
        apply_parallelism_config(provider(), {"megatron_cfg": [1]})


def test_the_config_is_not_changed() -> None:
    config = PACKED | policy(context_parallel_size=2, tensor_model_parallel_size=2)
    apply_parallelism_config(provider(), config)
    assert config == PACKED | policy(context_parallel_size=2, tensor_model_parallel_size=2)


OPTIMIZED = {"transformer_impl": "inference_optimized"}


@pytest.mark.parametrize(
    "settings",
    [
        {**OPTIMIZED, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {**OPTIMIZED, "tensor_model_parallel_size": 1, "sequence_parallel": False},
        {**OPTIMIZED, "tensor_model_parallel_size": None},
        {"transformer_impl": "transformer_engine", "tensor_model_parallel_size": 2},
        OPTIMIZED,
        {},
    ],
)
def test_inference_optimized_with_what_it_needs(settings: Any) -> None:
    validate_parallelism_config(policy(**settings))


@pytest.mark.parametrize("own", [{}, {"sequence_parallel": False}, {"sequence_parallel": None}])
def test_inference_optimized_and_tensor_parallelism_need_sequence_parallelism(own: Any) -> None:
    config = policy(**OPTIMIZED, tensor_model_parallel_size=2, **own)
    for check in (validate_parallelism_config, lambda config: apply_parallelism_config(provider(), config)):
        with pytest.raises(AssertionError, match=r"\.sequence_parallel is .*tensor_model_parallel_size is 2") as raised:
            check(config)
        assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("fields", "settings", "right"),
    [
        ({"tensor_model_parallel_size": 2}, OPTIMIZED, False),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, OPTIMIZED, True),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            {**OPTIMIZED, "sequence_parallel": False},
            False,
        ),
        ({"tensor_model_parallel_size": 2}, {**OPTIMIZED, "tensor_model_parallel_size": 1}, True),
        (OPTIMIZED, {"tensor_model_parallel_size": 4}, False),
    ],
)
def test_what_a_checkpoint_comes_with_counts_where_the_config_says_nothing(
    fields: dict[str, Any], settings: dict[str, Any], right: bool
) -> None:
    model_cfg = provider()
    for field, value in fields.items():
        setattr(model_cfg, field, value)
    if right:
        apply_parallelism_config(model_cfg, policy(**settings))
    else:
        with pytest.raises(AssertionError, match=r"policy\.megatron_cfg\.sequence_parallel is .*: must be true"):
            apply_parallelism_config(model_cfg, policy(**settings))


@pytest.mark.parametrize(
    ("kind", "fields", "key"),
    [
        # (4 layers, 8 experts)
        ("dense", {"pipeline_model_parallel_size": 3}, "pipeline_model_parallel_size"),
        ("dense", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4}, "pipeline_model"),
        ("dense", {"expert_model_parallel_size": 2}, "expert_model_parallel_size is 2: must be 1"),
        (
            "moe",
            {"expert_model_parallel_size": 3},
            "expert_model_parallel_size is 3: must divide the model's 8 experts",
        ),
        ("dense", {"pipeline_model_parallel_size": 4}, None),
        ("dense", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, None),
        ("dense", {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2}, None),
        ("dense", {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 2}, None),
        ("dense", {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et|t|tttL"}, None),
        ("dense", {"pipeline_model_parallel_size": 5, "account_for_embedding_in_pipeline_split": True}, None),
        ("moe", {"expert_model_parallel_size": 4}, None),
    ],
)
def test_layers_and_experts_can_be_shared_out(kind: str, fields: dict[str, Any], key: str | None) -> None:
    model_cfg = provider(kind)
    for field, value in fields.items():
        setattr(model_cfg, field, value)
    if key is None:
        validate_layout(model_cfg)
    else:
        with pytest.raises(AssertionError, match=rf"policy\.megatron_cfg\.{key}") as raised:
            validate_layout(model_cfg)
        assert isinstance(raised.value, ValueError)
