"""The host side of a hybrid optimizer: what is stepped there, cut into buckets and laid out in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megasetup.masters import hybrid_buckets, hybrid_memory
from megasetup.masters.hybrid_choice import OnHost
from megasetup.masters.hybrid_moments import Moments
from megasetup.masters.hybrid_slices import MOMENTS, SlicedMaster
from megasetup.masters.hybrid_traffic import Bucket, HostLane, Lane, Row, WireLane, can_be_cut, staging_for


class Settings(NamedTuple):
    """How the host side is to be made.

    Attributes:
        groups: the hybrid optimizer's param groups.
        optimizer_cls: what steps it.
        pin_masters, pin_grads: what to pin.
        bucket_elements, chunk_elements: what is stepped, and what crosses, at a time.
        buckets_ahead: buckets whose gradients are on their way while one is stepped.
    """

    groups: Sequence[dict[str, Any]]
    optimizer_cls: Any
    pin_masters: bool
    pin_grads: bool
    bucket_elements: int
    chunk_elements: int
    buckets_ahead: int

    @property
    def has_moments(self) -> bool:
        """Whether the CPU optimizer is torch's Adam or AdamW, whose first step would make the moments."""
        kind = self.optimizer_cls
        amsgrad = any(group.get("amsgrad") for group in self.groups)
        return isinstance(kind, type) and issubclass(kind, torch.optim.Adam) and not amsgrad


class HostSide(NamedTuple):
    """What was made: buckets in the order of a step, their masters still to be filled."""

    buckets: list[Bucket]
    moments: Moments
    memory: hybrid_memory.HostMemory

    @property
    def lanes(self) -> list[Lane]:
        """What moves the buckets' values, each once."""
        return list({id(bucket.lane): bucket.lane for bucket in self.buckets}.values())


class _Run(NamedTuple):
    """What is stepped at a time, still without memory: a sub-optimizer's parameters, or elements of its only one."""

    holder: int
    elements: int
    slice: tuple[int, int] | None


class _Holder(NamedTuple):
    """A sub-optimizer: what it steps, the memory of that, and what steps it by slices if it is long."""

    members: Sequence[OnHost]
    starts: tuple[int, ...]
    masters: hybrid_memory.Cut
    optimizer: torch.optim.Optimizer
    sliced: SlicedMaster | None


def make_host_side(on_host: Sequence[OnHost], settings: Settings) -> HostSide:
    """Make sub-optimizers, memory and buckets for these parameters.

    Raises:
        ArenaError: the host memory cannot be had or pinned.
    """
    members_of = _share_out(on_host, settings)
    demands = [
        hybrid_memory.Demand(tuple(entry.param.shape for entry in members), members[0].dtype)
        if members[0].is_copied
        else hybrid_memory.Demand((), members[0].dtype)
        for members in members_of
    ]
    runs = _runs(members_of, settings)
    # A bucket's buffer is free again when it has been stepped; until then the next ones are fetched.
    ring = [0] * (settings.buckets_ahead + 1)
    for index, run in enumerate(runs):
        elements = demands[run.holder].places.elements if run.slice is None else run.elements
        slot = index % len(ring)
        ring[slot] = max(ring[slot], elements * demands[run.holder].dtype.itemsize)
    devices = [entry.param.device for entry in on_host if entry.param.is_cuda]
    memory = hybrid_memory.allocate(
        demands,
        ring,
        devices[0] if devices else torch.device("cpu"),
        pin_masters=settings.pin_masters,
        pin_grads=settings.pin_grads,
        moments=settings.has_moments,
    )
    holders = _holders(members_of, demands, runs, memory, settings)
    lanes: dict[torch.device, Lane] = {
        device: WireLane(device) if device.type == "cuda" else HostLane()
        for device in {entry.param.device for entry in on_host}
    }
    buckets = [
        _bucket(
            holders[run.holder],
            run,
            memory.ring[index % len(ring)],
            lanes[holders[run.holder].members[0].param.device],
            settings,
        )
        for index, run in enumerate(runs)
    ]
    for lane in lanes.values():
        if isinstance(lane, WireLane):
            lane.staging_elements = staging_for(bucket for bucket in buckets if bucket.lane is lane)
    places = {
        master: dict(zip(MOMENTS, held, strict=True))
        for masters, states in zip(memory.masters, memory.moments, strict=True)
        if states
        for master, *held in zip(masters.tensors, *(state.tensors for state in states), strict=True)
    }
    return HostSide(buckets, Moments(places), memory)


