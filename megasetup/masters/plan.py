"""SyncPlan: the copies of one optimizer as one list of copy jobs, checked before anything is written.

Addresses are all that the kernels take, so a wrong one would write over someone else's memory. Everything that can be
wrong is therefore looked for here, over all weights at once, and reported together; only a plan without a problem can
run. The checks go by columns (all addresses, then all sizes, ...) because a call a tensor, a hundred thousand times
over, would cost more than the copying.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megasetup.kernels import Comparison, CopyJob, Transfer, TransferStats
from megasetup.kernels.rows import kind_of
from megasetup.masters.layout import Layout, Level, Levels, WeightCopies, read_layout
from megasetup.masters.report import LevelReport, SyncReport, shortened

_CPU = torch.device("cpu")
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


class _Columns(NamedTuple):
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
    def of(cls, tensors: Sequence[torch.Tensor], odd: set[type]) -> _Columns:
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


_OWN_MEMORY, _EMPTY = -1, -2


class _Jobs:
    """The copy jobs of a plan, and what became of each copy.

    A copy is known here by its index among all tensors.

    Attributes:
        problems: what is wrong with a copy, as text.
        home: for each copy the copy whose memory it is, itself when it is to be written; _OWN_MEMORY for one that is
            the weight's own memory, _EMPTY for one without elements.
        written: copies that are to be written.
        weights: the weight of each of those.
        levels: the level that each of those is written under.
        by_level: copies by their level.
        jobs: copy jobs by the index of the device where their weights lie.
        targets: for each of those, the (near, far) copies that it writes, -1 for none.
    """

    def __init__(self, copies: Sequence[WeightCopies], tensors: Sequence[torch.Tensor], columns: _Columns) -> None:
        self.problems: list[str] = []
        self.home = [_EMPTY] * len(tensors)
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
                        home[at] = _OWN_MEMORY
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
        strange = _not_strided(self._tensors)
        if strange:  # these cannot even be asked for what the other checks need
            labels = self._labels()
            raise PlanError([*layout.problems, *(f"{labels[index]}: {problem}" for index, problem in strange)])
        kinds: set[type[torch.Tensor]] = set(map(type, self._tensors))
        odd: set[type] = {kind for kind in kinds if kind.__torch_dispatch__ is not _PLAIN_DISPATCH}
        columns = _Columns.of(self._tensors, odd)
        self._addresses, self._elements, self._dtypes = columns.address, columns.elements, columns.dtype
        self._parameter_addresses = list(map(torch.Tensor.data_ptr, layout.parameters))

        problems = list(layout.problems)
        unusable = _memory_problems(self._tensors, columns, odd)
        if unusable:
            labels = self._labels()
            problems += [f"{labels[index]}: {problem}" for index, problem in unusable]
        jobs = _Jobs(self.copies, self._tensors, columns)
        problems += jobs.problems
        if not problems:  # addresses mean nothing where sizes are wrong
            problems = _overlaps(self.copies, self._tensors, jobs, columns)
        if problems:
            raise PlanError(problems)

        self._jobs = jobs
        self._transfers = [Transfer(of_device, of_device[0].source.device) for of_device in jobs.jobs.values()]
        self._sizes = _level_sizes(jobs, columns)
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
        found = {_OWN_MEMORY: alike, _EMPTY: alike}
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


def _not_strided(entries: Sequence[Any]) -> list[tuple[int, str]]:
    """Entries that are no tensors, or tensors without an address and strides: (index, what is wrong)."""
    tensors_only = all(issubclass(kind, torch.Tensor) for kind in set(map(type, entries)))
    if tensors_only and set(map(operator.attrgetter("layout"), entries)) <= {torch.strided}:
        return []
    problems = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, torch.Tensor):
            kind = type(entry)
            problems.append((index, f"a {kind.__module__}.{kind.__qualname__} is not a tensor: pass a torch.Tensor"))
        elif entry.layout is not torch.strided:
            problems.append(
                (index, f"a tensor of layout {entry.layout} has no plain memory: pass a dense one (tensor.to_dense())")
            )
    return problems


def _memory_problems(tensors: Sequence[torch.Tensor], columns: _Columns, odd: set[type]) -> list[tuple[int, str]]:
    """Tensors that are not ordinary, contiguous memory: (index, what is wrong)."""
    problems = []
    if odd:
        problems += [
            (index, f"a {type(tensor).__name__} is not ordinary memory: pass the tensor that holds its values")
            for index, tensor in enumerate(tensors)
            if type(tensor) in odd
        ]
    contiguous = list(map(torch.Tensor.is_contiguous, tensors))
    if not all(contiguous):
        problems += [
            (
                index,
                f"shape {tuple(tensors[index].shape)} with strides {tensors[index].stride()} is not contiguous: pass "
                "a contiguous tensor",
            )
            for index, whole in enumerate(contiguous)
            if not whole
        ]
    for is_lazy, what, remedy in (
        (torch.Tensor.is_neg, "negated", "resolve_neg"),
        (torch.Tensor.is_conj, "conjugate", "resolve_conj"),
    ):
        if any(map(is_lazy, tensors)):
            problems += [
                (index, f"a {what} view, whose memory holds other values: hold tensor.{remedy}() in its place")
                for index, tensor in enumerate(tensors)
                if is_lazy(tensor)
            ]
    if not all(columns.address):
        problems += [
            (
                index,
                f"{columns.elements[index]:,} elements on {tensors[index].device} without memory: load the weights, "
                "or restore the storage, before planning",
            )
            for index, address in enumerate(columns.address)
            if not address and columns.elements[index] and type(tensors[index]) not in odd
        ]
    return problems


def _overlaps(
    copies: Sequence[WeightCopies], tensors: Sequence[torch.Tensor], jobs: _Jobs, columns: _Columns
) -> list[str]:
    """Copies that share memory with one another or with a weight.

    One sort over the copies' addresses finds both: of ranges in order, two that share memory imply two neighbours that
    do. CUDA and host addresses never coincide, so one pass serves all devices.
    """
    if not jobs.written:
        return []
    starts, ends = _ranges(tensors, columns, jobs.written)
    starts, order = starts.sort(stable=True)
    ends = ends[order]

    def title(place: int) -> str:
        index = int(order[place])
        return f"{copies[jobs.weights[index]].name}, level {jobs.levels[index]},"

    problems = [
        f"{title(left)} shares memory with {title(left + 1)} from address {int(starts[left + 1]):#x}: each copy needs "
        "memory of its own"
        for left in (starts[1:] < ends[:-1]).nonzero().flatten().tolist()
    ]
    low, high = _ranges(tensors, columns, range(len(copies)))
    before = torch.searchsorted(starts, high) - 1  # the last copy that starts before the weight ends
    shares = (before >= 0) & (ends[before.clamp(min=0)] > low) & (high > low)
    problems += [
        f"{title(int(before[weight]))} shares memory with the weight {copies[weight].name} at address "
        f"{int(starts[before[weight]]):#x}: a copy needs memory of its own"
        for weight in shares.nonzero().flatten().tolist()
    ]
    return problems


def _ranges(
    tensors: Sequence[torch.Tensor], columns: _Columns, indices: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """First address and address past the end of each tensor, as int64."""
    sizes = [columns.elements[index] * columns.dtype[index].itemsize for index in indices]
    starts = torch.tensor(list(map(columns.address.__getitem__, indices)), dtype=torch.int64)
    return starts, starts + torch.tensor(sizes, dtype=torch.int64)


class _LevelSize(NamedTuple):
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


def _level_sizes(jobs: _Jobs, columns: _Columns) -> dict[int, _LevelSize]:
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
        level: _LevelSize(
            len(of_level),
            sum(map(elements.__getitem__, of_level)),
            len(of_level) - tallies[level][0],
            *tallies[level][1:],
        )
        for level, of_level in sorted(jobs.by_level.items())
    }
