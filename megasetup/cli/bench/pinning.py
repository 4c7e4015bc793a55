"""`megasetup bench host`, what pinned memory costs: torch's allocator against one PinnedArena, in time and in bytes.

torch rounds every block up to a power of two, and clears it with one thread in the driver. How many bytes are really
pinned is asked of torch's allocator, whose count is of what it requested from CUDA; the driver's own allocations show
in no counter of the process, so that what the machine has less afterwards stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megasetup import host
from megasetup.cli.console import gigabytes
from megasetup.cli.errors import CommandError
from megasetup.cli.shapes import Shapes
from megasetup.cli.timing import seconds_of
from megasetup.masters.arena import ArenaError, PinnedArena

_FP32_BYTES = 4


def shard_elements(shapes: Shapes, shards: int) -> list[int]:
    """Elements of each tensor that one of `shards` data-parallel ranks keeps: odd counts, as sharding makes them."""
    return [-(-count // shards) for count in shapes.counts]


def _rounded(nbytes: int) -> int:
    return 1 << max(0, math.ceil(math.log2(nbytes)))


def measure(counts: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Pin FP32 tensors of these element counts both ways, one after the other; plain data.

    Raises:
        CommandError: not enough memory, or memory that cannot be pinned.
    """
    needed = sum(counts) * _FP32_BYTES
    expected, there = sum(_rounded(count * _FP32_BYTES) for count in counts), host.memory().usable
    if expected > there:
        raise CommandError(
            f"pinning {gigabytes(needed)} by torch takes {gigabytes(expected)} and {gigabytes(there)} is there: lower "
            "--pin-bytes, or raise --pin-shards"
        )
    torch.zeros(1, device=device)  # CUDA's own start belongs to neither way
    ways = {"torch": _by_torch, "arena": _by_arena}
    found: dict[str, dict[str, Any]] = {}
    # Twice in turn, and the faster time counts: a virtual machine may be slow to get memory that it never had before.
    for _ in range(2):
        for name, way in ways.items():
            torch._C._host_emptyCache()  # torch keeps freed blocks pinned and has no public way to give them back
            once = _measured(way, counts, device)
            seconds = [*found.get(name, {}).get("seconds", ()), *once["seconds"]]
            found[name] = {**once, "seconds": seconds}
    torch._C._host_emptyCache()
    return {
        "tensors": len(counts),
        "needed_bytes": needed,
        **found,
        "times_faster": min(found["torch"]["seconds"]) / min(found["arena"]["seconds"]),
    }


_Way = Callable[[Sequence[int], torch.device], tuple[list[torch.Tensor], int]]


def _measured(way: _Way, counts: Sequence[int], device: torch.device) -> dict[str, Any]:
    before = host.memory().available
    seconds, (tensors, pinned_bytes) = seconds_of(lambda: way(counts, device), device)
    machine_bytes = before - host.memory().available
    if not all(tensor.is_pinned() for tensor in tensors):
        raise CommandError(
            "the compiled module has no GPU half here, so that an arena is not pinned: see `megasetup doctor`"
        )
    return {"seconds": [seconds], "pinned_bytes": pinned_bytes, "machine_bytes": machine_bytes}


def _by_torch(counts: Sequence[int], device: torch.device) -> tuple[list[torch.Tensor], int]:
    def allocated() -> int:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    before = allocated()
    with torch.cuda.device(device):
        tensors = [torch.empty(count, dtype=torch.float32, pin_memory=True) for count in counts]
    return tensors, allocated() - before


def _by_arena(counts: Sequence[int], device: torch.device) -> tuple[list[torch.Tensor], int]:
    try:
        arena = PinnedArena(PinnedArena.nbytes_for((count, torch.float32) for count in counts), device=device)
    except ArenaError as error:
        raise CommandError(str(error)) from error
    return [arena.empty(count, torch.float32) for count in counts], arena.nbytes
