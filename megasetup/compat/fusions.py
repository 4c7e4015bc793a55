"""Fusions that a provider comes with and this machine cannot build are switched off, and said.

Bridge's providers come with the fusions that its own containers hold. Megatron's output layer accumulates gradients
with an extension of APEX and refuses to be made without it; its local attention fails in the first forward pass without
another one; moving tokens to experts and rotating embeddings in one
kernel need Transformer Engine, and a provider that asks for either without it cannot be finalized. So on a machine that
lacks one of these, as most without APEX and all laptops do, a default of Bridge's cannot be built at all. Each changes
speed and not the result.

Needed with megatron-bridge 0.6 and megatron-core 0.19; may go when Bridge looks for what its defaults need.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

logger = logging.getLogger("megasetup")

_EXTENSION = "fused_weight_gradient_mlp_cuda"
# What Megatron's local attention imports in its first forward pass: one of these, by the mask.
_SOFTMAX = ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda")


class _Fusion(NamedTuple):
    """What a fusion needs.

    Attributes:
        field: the provider's switch, and the key of policy.megatron_cfg.
        can_be_built: whether this machine has it.
        needs: what it is, for the message.
        refused: Megatron refuses the setting without it. (Gradients may well be accumulated by layers of another kind.)
        local: only Megatron's local layers have the fusion.
    """

    field: str
    can_be_built: Callable[[], bool]
    needs: str
    refused: bool
    local: bool = False


def _has_gradient_accumulation() -> bool:
    return importlib.util.find_spec(_EXTENSION) is not None


def _has_masked_softmax() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in _SOFTMAX)


def _has_permutation() -> bool:
    # (the name that Megatron asks itself: None where Transformer Engine is missing or too old)
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    return getattr(moe, "fused_permute", None) is not None


def _has_rotation() -> bool:
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    return getattr(rope, "fused_apply_rotary_pos_emb", None) is not None


_FUSIONS = (
    _Fusion(
        "gradient_accumulation_fusion", _has_gradient_accumulation, f"APEX's {_EXTENSION} for its output layer", False
    ),
    _Fusion(
        "masked_softmax_fusion", _has_masked_softmax, f"APEX's {_SOFTMAX[1]} for its local attention", False, local=True
    ),
    _Fusion("moe_permute_fusion", _has_permutation, "Transformer Engine for it", True),
    _Fusion("apply_rope_fusion", _has_rotation, "Transformer Engine for it", True),
)


def refused_fusions() -> dict[str, str]:
    """The fusions that Megatron refuses on this machine, as keys of policy.megatron_cfg, and what each needs.

    Raises:
        ImportError: megatron-core is not installed.
    """
    return {fusion.field: fusion.needs for fusion in _FUSIONS if fusion.refused and not fusion.can_be_built()}


def without_missing_fusions(model_cfg: Any, given: Collection[str] = ()) -> None:
    """Switch a provider's defaults off where they cannot be built.

    Args:
        model_cfg: the model provider, changed in place.
        given: fields whose value the user gave: that is honoured.
    """
    for fusion in _FUSIONS:
        if fusion.field in given or not getattr(model_cfg, fusion.field, False) or fusion.can_be_built():
            continue
        if fusion.local and getattr(model_cfg, "transformer_impl", None) != "local":
            continue
        setattr(model_cfg, fusion.field, False)
        logger.info("%s is off: Megatron needs %s, which is not installed", fusion.field, fusion.needs)
