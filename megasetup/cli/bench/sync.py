"""`megasetup bench sync`: refreshing every FP32 copy, tensor by tensor and by one plan.

In one process and on the same tensors it times the path that trainers use today and SyncPlan, in turn; it measures the
wire's and the GPU memory's limits beside them, times the audit, and checks every copy bit for bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megasetup import kernels
from megasetup.cli import per_tensor
from megasetup.cli.bench.workload import (
    LEVELS,
    Buffers,
    Workload,
    check_memory,
    flat_elements,
    load_safetensors,
)
from megasetup.cli.console import Steps
from megasetup.cli.shapes import Shapes
from megasetup.cli.timing import seconds_of, summary
from megasetup.cli.wire import Wire, measure_device_copy, measure_wire
from megasetup.masters import SyncPlan, audit_plan
from megasetup.masters.layout import Level


@dataclass(frozen=True)
class Options:
    """What to time.

    Attributes:
        shapes: shape sets, timed one after the other.
        folder: a checkpoint folder whose values the (only) set takes; None for random values.
        modes: of LEVELS.
        levels: refresh these alone; None for all of a mode's.
        threads: CPU thread counts, each timed; empty for the default.
        repeat, baseline_repeat: runs of our way (for each thread count) and of the per-tensor path.
        device: where the weights lie.
    """

    shapes: Sequence[Shapes]
    folder: Path | None
    modes: Sequence[str]
    levels: Sequence[int] | None
    threads: Sequence[int]
    repeat: int
    baseline_repeat: int
    device: torch.device

    def levels_of(self, mode: str) -> tuple[Level, ...]:
        """The levels to refresh in a mode."""
        return tuple(level for level in LEVELS[mode] if self.levels is None or level in self.levels)

    @property
    def steps(self) -> int:
        """How many steps measure() announces."""
        threads = max(1, len(self.threads))
        each = 3 + self.baseline_repeat + self.repeat * threads
        return len(self.modes) * (1 + len(self.shapes) * each) + 1


def measure(options: Options, progress: Steps) -> dict[str, Any]:
    """Run everything that the options ask for; plain data.

    Raises:
        CommandError: not enough memory, or memory that cannot be pinned.
    """
    elements = max(map(flat_elements, options.shapes))
    for mode in options.modes:
        check_memory(elements, mode, options.device)
    progress.next("measuring the limits of this machine")
    limits = _limits(options.device)
    results = []
    for mode in options.modes:
        progress.next(f"{mode}: making {elements / 1e9:.2f} B weights and their copies")
        buffers = Buffers(elements, mode, options.device)
        for shapes in options.shapes:
            workload = Workload.build(shapes, buffers)
            if options.folder is not None:
                load_safetensors(options.folder, workload)
            results.append(_measure_one(workload, options, limits, progress))
        del buffers, workload
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    _compare_shapes(results)
    return {"limits": limits, "results": results}


def _limits(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"wire": None, "bf16_limit_elements_per_second": None, "device_copy_bytes_per_second": None}
    copy = measure_device_copy(device)
    wire = measure_wire(device)
    torch.cuda.empty_cache()
    return {**_wire_limits(wire), "device_copy_bytes_per_second": copy}


def _wire_limits(wire: Wire) -> dict[str, Any]:
    return {
        "wire": {
            "device_to_host_bytes_per_second": wire.device_to_host,
            "host_to_device_bytes_per_second": wire.host_to_device,
        },
        "bf16_limit_elements_per_second": wire.bf16_limit,
    }


class _Ours:
    """Timed runs of one plan with one number of CPU threads."""

    def __init__(self, plan: SyncPlan, threads: int | None, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._setting = threads
        self.use_threads()
        self.threads = kernels.get_num_threads()
        self.seconds: list[float] = []
        self._reports: list[dict[str, Any]] = []

    def use_threads(self) -> None:
        kernels.set_num_threads(self._setting)

    def run(self) -> None:
        self.use_threads()
        seconds, report = seconds_of(self._plan.run, self._device)
        self.seconds.append(seconds)
        self._reports.append(report.to_dict())

    def result(self, elements: int, per_tensor_seconds: float | None, limit: float | None) -> dict[str, Any]:
        found = summary(self.seconds, elements)
        median = found["median_seconds"]
        middle = min(range(len(self.seconds)), key=lambda run: abs(self.seconds[run] - median))
        return {
            "threads": self.threads,
            **found,
            "times_faster_than_per_tensor": None if per_tensor_seconds is None else per_tensor_seconds / median,
            "share_of_bf16_limit": None if limit is None else found["elements_per_second"] / limit,
            "report": self._reports[middle],
        }


def _measure_one(workload: Workload, options: Options, limits: dict[str, Any], progress: Steps) -> dict[str, Any]:
    device, mode = options.device, workload.buffers.mode
    levels, elements = options.levels_of(mode), workload.shapes.parameters
    label = f"{workload.shapes.name}, {mode}"
    progress.next(f"{label}: planning")
    copies = workload.copies(levels)
    planning_seconds, plan = seconds_of(lambda: SyncPlan.from_copies(copies), device)
    # The first run of a plan may still make its staging buffers; a trainer pays that once, so it is shown apart.
    first_seconds, _ = seconds_of(plan.run, device)

    baseline: list[dict[Level, float]] = []
    settings: Sequence[int | None] = options.threads or [None]
    ours = [_Ours(plan, threads, device) for threads in settings]
    wrong: dict[str, list[str]] = {}
    try:
        for repeat in range(max(options.repeat, options.baseline_repeat)):
            if repeat < options.baseline_repeat:
                progress.next(f"{label}: per-tensor path, run {repeat + 1} of {options.baseline_repeat}")
                workload.poison(levels)
                baseline.append(per_tensor.refresh(copies, device))
                if repeat == options.baseline_repeat - 1:
                    wrong["per-tensor"] = workload.wrong(levels)
            for way in ours if repeat < options.repeat else ():
                progress.next(f"{label}: plan with {way.threads} threads, run {repeat + 1} of {options.repeat}")
                workload.poison(levels)
                way.run()
                if repeat == options.repeat - 1:
                    wrong[f"plan, {way.threads} threads"] = workload.wrong(levels)
        # The audit is held against the first way, with that way's threads.
        ours[0].use_threads()
        progress.next(f"{label}: audit")
        plan.run()
        on_gpu = device.type == "cuda"
        reading_threads = kernels.get_num_reading_threads() if on_gpu else kernels.get_num_threads()
        audits = [seconds_of(lambda: audit_plan(plan), device) for _ in range(options.repeat)]
        progress.next(f"{label}: level 1 alone")
        level_1 = _level_1_alone(workload, options, limits, wrong) if 1 in levels else None
    finally:
        kernels.set_num_threads(None)

    totals = [sum(run.values()) for run in baseline]
    per_tensor_seconds = statistics.median(totals) if totals else None
    host_levels = any(level > 1 for level in levels)
    limit = limits["bf16_limit_elements_per_second"] if host_levels else None
    ours_found = [way.result(elements, per_tensor_seconds, limit) for way in ours]
    audit = summary([seconds for seconds, _ in audits], elements)
    audit["share_of_sync_time"] = audit["median_seconds"] / ours_found[0]["median_seconds"]
    return {
        "shapes": workload.shapes.name,
        "tensors": len(workload.shapes.tensors),
        "parameters": elements,
        "mode": mode,
        "levels": list(levels),
        "per_tensor": _per_tensor_result(baseline, totals, elements),
        "planning_seconds": planning_seconds,
        "first_run_seconds": first_seconds,
        "plan": ours_found,
        "audit": {**audit, "reading_threads": reading_threads, "ok": audits[-1][1].ok},
        "level_1_alone": level_1,
        "wrong": wrong,
        "verified": not any(wrong.values()),
    }


def _per_tensor_result(baseline: list[dict[Level, float]], totals: list[float], elements: int) -> dict[str, Any] | None:
    if not baseline:
        return None
    by_level = {str(level): [run[level] for run in baseline] for level in baseline[0]}
    # Of the run whose total is the median (of an even number the mean of the middle two), so that the levels add up to
    # it; each level's own median would come from other runs.
    order = sorted(range(len(totals)), key=totals.__getitem__)
    middle = {order[(len(order) - 1) // 2], order[len(order) // 2]}
    levels = {level: statistics.fmean(taken[run] for run in middle) for level, taken in by_level.items()}
    return {**summary(totals, elements), "seconds_by_level": by_level, "median_run_seconds_by_level": levels}


def _level_1_alone(
    workload: Workload, options: Options, limits: dict[str, Any], wrong: dict[str, list[str]]
) -> dict[str, Any]:
    plan = SyncPlan.from_copies(workload.copies([1]))
    plan.run()
    seconds = []
    for _ in range(options.repeat):
        workload.poison([1])
        seconds.append(seconds_of(plan.run, options.device)[0])
    wrong["level 1 alone"] = workload.wrong([1])
    found = summary(seconds, workload.shapes.parameters)
    copy = limits["device_copy_bytes_per_second"]
    # 2 bytes are read and 4 written for each element.
    found["bytes_per_second"] = 6 * found["elements_per_second"]
    found["share_of_device_copy"] = None if copy is None else found["bytes_per_second"] / copy
    return found


def _compare_shapes(results: list[dict[str, Any]]) -> None:
    """Give each result its throughput relative to the first set of the same mode (many small tensors against few)."""
    first: dict[str, float] = {}
    for result in results:
        rate = result["plan"][0]["elements_per_second"]
        result["throughput_relative_to_first_shapes"] = rate / first.setdefault(result["mode"], rate)
