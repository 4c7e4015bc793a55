"""`megasetup bench sync --ranks N`: N processes on N GPUs of one host, each syncing a shard of its own.

Every wire is its own, but the host's memory is shared: what N ranks reach together, against one alone, shows whether
the pipeline leaves the memory enough room. Each rank is timed alone first, while the others wait, then all together
from a common start. Last, all write into their clones at once and read nothing, which is what the memory can take.
"""

from __future__ import annotations

import os
import statistics
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from queue import Empty
from typing import Any

import torch
from torch import multiprocessing

from megasetup import kernels
from megasetup.cli.bench.workload import LEVELS, Buffers, Workload, check_memory, flat_elements
from megasetup.cli.errors import CommandError
from megasetup.cli.host_writes import measure_host_writes
from megasetup.cli.shapes import Shapes
from megasetup.cli.timing import seconds_of
from megasetup.masters import SyncPlan

# Longer than any phase: making and pinning the buffers of the largest set takes well under a minute.
_PHASE_SECONDS = 300


@dataclass(frozen=True)
class Options:
    """What to time; each rank has the same shapes.

    Attributes:
        shapes: one shape set.
        mode: of LEVELS.
        threads: CPU threads a rank; None for the default, which divides the cores by the ranks.
        repeat: timed runs of each phase.
        device_type: "cuda" (rank i on GPU i) or "cpu".
        ranks: processes.
    """

    shapes: Shapes
    mode: str
    threads: int | None
    repeat: int
    device_type: str
    ranks: int


def measure(options: Options) -> dict[str, Any]:
    """Run the ranks and gather what they timed; plain data.

    Raises:
        CommandError: fewer GPUs than ranks, not enough memory, or a rank that failed (with its traceback).
    """
    if options.device_type == "cuda" and torch.cuda.device_count() < options.ranks:
        raise CommandError(
            f"--ranks {options.ranks} needs as many GPUs and this machine has {torch.cuda.device_count()}: "
            "lower --ranks, or use --device cpu"
        )
    elements = flat_elements(options.shapes)
    for rank in range(options.ranks if options.device_type == "cuda" else 1):
        check_memory(elements, options.mode, _device(options, rank), ranks=options.ranks)
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(options.ranks), context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, options, barrier, answers), daemon=True)
        for rank in range(options.ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = _gather(answers, processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
    failed = [answer["error"] for answer in found if "error" in answer]
    if failed:
        # Ranks that waited for the failed one say only that the barrier broke; the first real reason is the longest.
        raise CommandError("a rank failed:\n" + max(failed, key=len))
    return _combine(options, sorted(found, key=lambda answer: int(answer["rank"])))


def _gather(answers: Queue[dict[str, Any]], processes: Sequence[BaseProcess]) -> list[dict[str, Any]]:
    """One answer a rank. A rank that was killed (for memory, say) gives none, so exit codes are watched as well."""
    found: list[dict[str, Any]] = []
    while len(found) < len(processes):
        try:
            found.append(answers.get(timeout=1))
        except Empty:
            for rank, process in enumerate(processes):
                if process.exitcode:
                    raise CommandError(
                        f"rank {rank} ended with exit status {process.exitcode} and no answer; a negative status is "
                        "a signal, and -9 is mostly the kernel's, for memory: use --scale"
                    ) from None
    return found


def _device(options: Options, rank: int) -> torch.device:
    return torch.device("cuda", rank) if options.device_type == "cuda" else torch.device("cpu")


def _rank_main(rank: int, options: Options, barrier: Barrier, answers: Queue[dict[str, Any]]) -> None:
    # As torchrun would set them: the default number of threads divides the cores by the ranks of the host.
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(options.ranks), str(rank)
    try:
        answers.put({"rank": rank, **_rank(rank, options, barrier)})
    except BaseException:
        barrier.abort()
        answers.put({"rank": rank, "error": traceback.format_exc()})


def _rank(rank: int, options: Options, barrier: Barrier) -> dict[str, Any]:
    device = _device(options, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # The other ranks make their buffers at the same time; all cores for each would only get in each other's way.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    if options.threads is not None:
        kernels.set_num_threads(options.threads)
    levels = LEVELS[options.mode]
    alone: list[float] = []
    together: list[float] = []
    buffers = Buffers(flat_elements(options.shapes), options.mode, device)
    workload = Workload.build(options.shapes, buffers)
    plan = SyncPlan.from_copies(workload.copies(levels))
    plan.run()
    for turn in range(options.ranks):
        barrier.wait(_PHASE_SECONDS)
        if turn == rank:
            for _ in range(options.repeat):
                workload.poison(levels)
                alone.append(seconds_of(plan.run, device)[0])
    barrier.wait(_PHASE_SECONDS)
    reports = []
    for _ in range(options.repeat):
        workload.poison(levels)
        barrier.wait(_PHASE_SECONDS)
        seconds, report = seconds_of(plan.run, device)
        together.append(seconds)
        reports.append(report.to_dict())
    barrier.wait(_PHASE_SECONDS)
    wrong = workload.wrong(levels)
    barrier.wait(_PHASE_SECONDS)
    writes = measure_host_writes(buffers.clones)
    return {
        "device": str(device),
        "threads": kernels.get_num_threads(),
        "alone_seconds": alone,
        "together_seconds": together,
        "together_reports": reports,
        "host_write_bandwidth": writes,
        "wrong": wrong,
    }


def _combine(options: Options, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    elements = options.shapes.parameters
    for answer in ranks:
        answer["alone_elements_per_second"] = elements / statistics.median(answer["alone_seconds"])
        answer["together_elements_per_second"] = elements / statistics.median(answer["together_seconds"])
    # One sum a repeat, because the ranks of one repeat ran at the same time.
    sums = [
        sum(elements / seconds for seconds in run) for run in zip(*(a["together_seconds"] for a in ranks), strict=True)
    ]
    # The fastest rank alone, so that a slow neighbour does not flatter the ratio.
    best_alone = max(answer["alone_elements_per_second"] for answer in ranks)
    writes = sum(answer["host_write_bandwidth"] for answer in ranks)
    return {
        "shapes": options.shapes.name,
        "tensors": len(options.shapes.tensors),
        "parameters_per_rank": elements,
        "mode": options.mode,
        "ranks": list(ranks),
        "sum_elements_per_second": sums,
        "median_sum_elements_per_second": statistics.median(sums),
        "best_alone_elements_per_second": best_alone,
        "sum_over_one_alone": statistics.median(sums) / best_alone,
        "host_write_bandwidth": writes,
        "share_of_host_writes": statistics.median(sums) * 4 / writes,
        "verified": not any(answer["wrong"] for answer in ranks),
    }
