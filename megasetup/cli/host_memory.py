"""Host memory for benchmarks: pageable as an allocator gives it, or on huge pages and pinned by one registration.

Pinning 30 GB tensor by tensor takes half a minute, most of a benchmark's time; touching one buffer with all cores and
registering it takes about a second, and copies to it run at the same speed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megasetup.cli.errors import CommandError


def pageable(elements: int) -> torch.Tensor:
    """FP32 host memory as a framework's CPU tensors have it, zeroed by all cores so that every page is there."""
    return torch.empty(elements, dtype=torch.float32).fill_(0)


def on_huge_pages(elements: int) -> torch.Tensor:
    """FP32 host memory with huge pages advised, zeroed by all cores."""
    buffer = mmap.mmap(-1, max(elements, 1) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=torch.float32)[:elements].fill_(0)


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
