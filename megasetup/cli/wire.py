"""The machine's own limits, measured in the run that quotes them: the wire each way, and the GPU's memory.

A share of a limit means little when the limit comes from a data sheet, so every benchmark measures its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Wire:
    """Pinned copies between GPU and host, in bytes a second.

    Attributes:
        device_to_host, host_to_device: the best of several copies, one direction at a time.
    """

    device_to_host: float
    host_to_device: float

    @property
    def bf16_limit(self) -> float:
        """Elements a second when BF16 crosses to the host: 2 bytes each."""
        return self.device_to_host / 2


def _best_seconds(target: torch.Tensor, source: torch.Tensor, device: torch.device, repeats: int) -> float:
    best = math.inf
    with torch.cuda.device(device):
        for _ in range(repeats + 1):  # the first one warms up and is as good as any if it is the best
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
    return best


def measure_wire(device: torch.device, nbytes: int = 1 << 30, repeats: int = 5) -> Wire:
    """Copy `nbytes` of pinned memory to the host and back.

    Raises:
        RuntimeError: the memory cannot be had, on the GPU or pinned.
    """
    far = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    near = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    return Wire(
        device_to_host=nbytes / _best_seconds(near, far, device, repeats),
        host_to_device=nbytes / _best_seconds(far, near, device, repeats),
    )


def measure_device_copy(device: torch.device, nbytes: int = 1 << 31, repeats: int = 5) -> float:
    """Bytes a second, read and written together, of a copy within the GPU's memory.

    Raises:
        RuntimeError: the memory cannot be had.
    """
    source = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(target, source, device, repeats)
