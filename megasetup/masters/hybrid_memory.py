"""The host memory of a hybrid optimizer: clones and gradient buffers in one arena, Adam's moments in another.

The first arena is pinned, for the wire; the second is not, since nothing but the CPU optimizer touches it. Both are
touched by all workers when the optimizer is made, at the same time, so that no step waits for the kernel to find and
clear pages: torch would ask for the gradient buffers and for the moments one by one within the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from megasetup.masters.arena import PinnedArena
from megasetup.masters.hybrid_buckets import Places, place

# The state of torch's Adam and AdamW that has a tensor's size.
MOMENTS = ("exp_avg", "exp_avg_sq")


class Demand(NamedTuple):
    """The masters of one bucket: their shapes, all of one dtype."""

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @property
    def places(self) -> Places:
        return place([shape.numel() for shape in self.shapes], self.dtype)


class Cut(NamedTuple):
    """One run of host memory and the tensors in it, one a shape."""

    flat: torch.Tensor
    tensors: tuple[torch.Tensor, ...]


class BucketMemory(NamedTuple):
    """The host memory of one bucket; the moments are empty where the CPU optimizer has none."""

    masters: Cut
    grads: Cut
    moments: tuple[Cut, ...]


def _cut(arena: PinnedArena, demand: Demand) -> Cut:
    starts, elements = demand.places
    flat = arena.empty(elements, demand.dtype)
    # By DLPack each gets a storage of its own over its own bytes: whoever saves or copies one of them with its storage
    # must not take the whole bucket along.
    return Cut(
        flat,
        tuple(
            from_dlpack(to_dlpack(flat[start : start + shape.numel()].view(shape)))
            for start, shape in zip(starts, demand.shapes, strict=True)
        ),
    )


def _bytes(demands: Sequence[Demand], copies: int) -> int:
    return PinnedArena.nbytes_for([(demand.places.elements, demand.dtype) for demand in demands for _ in range(copies)])


def allocate(
    demands: Sequence[Demand], device: torch.device, *, pin_masters: bool, pin_grads: bool, moments: bool
) -> list[BucketMemory]:
    """Host memory for every bucket, zeroed.

    Args:
        demands: one a bucket.
        device: the GPU that reads and writes it; the CPU where there is none.
        pin_masters, pin_grads: what to pin.
        moments: whether to make Adam's moments.

    Raises:
        ArenaError: it cannot be had or pinned; the message says how much, how much is free and what to do.
    """
    with ThreadPoolExecutor(1) as beside:
        state = beside.submit(PinnedArena, _bytes(demands, len(MOMENTS)) if moments else 0, device=device, pin=False)
        if pin_masters == pin_grads:
            of_masters = of_grads = PinnedArena(_bytes(demands, 2), device=device, pin=pin_masters)
        else:
            of_masters = PinnedArena(_bytes(demands, 1), device=device, pin=pin_masters)
            of_grads = PinnedArena(_bytes(demands, 1), device=device, pin=pin_grads)
        of_moments = state.result()
    return [
        BucketMemory(
            _cut(of_masters, demand),
            _cut(of_grads, demand),
            tuple(_cut(of_moments, demand) for _ in MOMENTS) if moments else (),
        )
        for demand in demands
    ]
