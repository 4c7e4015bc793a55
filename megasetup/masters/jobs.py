"""The copies of a plan as copy jobs: which tensor is written by which job, and what becomes of each copy.

All is done by columns (all addresses, then all sizes, ...) and by index, because a call a tensor, a hundred thousand
times over, would cost more than the copying.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megasetup.kernels import CopyJob
from megasetup.kernels.rows import kind_of
from megasetup.masters.layout import WeightCopies


class Columns(NamedTuple):
    """One property of all tensors each, gathered at C speed: the weights first, then their copies in order.

    Attributes:
        address: where each lies; 0 without memory.
        elements: how many each has.
        dtype: of each.
        device: index of each one's CUDA device, -1 on the CPU.
    """

    address: list[int]
    elements: list[int]
    dtype: list[torch.dtype]
    device: list[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], odd: set[type]) -> Columns:
        if odd:  # these may have no address to ask for
            addresses = [0 if type(tensor) in odd else tensor.data_ptr() for tensor in tensors]
        else:
            addresses = list(map(torch.Tensor.data_ptr, tensors))
        return cls(
            addresses,
            list(map(torch.Tensor.numel, tensors)),
            list(map(operator.attrgetter("dtype"), tensors)),
            list(map(torch.Tensor.get_device, tensors)),
        )


OWN_MEMORY, EMPTY = -1, -2


class Jobs:
    """The copy jobs of a plan, and what became of each copy.

    A copy is known here by its index among all tensors.

    Attributes:
        problems: what is wrong with a copy, as text.
        home: for each copy the copy whose memory it is, itself when it is to be written; OWN_MEMORY for one that is
            the weight's own memory, EMPTY for one without elements.
        written: copies that are to be written.
        weights: the weight of each of those.
        levels: the level that each of those is written under.
        by_level: copies by their level.
        jobs: copy jobs by the index of the device where their weights lie.
        targets: for each of those, the (near, far) copies that it writes, -1 for none.
    """

    def __init__(self, copies: Sequence[WeightCopies], tensors: Sequence[torch.Tensor], columns: Columns) -> None:
        self.problems: list[str] = []
        self.home = [EMPTY] * len(tensors)
        self.written: list[int] = []
        self.weights: list[int] = []
        self.levels: list[int] = []
        self.by_level: dict[int, list[int]] = {}
        self.jobs: dict[int, list[CopyJob]] = {}
        self.targets: dict[int, list[tuple[int, int]]] = {}
        addresses, elements, dtypes, devices = columns
        home, written, by_level = self.home, self.written, self.by_level
        good: set[tuple[int, torch.dtype, torch.dtype, int, int]] = set()
        at = len(copies)
        # The columns go on with the copies, which `at` counts through.
        for weight, (entry, source_address, count, source_dtype, source_device) in enumerate(
            zip(copies, addresses, elements, dtypes, devices, strict=False)
        ):
            near = far = -1
            more: list[int] = []
            for level, copy in entry.levels:
                address, dtype, device = addresses[at], dtypes[at], devices[at]
                of_level = by_level.get(level)
                if of_level is None:
                    by_level[level] = of_level = []
                of_level.append(at)
                if elements[at] != count:
                    self.problems.append(
                        f"{entry.name}, level {level}: {elements[at]:,} elements, but the weight has {count:,}: the "
                        "optimizer was built for another model or another sharding; build it again from this model"
                    )
                elif count:
                    traits = (level, source_dtype, dtype, source_device, device)
                    if traits not in good:
                        found = _trait_problems(level, entry.source, copy)
                        self.problems += [f"{entry.name}, level {level}: {problem}" for problem in found]
                        if not found:
                            good.add(traits)
                    if address == source_address and dtype is source_dtype:
                        home[at] = OWN_MEMORY
                    elif near >= 0 and address == addresses[near] and dtype is dtypes[near]:
                        home[at] = near
                    elif far >= 0 and address == addresses[far] and dtype is dtypes[far]:
                        home[at] = far
                    elif more and (same := [m for m in more if address == addresses[m] and dtype is dtypes[m]]):
                        home[at] = same[0]
                    else:
                        home[at] = at
                        written.append(at)
                        self.weights.append(weight)
                        self.levels.append(level)
                        if device == source_device and near < 0:
                            near = at
                        elif device != source_device and far < 0:
                            far = at
                        else:
                            more.append(at)
                at += 1
            if near >= 0 or far >= 0:
                self._add(source_device, entry.source, tensors, near, far)
                for other in more:
                    self._add(
                        source_device,
                        entry.source,
                        tensors,
                        *((other, -1) if devices[other] == source_device else (-1, other)),
                    )

    def _add(self, device: int, source: torch.Tensor, tensors: Sequence[torch.Tensor], near: int, far: int) -> None:
        self.jobs.setdefault(device, []).append(
            CopyJob(source, tensors[near] if near >= 0 else None, tensors[far] if far >= 0 else None)
        )
        self.targets.setdefault(device, []).append((near, far))


def _trait_problems(level: int, source: torch.Tensor, copy: torch.Tensor) -> list[str]:
    """What forbids a copy of this level, dtype and device for a weight of that dtype and device."""
    problems = []
    try:
        kind_of(source.dtype, copy.dtype)
    except TypeError as error:
        problems.append(str(error))
    if level not in (1, 2, 3):
        problems.append("there are levels 1, 2 and 3 only")
    elif source.device.type not in ("cpu", "cuda"):
        problems.append(f"its weight is on {source.device}: load it onto a CUDA device or the CPU first")
    elif level == 1 and copy.device != source.device:
        problems.append(
            f"it is on {copy.device}, its weight on {source.device}: level 1 lies where the weight does; bring it back "
            "first (optimizer.restore_from_cpu() after an offload_to_cpu(), or move the model back)"
        )
    elif copy.device not in (source.device, torch.device("cpu")):
        problems.append(
            f"it is on {copy.device}, its weight on {source.device}: a copy lies on the weight's device or on the CPU"
        )
    return problems


class LevelSize(NamedTuple):
    """What one level holds, and what of it is written.

    Attributes:
        tensors: copies of this level.
        elements: their elements.
        shared: how many of them are written under another level, or not at all.
        bytes: bytes written.
        far_bytes: of those, the bytes written on the host for weights on a GPU.
        wire_bytes: what must cross the wire for those, in the weights' own dtypes.
    """

    tensors: int
    elements: int
    shared: int
    bytes: int
    far_bytes: int
    wire_bytes: int


def level_sizes(jobs: Jobs, columns: Columns) -> dict[int, LevelSize]:
    elements, dtypes, devices = columns.elements, columns.dtype, columns.device
    tallies = {level: [0, 0, 0, 0] for level in jobs.by_level}
    for at, weight, level in zip(jobs.written, jobs.weights, jobs.levels, strict=True):
        tally = tallies[level]
        size = elements[at] * dtypes[at].itemsize
        tally[0] += 1
        tally[1] += size
        if devices[at] != devices[weight]:
            tally[2] += size
            tally[3] += elements[weight] * dtypes[weight].itemsize
    return {
        level: LevelSize(
            len(of_level),
            sum(map(elements.__getitem__, of_level)),
            len(of_level) - tallies[level][0],
            *tallies[level][1:],
        )
        for level, of_level in sorted(jobs.by_level.items())
    }
