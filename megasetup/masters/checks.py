"""What can be wrong with the memory of weights and copies: not ordinary memory, absent, not contiguous, or shared.

Addresses are all that the kernels take, so a wrong one would write over someone else's memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from megasetup.masters.jobs import Columns, Jobs
from megasetup.masters.layout import WeightCopies


def not_strided(entries: Sequence[Any]) -> list[tuple[int, str]]:
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


def memory_problems(tensors: Sequence[torch.Tensor], columns: Columns, odd: set[type]) -> list[tuple[int, str]]:
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


def overlaps(
    copies: Sequence[WeightCopies], tensors: Sequence[torch.Tensor], jobs: Jobs, columns: Columns
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
    tensors: Sequence[torch.Tensor], columns: Columns, indices: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """First address and address past the end of each tensor, as int64."""
    sizes = [columns.elements[index] * columns.dtype[index].itemsize for index in indices]
    starts = torch.tensor(list(map(columns.address.__getitem__, indices)), dtype=torch.int64)
    return starts, starts + torch.tensor(sizes, dtype=torch.int64)
