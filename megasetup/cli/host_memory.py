"""Host memory for benchmarks: pageable as an allocator gives it, pinned as an arena is, or pinned for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megasetup.cli.errors import CommandError
from megasetup.masters.arena import ArenaError, PinnedArena


def pageable(elements: int) -> torch.Tensor:
    """FP32 host memory as a framework's CPU tensors have it, zeroed by all cores so that every page is there."""
    return torch.empty(elements, dtype=torch.float32).fill_(0)


def pinned(elements: int, device: torch.device) -> torch.Tensor:
    """FP32 host memory pinned for the GPU `device` (by torch where the compiled module has no GPU half), zeroed.

    Raises:
        CommandError: it cannot be had or pinned, with the reason.
    """
    try:
        arena = PinnedArena(elements * 4, device=device)
    except ArenaError as error:
        raise CommandError(f"{error}. Or use --scale") from error
    if not arena.is_pinned:
        return torch.zeros(elements, dtype=torch.float32, pin_memory=True)
    return arena.empty(elements, torch.float32)


@contextmanager
def registered(memory: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Keep contiguous host memory pinned while the block runs, for the GPU `device`.

    Raises:
        CommandError: the driver refuses, with its reason.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # the context exists from here on
        result = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(result) != 0:
            raise CommandError(
                f"{memory.nbytes / 1e9:.1f} GB of host memory cannot be pinned "
                f"({runtime.cudaGetErrorString(result)}): free memory, raise the container's limit, or use --scale"
            )
        try:
            yield
        finally:
            torch.cuda.synchronize(device)
            runtime.cudaHostUnregister(memory.data_ptr())
