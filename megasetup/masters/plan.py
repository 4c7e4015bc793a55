"""SyncPlan: the copies of one optimizer as one list of copy jobs, checked before anything is written.

Everything that can be wrong is looked for over all weights at once and reported together; only a plan without a problem
can run, and only as long as no tensor has moved.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megasetup.kernels import Comparison, Transfer, TransferStats
from megasetup.masters.checks import memory_problems, not_strided, overlaps
from megasetup.masters.jobs import EMPTY, OWN_MEMORY, Columns, Jobs, level_sizes
from megasetup.masters.layout import Layout, Level, Levels, WeightCopies, read_layout
from megasetup.masters.report import LevelReport, SyncReport, shortened

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


class PlanError(ValueError):
    """A plan that cannot be carried out. Nothing has been written. `problems` holds every finding, one string each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        super().__init__("\n".join([f"{count}, nothing was written:", *shortened([f"  {p}" for p in problems])]))


class Finding(NamedTuple):
    """How one copy compares with its weight.

    Attributes:
        weight: index into the plan's `copies`.
        level: which copy.
        copy: the copy itself.
        comparison: of the copy with the weight.
    """

    weight: int
    level: Level
    copy: torch.Tensor
    comparison: Comparison


def plan_sync(optimizer: Any, model: Any = None, *, levels: Levels = "offloaded") -> SyncPlan:
    """Plan refreshing every FP32 copy that an optimizer keeps from the model's weights. Writes nothing.

    Args:
        optimizer: a Megatron optimizer (DistributedOptimizer, ChainedOptimizer, Float16OptimizerWithFloat16Params,
            FP32Optimizer) or a bare HybridDeviceOptimizer.
        model: the model's chunks, for the weights' names. Default: the chunks that the optimizer knows.
        levels: "offloaded" leaves sub-optimizers without a hybrid optimizer untouched; "all" also refreshes their
            level 1.

    Returns:
        A checked plan. It may be run any number of times as long as no tensor moves. It holds on to the tensors: drop
        it when the optimizer goes.

    Raises:
        PlanError: the plan cannot be carried out; a ValueError that lists all that is wrong.
        TypeError: not a Megatron optimizer, or not a model.
    """
    start = time.perf_counter()
    return SyncPlan(read_layout(optimizer, model, levels=levels), start)


