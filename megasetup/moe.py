"""Finds the MoE routers of a model, and keeps their expert bias in FP32.

A router adds its expert bias to every score and moves it by tiny steps; in BF16 both the steps and the token counts
that decide them are rounded away. Megatron converts the whole model to BF16 and then casts the bias back, router by
router, from what BF16 left of it. Here every router is found wherever it sits, values that were FP32 keep all their
bits, and what has to be recast is recast in one call for each device and dtype. Megatron is imported when it is first
needed, not with this file.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megasetup import kernels

# The FP32 state of a router, by the names of Megatron's TopKRouter.
BUFFER_NAMES = ("expert_bias", "qb_beta", "qb_beta_accum", "local_tokens_per_expert")

_LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


def _is_router(module: nn.Module) -> bool:
    # If Megatron's router file was never imported, nothing can be an instance of its class.
    router_file = sys.modules.get("megatron.core.transformer.moe.router")
    if router_file is not None and isinstance(module, router_file.Router):
        return True
    # Routers of other families keep Megatron's contract without its class.
    return hasattr(type(module), "_maintain_float32_expert_bias") or "expert_bias" in module._buffers


def find_routers(model: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every MoE router of a model, whatever it is wrapped in or nested in.

    A router is a Megatron Router, or any module with a `_maintain_float32_expert_bias` method or an `expert_bias`
    buffer. All submodules are walked, so that dense-to-MoE layers, MTP layers, hybrid stacks and language models inside
    vision or omni models are reached without knowing their attribute names.

    Args:
        model: a module, or a sequence of model chunks.

    Yields:
        (name, router), each router once even when it is shared. The name is the one of `named_modules`; for a sequence
        it begins with the index of the chunk ("0.module.decoder.layers.3.mlp.router").

    Raises:
        TypeError: model is neither a module nor a sequence of modules.
    """
    if isinstance(model, nn.Module):
        chunks = {"": model}
    elif isinstance(model, Sequence) and all(isinstance(chunk, nn.Module) for chunk in model):
        chunks = {str(index): chunk for index, chunk in enumerate(model)}
    else:
        raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module or a list of them (model chunks)")
    seen: set[nn.Module] = set()
    for prefix, chunk in chunks.items():
        for name, module in chunk.named_modules(memo=seen, prefix=prefix):
            if _is_router(module):
                yield name, module


def _named_buffers(model: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for _, router in find_routers(model):
        for name in BUFFER_NAMES:
            # None, or absent, where the router's kind of load balancing does not use it.
            buffer = router._buffers.get(name)
            if buffer is not None:
                yield router, name, buffer


def low_precision_buffers(model: nn.Module | Sequence[nn.Module]) -> list[torch.Tensor]:
    """The router buffers that ought to be FP32 and are BF16 or FP16, each once, in the order of `find_routers`.

    Args:
        model: a module, or a sequence of model chunks.

    Raises:
        TypeError: model is neither a module nor a sequence of modules.
    """
    found = {id(buffer): buffer for _, _, buffer in _named_buffers(model) if buffer.dtype in _LOW_PRECISION}
    return list(found.values())


def _widened(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return kernels.widened(buffers)
    except ValueError:
        # A buffer whose elements are not side by side is rare, so that no time is spent on looking for one before.
        if all(buffer.is_contiguous() for buffer in buffers):
            raise
    return kernels.widened([buffer.contiguous() for buffer in buffers])


def recast_buffers(buffers: Sequence[torch.Tensor]) -> None:
    """Turn buffers of one device, all BF16 or all FP16, into FP32, exactly: one launch for all of them.

    Each tensor object stays what it is and where it is registered; its data is replaced. The new data share one
    allocation, in which each buffer begins on 16 bytes. On the meta device only the dtype changes.

    Args:
        buffers: tensors of shape [experts], all bfloat16 or all float16, on one device. The number of experts may
            differ.

    Raises:
        TypeError: buffers of several dtypes, or of one that is neither bfloat16 nor float16.
        ValueError: buffers on several devices, or one that has not one dimension.

    Nothing has been changed when it raises.
    """
    kernels.set_data(buffers, _widened(buffers))


def recast_expert_bias(model: nn.Module | Sequence[nn.Module]) -> int:
    """Turn every router's expert_bias, qb_beta, qb_beta_accum and local_tokens_per_expert into FP32.

    BF16 and FP16 buffers are widened, all of one device and dtype in one call, and stay the same tensor objects. FP32
    buffers are left alone, so that a second call does nothing.

    Args:
        model: a module, or a sequence of model chunks.

    Returns:
        How many buffers were recast.

    Raises:
        TypeError: model is neither a module nor a sequence of modules.
        ValueError: a buffer that has not one dimension. Nothing has been changed then.
    """
    buffers = low_precision_buffers(model)
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for buffer in buffers:
        alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    # All is widened before anything is changed, so that an error in one group leaves the others as they were.
    widened = [(of_one_kind, _widened(of_one_kind)) for of_one_kind in alike.values()]
    for of_one_kind, targets in widened:
        kernels.set_data(of_one_kind, targets)
    return len(buffers)


@functools.cache
def _moe_float16_module() -> type[nn.Module]:
    from megatron.core.transformer.module import Float16Module

    class MoEFloat16Module(Float16Module):  # type: ignore[misc]
        """Float16Module whose routers keep their expert bias, and what it is computed from, in FP32.

        Router buffers that are FP32 before the wrap are put back as they were, the same tensor objects with all their
        bits; those that are BF16 or FP16 are recast.

        Args:
            config: a Megatron TransformerConfig with bf16 or fp16 set.
            module: the model (chunk) to convert and wrap.

        Raises:
            Exception: the config sets neither bf16 nor fp16 (Float16Module's own error; the module is untouched).
        """

        def __init__(self, config: Any, module: nn.Module) -> None:
            # Float16Module converts everything to 16 bits at once. The FP32 tensors are set aside, because no cast
            # brings back the bits that this loses.
            float32 = [kept for kept in _named_buffers(module) if kept[2].dtype == torch.float32]
            super().__init__(config, module)
            for router, name, buffer in float32:
                router._buffers[name] = buffer
            self.re_enable_float32_expert_bias()

        def re_enable_float32_expert_bias(self) -> None:
            """Recast the expert bias of every router in the wrapped module to FP32: one call a device and dtype."""
            recast_expert_bias(self.module)

    # Its public address, by which pickle and tracebacks name it.
    MoEFloat16Module.__qualname__ = "MoEFloat16Module"
    return MoEFloat16Module


def __getattr__(name: str) -> Any:
    # Its base class is Megatron's, so the class is made when it is first asked for.
    if name == "MoEFloat16Module":
        return _moe_float16_module()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
