"""Megatron's own layers in place of Transformer Engine's, for the time of a conversion.

Weights are the same whichever layers hold them, and Megatron saves both under the same names, so a checkpoint made
with its local layers on a machine without a GPU is loaded into Transformer Engine's on one with. Only what the layers
need is changed, and all of it is put back before the checkpoint's config is written.

Needed as long as Transformer Engine's layers need a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megasetup.compat.bridge import import_bridge

# What Megatron's local layers cannot do, or what is fused by Transformer Engine alone.
_WITHOUT_FUSIONS: Mapping[str, Any] = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "cross_entropy_fusion_impl": "native",
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "fp8": None,
    "fp8_param": False,
    "gradient_accumulation_fusion": False,
    "moe_enable_deepep": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "allgather",
    "overlap_moe_expert_parallel_comm": False,
    "persist_layer_norm": False,
    "tp_comm_overlap": False,
    "use_te_rng_tracker": False,
    "use_transformer_engine_op_fuser": False,
}


def local_layer_settings(provider: Any) -> dict[str, Any]:
    """The fields of a provider to change so that it builds Megatron's local layers, by name.

    A provider that brings layers of its own (as those of vision and hybrid models do) keeps them: whether they work
    without Transformer Engine is for them to say.

    Args:
        provider: a Bridge model provider. It is not changed.
    """
    gpt_provider = import_bridge("megatron.bridge.models.gpt_provider")
    settings = {name: value for name, value in _WITHOUT_FUSIONS.items() if hasattr(provider, name)}
    usual = (gpt_provider.default_layer_spec, gpt_provider.transformer_engine_layer_spec)
    if getattr(provider, "transformer_layer_spec", None) in usual:
        settings["transformer_layer_spec"] = gpt_provider.local_layer_spec
    return settings


def fields_of_the_machine(provider: Any) -> list[str]:
    """The fields whose defaults Bridge takes from what the machine has installed, such as fused kernels.

    A config that is to serve other machines too must leave them out.

    Args:
        provider: a Bridge model provider, which is a dataclass.
    """
    return [
        field.name
        for field in dataclasses.fields(provider)
        if getattr(field.default_factory, "__module__", "") == "megatron.bridge.utils.fusions"
    ]
