"""When Megatron's generation on the training GPUs gets a model of its own, with which settings, and beside what not."""

from __future__ import annotations

from typing import Any

import pytest

from megasetup.config.colocated import inference_megatron_cfg, validate_colocated_config
from megasetup.config.errors import ConfigError

TRAINING = {"tensor_model_parallel_size": 2, "activation_checkpointing": True, "sequence_parallel": True}


def config(generation: dict[str, Any] | None, training: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "megatron_cfg": TRAINING | (training or {}),
        "generation": {"backend": "megatron", "colocated": {"enabled": True}, "mcore_generation_config": generation},
        **changes,
    }


@pytest.mark.parametrize(
    "generation",
    [
        None,
        {},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "expert_tensor_parallel_size": None},
        {"transformer_impl": "transformer_engine", "cuda_graph_impl": "local", "max_tokens": 8},
    ],
)
def test_the_training_model_generates_where_layout_and_layers_are_the_same(generation: dict[str, Any] | None) -> None:
    assert inference_megatron_cfg(config(generation)) is None


def test_no_generation_by_megatron_on_these_gpus() -> None:
    other = {"tensor_model_parallel_size": 1}
    assert inference_megatron_cfg({"megatron_cfg": TRAINING}) is None
    assert inference_megatron_cfg(config(other) | {"generation": None}) is None
    for change in ({"backend": "vllm"}, {"colocated": {"enabled": False}}):
        found = config(other)
        found["generation"] |= change
        assert inference_megatron_cfg(found) is None


@pytest.mark.parametrize(
    ("generation", "training"),
    [
        ({"tensor_model_parallel_size": 1}, {}),
        ({"pipeline_model_parallel_size": 2}, {}),
        ({"expert_model_parallel_size": 4}, {"expert_model_parallel_size": 2}),
        ({"expert_tensor_parallel_size": 2}, {}),
        ({"transformer_impl": "inference_optimized"}, {}),
        ({}, {"context_parallel_size": 2}),
    ],
)
def test_another_layout_or_other_layers_have_a_config_of_their_own(
    generation: dict[str, Any], training: dict[str, Any]
) -> None:
    found = inference_megatron_cfg(config(generation, training))
    assert found is not None
    expected = TRAINING | training | generation
    assert found == expected | {"activation_checkpointing": False, "context_parallel_size": 1}


OTHER = {"tensor_model_parallel_size": 1}


@pytest.mark.parametrize(
    ("found", "path"),
    [
        (config(OTHER, {"peft": {"enabled": True}}), "policy.megatron_cfg.peft.enabled is True"),
        (config(OTHER, draft={"enabled": True}), "policy.draft.enabled is True"),
        (
            config(OTHER, {"model_overrides": {"virtual_pipeline_model_parallel_size": 2}}),
            "policy.megatron_cfg.model_overrides.virtual_pipeline_model_parallel_size is 2",
        ),
        (
            config(OTHER, {"distributed_data_parallel_config": {"use_megatron_fsdp": True}}),
            "policy.megatron_cfg.distributed_data_parallel_config.use_megatron_fsdp is True",
        ),
        (
            config({"transformer_impl": "inference_optimized"}, {"sequence_parallel": False}),
            "policy.megatron_cfg.sequence_parallel is False",
        ),
    ],
)
def test_what_an_inference_model_does_not_go_with(found: dict[str, Any], path: str) -> None:
    with pytest.raises(AssertionError) as raised:
        validate_colocated_config(found)
    assert isinstance(raised.value, ConfigError)
    assert str(raised.value).startswith(path)


def test_without_one_they_are_no_trouble() -> None:
    validate_colocated_config(config(None, {"peft": {"enabled": True}}, draft={"enabled": True}))
    validate_colocated_config(config(OTHER))
    validate_colocated_config(config({"transformer_impl": "inference_optimized"}))
