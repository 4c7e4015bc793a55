"""How the model is split over ranks: tensor, pipeline, context and sequence parallelism.

Expert parallelism stands with the other settings of experts, in moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import MISSING, ConfigAssertionError, Problems, config_error
from megasetup.config.fields import MEGATRON, effective, megatron_cfg, same_names, section, set_fields
from megasetup.config.logprobs import FUSED_KEY, fused_linear_logprobs

FIELDS = same_names(
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "sequence_parallel",
)
"""Provider field by key of policy.megatron_cfg."""


def apply_parallelism_config(model_cfg: Any, config: Mapping[str, Any]) -> None:
    """Set the parallel sizes.

    Args:
        model_cfg: the model provider, changed in place.
        config: the policy config.

    Raises:
        ConfigAssertionError: context parallelism without sequence packing, or with fused linear logprobs;
            transformer_impl inference_optimized with tensor parallelism and no sequence parallelism. A size that the
            config does not give is the provider's.
    """
    problems = Problems()
    set_fields(model_cfg, megatron_cfg(config), FIELDS, MEGATRON, problems)
    with problems.collect():
        _check(config, model_cfg)
    problems.raise_any()


def validate_parallelism_config(config: Mapping[str, Any]) -> None:
    """Check what the parallel sizes need, from the config alone.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: as `apply_parallelism_config`.
    """
    _check(config, None)


# Where one of these is set, stages need not be alike.
_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)


def validate_layout(model_cfg: Any) -> None:
    """Check that layers and experts can be shared out, which Megatron finds out only when every rank builds its part.

    Args:
        model_cfg: the model provider, with everything set.

    Raises:
        ConfigAssertionError: stages would differ in layers, or ranks in experts, and nothing says how; lists both.
    """
    problems = Problems()
    stages, layers = getattr(model_cfg, "pipeline_model_parallel_size", 1), getattr(model_cfg, "num_layers", None)
    chunks = (stages or 1) * (getattr(model_cfg, "virtual_pipeline_model_parallel_size", None) or 1)
    if layers and layers % chunks and not any(getattr(model_cfg, name, None) for name in _UNEVEN):
        problems.add(
            f"{MEGATRON}.pipeline_model_parallel_size",
            stages,
            f"must divide the model's {layers} layers into {chunks} equal parts, unless "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage is given",
            ConfigAssertionError,
        )
    ranks = getattr(model_cfg, "expert_model_parallel_size", 1) or 1
    experts = getattr(model_cfg, "num_moe_experts", None) or 0
    if experts % ranks or (ranks > 1 and not experts):
        remedy = f"must divide the model's {experts} experts" if experts else "must be 1: the model has no experts"
        problems.add(f"{MEGATRON}.expert_model_parallel_size", ranks, remedy, ConfigAssertionError)
    problems.raise_any()


def _check(config: Mapping[str, Any], model_cfg: Any) -> None:
    problems = Problems()
    with problems.collect():
        _check_context_parallelism(effective(megatron_cfg(config), "context_parallel_size", model_cfg), config)
    with problems.collect():
        _check_inference_optimized(megatron_cfg(config), model_cfg)
    problems.raise_any()


def _check_inference_optimized(megatron: Mapping[str, Any], model_cfg: Any) -> None:
    # Its layers scatter and gather along the sequence, whatever the setting says.
    size = effective(megatron, "tensor_model_parallel_size", model_cfg) or 1
    if effective(megatron, "transformer_impl", model_cfg) != "inference_optimized" or size <= 1:
        return
    if not effective(megatron, "sequence_parallel", model_cfg):
        raise config_error(
            f"{MEGATRON}.sequence_parallel",
            megatron.get("sequence_parallel", MISSING),
            f"must be true, because {MEGATRON}.transformer_impl is inference_optimized and tensor_model_parallel_size "
            f"is {size}",
            ConfigAssertionError,
        )


def _check_context_parallelism(size: int | None, config: Mapping[str, Any]) -> None:
    if size is None or size <= 1:
        return
    problems = Problems()
    because = f"because {MEGATRON}.context_parallel_size is {size}"
    packed = section(config, "sequence_packing").get("enabled", MISSING)
    if packed is MISSING or not packed:
        problems.add("policy.sequence_packing.enabled", packed, f"must be true, {because}", ConfigAssertionError)
    if fused_linear_logprobs(megatron_cfg(config)):
        problems.add(FUSED_KEY, True, f"must be false, {because}", ConfigAssertionError)
    problems.raise_any()
