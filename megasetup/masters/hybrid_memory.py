"""The host memory of a hybrid optimizer: masters and gradient buffers in one pinned arena, Adam's moments in another.

A gradient is needed until its bucket has been stepped, so that a ring of buffers serves all buckets: a few of them
instead of 4 bytes an element, which would have to be pinned, and short enough to stay in the processor's last cache.

The first arena is touched by all workers when the optimizer is made. The moments, twice as much, are populated in the
background from when the driver starts to pin, which it does with one thread, and the first step waits for the rest.

Tensors can leave an arena: torch.multiprocessing moves what it sends into shared memory, in place. So each knows its
home, and is brought back before a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from megasetup.masters.arena import ArenaError, PinnedArena
from megasetup.masters.hybrid_buckets import Places, place
from megasetup.masters.hybrid_slices import MOMENTS
from megasetup.masters.populating import Populating


class Demand(NamedTuple):
    """The masters of one sub-optimizer: their shapes, all of one dtype."""

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @property
    def places(self) -> Places:
        return place([shape.numel() for shape in self.shapes], self.dtype)


class Cut(NamedTuple):
    """One run of host memory and the tensors in it, one a shape."""

    flat: torch.Tensor
    tensors: tuple[torch.Tensor, ...]


class Home(NamedTuple):
    """Where a tensor belongs: its elements are those of `flat` from `start` on, and begin at `address`."""

    tensor: torch.Tensor
    address: int
    flat: torch.Tensor
    start: int

    @property
    def is_left(self) -> bool:
        """Whether the tensor's values lie elsewhere."""
        return self.tensor.data_ptr() != self.address

    def bring_back(self) -> None:
        """Have the tensor lie here, with the values that it has."""
        place = _own_storage(self.flat, self.start, self.tensor.shape)
        place.copy_(self.tensor)
        self.tensor.data = place


class HostMemory(NamedTuple):
    """What was allocated.

    Attributes:
        masters: one a demand.
        moments: one a demand and moment; empty where the CPU optimizer has none.
        ring: buffers of bytes, through which the gradients pass.
        arenas: what all of it lies in.
        populating: what has the moments' pages be there.
    """

    masters: list[Cut]
    moments: list[tuple[Cut, ...]]
    ring: list[torch.Tensor]
    arenas: tuple[PinnedArena, ...]
    populating: Populating

    @property
    def homes(self) -> list[Home]:
        """Of all masters and moments."""
        cuts = [*self.masters, *(cut for cuts in self.moments for cut in cuts)]
        return [
            Home(tensor, tensor.data_ptr(), cut.flat, (tensor.data_ptr() - cut.flat.data_ptr()) // tensor.itemsize)
            for cut in cuts
            for tensor in cut.tensors
            if tensor.numel()
        ]


def _own_storage(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """A part of flat memory as a tensor with a storage of its own, over its own bytes.

    Whoever saves one tensor with its storage must not take the whole bucket along, and whoever moves one tensor's
    storage must leave the bucket's where it is.
    """
    whole: torch.Tensor = from_dlpack(to_dlpack(flat[start : start + shape.numel()].view(shape)))
    return whole


def _cut(arena: PinnedArena, demand: Demand) -> Cut:
    starts, elements = demand.places
    flat = arena.empty(elements, demand.dtype)
    tensors = [_own_storage(flat, start, shape) for start, shape in zip(starts, demand.shapes, strict=True)]
    return Cut(flat, tuple(tensors))


def _sizes(demands: Sequence[Demand]) -> list[tuple[int, torch.dtype]]:
    return [(demand.places.elements, demand.dtype) for demand in demands]


def allocate(
    demands: Sequence[Demand],
    ring: Sequence[int],
    device: torch.device,
    *,
    pin_masters: bool,
    pin_grads: bool,
    moments: bool,
) -> HostMemory:
    """Host memory for every sub-optimizer, zeroed.

    Args:
        demands: one a sub-optimizer.
        ring: bytes of each buffer of the ring.
        device: the GPU that reads and writes it; the CPU where there is none.
        pin_masters, pin_grads: what to pin.
        moments: whether to make Adam's moments.

    Raises:
        ArenaError: it cannot be had or pinned; the message says how much, how much is free and what to do.
    """
    masters, buffers = _sizes(demands), [(nbytes, torch.uint8) for nbytes in ring]
    if pin_masters == pin_grads:
        of_masters = of_grads = PinnedArena(PinnedArena.nbytes_for([*masters, *buffers]), device=device, pin=False)
    else:
        of_masters = PinnedArena(PinnedArena.nbytes_for(masters), device=device, pin=False)
        of_grads = PinnedArena(PinnedArena.nbytes_for(buffers), device=device, pin=False)
    of_moments = PinnedArena(
        PinnedArena.nbytes_for([size for size in masters for _ in MOMENTS]) if moments else 0,
        device=device,
        pin=False,
        touch=False,
    )
    populating = of_moments.populate()
    try:
        for arena, pin in ((of_masters, pin_masters), (of_grads, pin_grads)):
            if pin:
                arena.pin()
    except ArenaError:
        populating.stop()
        del of_masters, of_grads, of_moments, arena  # the traceback would keep them mapped
        raise
    return HostMemory(
        [_cut(of_masters, demand) for demand in demands],
        [tuple(_cut(of_moments, demand) for _ in MOMENTS) if moments else () for demand in demands],
        [of_grads.empty(nbytes, torch.uint8) for nbytes in ring],
        (of_masters, of_moments) if of_masters is of_grads else (of_masters, of_grads, of_moments),
        populating,
    )