class SyncPlan:
    """Checked copy jobs from weights to their copies. Made by plan_sync, or from tensors by SyncPlan.from_copies.

    Plans share nothing: two threads may run two plans at once. One plan is run by one thread at a time.

    Attributes:
        copies: the weights and their copies, in the optimizer's order.
        layout: all that was read from the optimizer.
        planning_seconds: wall time of reading and checking.
    """

    def __init__(self, layout: Layout, started: float) -> None:
        self.layout = layout
        self.copies = layout.copies
        sources = [entry.source for entry in self.copies]
        copies = [copy for entry in self.copies for _, copy in entry.levels]
        self._tensors = [*sources, *copies]
        strange = not_strided(self._tensors)
        if strange:  # these cannot even be asked for what the other checks need
            labels = self._labels()
            raise PlanError([*layout.problems, *(f"{labels[index]}: {problem}" for index, problem in strange)])
        kinds: set[type[torch.Tensor]] = set(map(type, self._tensors))
        odd: set[type] = {kind for kind in kinds if kind.__torch_dispatch__ is not _PLAIN_DISPATCH}
        columns = Columns.of(self._tensors, odd)
        self._addresses, self._elements, self._dtypes = columns.address, columns.elements, columns.dtype
        self._parameter_addresses = list(map(torch.Tensor.data_ptr, layout.parameters))

        problems = list(layout.problems)
        unusable = memory_problems(self._tensors, columns, odd)
        if unusable:
            labels = self._labels()
            problems += [f"{labels[index]}: {problem}" for index, problem in unusable]
        jobs = Jobs(self.copies, self._tensors, columns)
        problems += jobs.problems
        if not problems:  # addresses mean nothing where sizes are wrong
            problems = overlaps(self.copies, self._tensors, jobs, columns)
        if problems:
            raise PlanError(problems)

        self._jobs = jobs
        self._transfers = [Transfer(of_device, of_device[0].source.device) for of_device in jobs.jobs.values()]
        self._sizes = level_sizes(jobs, columns)
        refreshed = set(jobs.weights)
        self._weights = len(refreshed)
        self._weight_elements = sum(map(columns.elements.__getitem__, refreshed))
        self.planning_seconds = time.perf_counter() - started

    @classmethod
    def from_copies(cls, copies: Iterable[WeightCopies]) -> SyncPlan:
        """Plan from tensors, for weights that no Megatron optimizer holds.

        Args:
            copies: each weight and its copies; see WeightCopies for shapes and dtypes. Level 1 lies on the weight's
                device, levels 2 and 3 there or on the CPU.

        Raises:
            PlanError: the plan cannot be carried out; a ValueError that lists all that is wrong.
        """
        start = time.perf_counter()
        return cls(Layout(copies=list(copies)), start)

    def run(self) -> SyncReport:
        """Write every copy. Returns when the last byte is written.

        Raises:
            RuntimeError: a tensor has moved since the plan was made, and nothing has been written; or a CUDA call
                failed, and copies are partly written: running again repairs them.
        """
        self._check_unmoved()
        start = time.perf_counter()
        stats = [transfer.run() for transfer in self._transfers]
        return self._report(stats, time.perf_counter() - start)

    def compare(self) -> list[Finding]:
        """Compare every copy with its weight. Writes nothing.

        Returns:
            One Finding a weight and level, in order. Copies that share memory are compared once.

        Raises:
            RuntimeError: a tensor has moved since the plan was made; or a CUDA call failed.
        """
        self._check_unmoved()
        alike = Comparison(0, 0, -1, -1)
        found = {OWN_MEMORY: alike, EMPTY: alike}
        for targets, transfer in zip(self._jobs.targets.values(), self._transfers, strict=True):
            for (near, far), result in zip(targets, transfer.compare(), strict=True):
                if result.device is not None:
                    found[near] = result.device
                if result.host is not None:
                    found[far] = result.host
        homes = iter(self._jobs.home[len(self.copies) :])
        return [
            Finding(index, level, copy, found[next(homes)])
            for index, entry in enumerate(self.copies)
            for level, copy in entry.levels
        ]

    def _labels(self) -> list[str]:
        """What to call each of all tensors in an error: the weights first, then their copies."""
        weights = [entry.name for entry in self.copies]
        copies = [f"{entry.name}, level {level}" for entry in self.copies for level, _ in entry.levels]
        return weights + copies

    def _check_unmoved(self) -> None:
        moved = [f"{anchor} holds other tensors" for anchor in self.layout.anchors if not anchor.holds()]
        addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        elements = list(map(torch.Tensor.numel, self._tensors))
        if addresses != self._addresses or elements != self._elements:
            planned = zip(self._labels(), self._addresses, self._elements, strict=True)
            now = zip(addresses, elements, strict=True)
            moved += [
                f"{label}: {count:,} elements at {address:#x} are now {new_count:,} at {new_address:#x}"
                for (label, address, count), (new_address, new_count) in zip(planned, now, strict=True)
                if (address, count) != (new_address, new_count)
            ]
        # In the same place, but with elements of another kind or in another order.
        dtypes = list(map(operator.attrgetter("dtype"), self._tensors))
        if dtypes != self._dtypes:
            moved += [
                f"{label}: {was} is now {new}"
                for label, was, new in zip(self._labels(), self._dtypes, dtypes, strict=True)
                if was != new
            ]
        if not all(map(torch.Tensor.is_contiguous, self._tensors)):
            moved += [
                f"{label}: is now of shape {tuple(tensor.shape)} and strides {tensor.stride()}, which is not contiguous"
                for label, tensor in zip(self._labels(), self._tensors, strict=True)
                if not tensor.is_contiguous()
            ]
        parameters = list(map(torch.Tensor.data_ptr, self.layout.parameters))
        if parameters != self._parameter_addresses:
            plain = [entry for entry in self.copies if not entry.quantised]
            moved += [
                f"{entry.name}: the model's parameter was bound to other memory"
                for entry, was, is_ in zip(plain, self._parameter_addresses, parameters, strict=True)
                if was != is_
            ]
        if not all(map(torch.Tensor.is_contiguous, self.layout.parameters)):
            plain = [entry for entry in self.copies if not entry.quantised]
            moved += [
                f"{entry.name}: the model's parameter is now of shape {tuple(parameter.shape)} and strides "
                f"{parameter.stride()}, which is not contiguous"
                for entry, parameter in zip(plain, self.layout.parameters, strict=True)
                if not parameter.is_contiguous()
            ]
        if moved:
            listed = "\n".join(shortened([f"  {line}" for line in moved]))
            raise RuntimeError(f"tensors moved since this plan was made, nothing was written; plan again:\n{listed}")

    def _report(self, stats: Sequence[TransferStats], seconds: float) -> SyncReport:
        device_seconds = sum(entry.device_seconds for entry in stats)
        wire_bandwidth = max((entry.wire_bandwidth for entry in stats), default=0.0)
        levels = []
        for level, size in self._sizes.items():
            spent = seconds if size.far_bytes else device_seconds
            busy = size.bytes > 0 and spent > 0
            crosses = busy and size.wire_bytes > 0 and wire_bandwidth > 0
            levels.append(
                LevelReport(
                    level=level,
                    tensors=size.tensors,
                    elements=size.elements,
                    bytes=size.bytes,
                    shared=size.shared,
                    seconds=spent if busy else 0.0,
                    bandwidth=size.bytes / spent if busy else 0.0,
                    wire_share=size.wire_bytes / wire_bandwidth / spent if crosses else None,
                )
            )
        return SyncReport(
            levels=tuple(levels),
            weights=self._weights,
            elements=self._weight_elements,
            bytes=sum(level.bytes for level in levels),
            seconds=seconds,
            planning_seconds=self.planning_seconds,
            staged_elements=sum(entry.staged_elements for entry in stats),
            direct_elements=sum(entry.direct_elements for entry in stats),
            wire_bytes=sum(entry.staged_wire_bytes + entry.direct_wire_bytes for entry in stats),
            wire_bandwidth=wire_bandwidth,
            threads=max((entry.threads for entry in stats), default=0),
            untouched=tuple(self.layout.untouched),
            quantised=tuple(map(str, self.layout.quantised)),
            notes=tuple((entry.name, entry.note) for entry in self.copies if entry.note),
        )
