"""Mixture of experts: expert parallelism, routing, and how tokens travel to their experts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megasetup.config.environment import configure_hybridep_environment
from megasetup.config.errors import Problems
from megasetup.config.fields import MEGATRON, effective, megatron_cfg, same_names, section, set_field, set_fields
from megasetup.config.graphs import GENERATION_KEY, generation_graph_impl
from megasetup.config.router_replay import apply_router_replay_config

_logger = logging.getLogger("megasetup")

FIELDS = same_names(
    "expert_tensor_parallel_size",
    "expert_model_parallel_size",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_enable_deepep",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_shared_expert_overlap",
    "moe_permute_fusion",
    "moe_per_layer_logging",
    "moe_grouped_gemm",
    "moe_pad_experts_for_cuda_graph_inference",
    "inference_moe_token_dispatcher_type",
    "inference_grouped_gemm_backend",
    "use_grouped_gemm_for_dense_mlp",
    "use_grouped_gemm_for_shared_expert",
)
"""Provider field by key of policy.megatron_cfg."""

NUM_SMS = ("moe_flex_dispatcher_num_sms", "moe_hybridep_num_sms")
"""Keys, and provider fields, for the number of SMs of the flex dispatcher: Megatron's newer name, then the older."""


def apply_moe_config(model_cfg: Any, config: Mapping[str, Any]) -> None:
    """Set what the config says of experts, and the environment that HybridEP reads.

    Args:
        model_cfg: the model provider, changed in place.
        config: the policy config.

    Raises:
        ConfigAttributeError: this Megatron lacks a field for a setting that is on; lists all.
    """
    megatron = megatron_cfg(config)
    problems = Problems()
    set_fields(model_cfg, megatron, FIELDS, MEGATRON, problems)
    for key in reversed(NUM_SMS):  # (where both are given, the newer name wins)
        if key in megatron:
            with problems.collect():
                set_field(model_cfg, _num_sms_field(model_cfg), megatron[key], f"{MEGATRON}.{key}")
    with problems.collect():
        apply_router_replay_config(model_cfg, config)
    with problems.collect():
        _drop_single_group(model_cfg, megatron)
        _pad_experts_for_graphs(model_cfg, config)
    problems.raise_any()
    if getattr(model_cfg, "moe_flex_dispatcher_backend", None) == "hybridep":
        configure_hybridep_environment(
            _expert_parallel_size(model_cfg),
            ranks_per_nvlink_domain=megatron.get("num_of_hybrid_ep_ranks_per_nvlink_domain"),
            use_mnnvl=megatron.get("use_mnnvl"),
        )


def _expert_parallel_size(model_cfg: Any) -> int:
    return getattr(model_cfg, "expert_model_parallel_size", 1) or 1


def _num_sms_field(model_cfg: Any) -> str:
    newer, older = NUM_SMS
    return older if hasattr(model_cfg, older) and not hasattr(model_cfg, newer) else newer


def _drop_single_group(model_cfg: Any, megatron: Mapping[str, Any]) -> None:
    # One group is no grouping, and the inference-optimized router takes no groups at all.
    if effective(megatron, "transformer_impl", model_cfg) != "inference_optimized":
        return
    if getattr(model_cfg, "moe_router_num_groups", None) == 1:
        model_cfg.moe_router_num_groups = None
        model_cfg.moe_router_group_topk = None


def _pad_experts_for_graphs(model_cfg: Any, config: Mapping[str, Any]) -> None:
    key = "moe_pad_experts_for_cuda_graph_inference"
    # (the model that generates may be split in its own way)
    generation = section(config, "generation", "mcore_generation_config")
    size = generation.get("expert_model_parallel_size") or _expert_parallel_size(model_cfg)
    if key in megatron_cfg(config) or size == 1 or generation_graph_impl(config) != "local":
        return
    set_field(model_cfg, key, True, GENERATION_KEY)
    _logger.warning(
        "%s.%s is switched on: generation with local CUDA graphs and expert_model_parallel_size %d needs inputs of a "
        "fixed size; set the key to decide yourself",
        MEGATRON,
        key,
        size,
    )
