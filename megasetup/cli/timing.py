"""Wall time with the GPU's work included, and the median that summarises repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def wait_for(device: torch.device) -> None:
    """Wait for a GPU's queued work; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """How long `work` takes from an idle device to an idle device, and what it returns."""
    wait_for(device)
    start = time.perf_counter()
    result = work()
    wait_for(device)
    return time.perf_counter() - start, result


def summary(seconds: Sequence[float], elements: int) -> dict[str, Any]:
    """Repeats as plain data: all of them, their median, and the rate that the median makes."""
    median = statistics.median(seconds)
    return {"seconds": list(seconds), "median_seconds": median, "elements_per_second": elements / median}
