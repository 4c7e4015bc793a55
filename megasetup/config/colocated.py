"""Generation by Megatron on the GPUs that train: whether it needs a model of its own, and with which settings.

The training model can generate itself where generation wants its layout and its layers. Only where generation asks for
another layout or another transformer_impl is there a second model, with a config of its own, to which the weights are
brought before each generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.draft import DRAFT
from megasetup.config.errors import ConfigAssertionError, Problems
from megasetup.config.fields import MEGATRON, POLICY, megatron_cfg, section

GENERATION = f"{POLICY}.generation.mcore_generation_config"
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
# What a config that does not say means.
_DEFAULTS = {**dict.fromkeys((*SIZES, "context_parallel_size"), 1), "transformer_impl": "transformer_engine"}
_FSDP = ("use_megatron_fsdp", "use_custom_fsdp")


def inference_megatron_cfg(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of Megatron's inference model on the training GPUs.

    Args:
        config: the policy config.

    Returns:
        policy.megatron_cfg, with what generation.mcore_generation_config gives in its place, without activation
        checkpointing and with a context-parallel size of 1. None where generation is not Megatron's on these GPUs, or
        has the training model's layout and layers: the training model generates then.
    """
    generation = section(config, "generation")
    if generation.get("backend") != "megatron" or not section(config, "generation", "colocated").get("enabled"):
        return None
    training = megatron_cfg(config)
    given = section(config, "generation", "mcore_generation_config")
    merged = {
        **training,
        **{key: value for key, value in given.items() if value is not None},
        "activation_checkpointing": False,
        "context_parallel_size": 1,
    }
    if all(_value(merged, key) == _value(training, key) for key in _DEFAULTS):
        return None
    return merged


def _value(settings: Mapping[str, Any], key: str) -> Any:
    found = settings.get(key)
    return _DEFAULTS[key] if found is None else found


def validate_colocated_config(config: Mapping[str, Any]) -> None:
    """Check that a policy can have an inference model beside it, where it would get one.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: LoRA, a draft, virtual pipeline stages or FSDP; inference-optimised layers with tensor
            parallelism and without sequence parallelism; all problems together.
    """
    settings = inference_megatron_cfg(config)
    if settings is None:
        return
    problems = Problems()
    because = f"because {GENERATION} asks for an inference model of its own, which does not work with it"
    if section(config, "megatron_cfg", "peft").get("enabled"):
        problems.add(f"{MEGATRON}.peft.enabled", True, f"must be false, {because}", ConfigAssertionError)
    if section(config, "draft").get("enabled"):
        problems.add(f"{DRAFT}.enabled", True, f"must be false, {because}", ConfigAssertionError)
    for name in ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"):
        stages = section(config, "megatron_cfg", "model_overrides").get(name)
        if stages is not None:
            path = f"{MEGATRON}.model_overrides.{name}"
            problems.add(path, stages, f"must be null, {because}", ConfigAssertionError)
    ddp = section(config, "megatron_cfg", "distributed_data_parallel_config")
    for name in _FSDP:
        if ddp.get(name):
            path = f"{MEGATRON}.distributed_data_parallel_config.{name}"
            problems.add(path, True, f"must be false, {because}", ConfigAssertionError)
    optimized = settings.get("transformer_impl") == "inference_optimized"
    if optimized and _value(settings, "tensor_model_parallel_size") > 1 and not settings.get("sequence_parallel"):
        problems.add(
            f"{MEGATRON}.sequence_parallel",
            settings.get("sequence_parallel"),
            f"must be true, because {GENERATION}.transformer_impl is inference_optimized and the inference model's "
            f"tensor_model_parallel_size {_value(settings, 'tensor_model_parallel_size')}",
            ConfigAssertionError,
        )
    problems.raise_any()