def _share_out(on_host: Sequence[OnHost], settings: Settings) -> list[list[OnHost]]:
    """What each sub-optimizer steps."""
    kinds: dict[tuple[int, torch.device, torch.dtype, bool], list[OnHost]] = defaultdict(list)
    for entry in on_host:
        kinds[entry.kind].append(entry)
    return [
        [entries[index] for index in indices]
        for entries in kinds.values()
        for indices in hybrid_buckets.group([entry.param.numel() for entry in entries], settings.bucket_elements)
    ]


def _runs(members_of: Sequence[Sequence[OnHost]], settings: Settings) -> list[_Run]:
    runs = []
    for holder, members in enumerate(members_of):
        elements = sum(entry.param.numel() for entry in members)
        first = members[0]
        if (
            settings.has_moments
            and elements > settings.bucket_elements
            and first.is_copied
            and first.dtype == torch.float32
            and first.param.is_contiguous()
            and settings.groups[first.group].get("fused")
        ):
            runs += [
                _Run(holder, last - start, (start, last))
                for start, last in hybrid_buckets.slices(elements, settings.bucket_elements)
            ]
        else:
            runs.append(_Run(holder, elements, None))
    return hybrid_buckets.large_in_the_middle(runs, lambda run: run.elements)


def _holders(
    members_of: Sequence[Sequence[OnHost]],
    demands: Sequence[hybrid_memory.Demand],
    runs: Sequence[_Run],
    memory: hybrid_memory.HostMemory,
    settings: Settings,
) -> list[_Holder]:
    slices: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        if run.slice is not None:
            slices[run.holder].append(run.slice)
    holders = []
    for index, (members, demand, masters) in enumerate(zip(members_of, demands, memory.masters, strict=True)):
        params = list(masters.tensors) if members[0].is_copied else [entry.param for entry in members]
        optimizer = settings.optimizer_cls([{**settings.groups[members[0].group], "params": params}])
        sliced = SlicedMaster(optimizer, masters.flat, slices[index]) if index in slices else None
        holders.append(_Holder(members, demand.places.starts, masters, optimizer, sliced))
    return holders


def _bucket(holder: _Holder, run: _Run, buffer: torch.Tensor, lane: Lane, settings: Settings) -> Bucket:
    members, masters = holder.members, holder.masters
    if not members[0].is_copied:
        rows = tuple(Row(entry.param, entry.param, 0, entry.param.numel(), entry.param, None) for entry in members)
        return Bucket(rows, (), masters.flat, masters.flat, lane, holder.optimizer)
    first, last = run.slice or (0, len(masters.flat))
    flat = masters.flat[first:last]
    grads = buffer[: flat.nbytes].view(flat.dtype)
    if holder.sliced is not None:
        rows = (Row(members[0].param, masters.tensors[0], first, last, holder.sliced.slice_at(first), grads),)
    else:
        rows = tuple(
            Row(entry.param, master, 0, master.numel(), master, grads[start : start + master.numel()].view_as(master))
            for entry, master, start in zip(members, masters.tensors, holder.starts, strict=True)
        )
    counts = [row.stepped.numel() for row in rows]
    chunks = hybrid_buckets.cut(
        counts,
        hybrid_buckets.place(counts, flat.dtype),
        [not can_be_cut(row.param, row.master) for row in rows],
        settings.chunk_elements,
    )
    return Bucket(rows, tuple(chunks), flat, grads, lane, holder.optimizer, holder.sliced)
