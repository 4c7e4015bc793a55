"""Which parameters are stepped on the host, chosen as Megatron's class chooses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class OnHost:
    """A parameter that the CPU optimizer steps, and what its bucket must be alike in.

    Attributes:
        param: the hybrid optimizer's parameter, wherever it lies.
        dtype: of what is stepped for it.
        group: the index of its param group.
        is_copied: whether that is a copy; else the parameter itself is stepped.
    """

    param: torch.Tensor
    dtype: torch.dtype
    group: int
    is_copied: bool

    @property
    def kind(self) -> tuple[int, torch.device, torch.dtype, bool]:
        return (self.group, self.param.device, self.dtype, self.is_copied)


def tensors_of(params: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of what an optimizer is given: tensors, (name, tensor) pairs or groups."""
    found: list[torch.Tensor] = []
    for item in params:
        held = item["params"] if isinstance(item, dict) else [item]
        for one in [held] if isinstance(held, torch.Tensor) else held:
            found.append(one[1] if isinstance(one, tuple) else one)
    return found


def chosen(
    groups: Sequence[dict[str, Any]], fraction: float, *, in_fp32: bool
) -> tuple[list[OnHost], list[torch.Tensor]]:
    """Which parameters are stepped on the host, and which of the others have an FP32 copy.

    In the groups' order, until the fraction of all elements on GPUs is reached.

    Args:
        groups: the hybrid optimizer's param groups.
        fraction: what share of the elements on GPUs is offloaded.
        in_fp32: whether 16-bit parameters are stepped as FP32 copies.
    """
    threshold = sum(param.numel() for param in tensors_of(groups) if param.is_cuda) * fraction
    offloaded = 0
    on_host, copied_on_gpu = [], []
    for index, group in enumerate(groups):
        for param in group["params"]:
            widened = in_fp32 and param.dtype != torch.float32
            is_offloaded = param.is_cuda and offloaded < threshold
            if is_offloaded:
                offloaded += param.numel()
            if is_offloaded or not param.is_cuda:
                dtype = torch.float32 if widened else param.dtype
                on_host.append(OnHost(param, dtype, index, is_offloaded or widened))
            elif widened:
                copied_on_gpu.append(param)
    return on_host, copied_on_gpu
