"""`megasetup bench host`: the CPU kernels against torch with the same number of threads. (pinning.py: its other half.)

The tensors are larger than any cache, as a model's weights are, so memory bandwidth bounds both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megasetup import host, kernels
from megasetup.cli.console import Steps, gigabytes
from megasetup.cli.errors import CommandError
from megasetup.cli.host_writes import measure_host_writes
from megasetup.cli.timing import seconds_of, summary

_CPU = torch.device("cpu")
# BF16 source and result, FP32 target, and torch's FP32 temporary of a comparison.
_BYTES_PER_ELEMENT = 2 + 2 + 4 + 4
FUNCTIONS = 3
# OpenMP's threads go on spinning after torch's part, on the very cores that the other way is then timed on.
_SETTLING_SECONDS = 0.05


def _torch_compare(weight: torch.Tensor, master: torch.Tensor) -> bool:
    return torch.equal(weight.float(), master)


def measure(elements: int, threads: Sequence[int], repeat: int, progress: Steps) -> list[dict[str, Any]]:
    """Time widen, narrow and compare on BF16 and FP32 tensors of `elements`; one mapping a function and thread count.

    Raises:
        CommandError: the tensors do not fit into memory.
    """
    needed, there = elements * _BYTES_PER_ELEMENT, host.memory().usable
    if needed > there:
        fitting = there // _BYTES_PER_ELEMENT // 10**6
        raise CommandError(
            f"{elements:,} elements need {gigabytes(needed)} of host memory and {gigabytes(there)} is there: "
            f"use --elements {fitting}e6"
        )
    low = torch.empty(elements, dtype=torch.bfloat16)
    drawn = low[: 1 << 22].normal_()
    for start in range(0, elements, len(drawn)):
        low[start : start + len(drawn)].copy_(drawn[: elements - start])
    high, back = torch.zeros(elements), torch.zeros(elements, dtype=torch.bfloat16)
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "widen": (lambda: kernels.widen([low], [high]), lambda: high.copy_(low)),
        "narrow": (lambda: kernels.narrow([high], [back]), lambda: back.copy_(high)),
        "compare": (lambda: kernels.compare([low], [high]), lambda: _torch_compare(low, high)),
    }
    results = []
    threads_before, torch_threads_before = kernels.get_num_threads(), torch.get_num_threads()
    try:
        for count in threads:
            kernels.set_num_threads(count)
            torch.set_num_threads(count)
            for name, (ours, theirs) in ways.items():
                progress.next(f"{name}, {count} threads")
                results.append({"function": name, "threads": count, **_in_turn(ours, theirs, elements, repeat)})
            difference = kernels.compare([low], [high])[0].exact_differences
            results[-1]["verified"] = difference == 0 and torch.equal(low, back) and _torch_compare(low, high)
            # What bounds widening, whose writes alone are two thirds of its traffic.
            writes = measure_host_writes(high, repeat)
            widened = results[-len(ways)]
            widened["host_write_bandwidth"] = writes
            widened["share_of_host_writes"] = widened["megasetup"]["elements_per_second"] * high.itemsize / writes
    finally:
        kernels.set_num_threads(threads_before)
        torch.set_num_threads(torch_threads_before)
    return results


def _in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], elements: int, repeat: int) -> dict[str, Any]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeat + 1):
        for way, taken in zip((ours, theirs), seconds, strict=True):
            time.sleep(_SETTLING_SECONDS)
            one, _ = seconds_of(way, _CPU)
            if turn:  # the first turn warms up
                taken.append(one)
    kernel, torch_way = summary(seconds[0], elements), summary(seconds[1], elements)
    return {
        "megasetup": kernel,
        "torch": torch_way,
        "times_faster": torch_way["median_seconds"] / kernel["median_seconds"],
    }
