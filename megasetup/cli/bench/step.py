"""`megasetup bench step`: Megatron's hybrid optimizer and ours, made and stepped over the same weights.

Each combination runs in a process of its own (step_worker.py), one after another, so that neither finds the other's
memory in an allocator. All are forked from a server that has imported Megatron and has not touched CUDA, since the
imports take longer than most measurements. The CPU Adam alone runs beside them, as the limit of any step.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

import torch

from megasetup.cli.bench import step_worker
from megasetup.cli.bench.step_worker import OURS, STOCK, Case
from megasetup.cli.console import Steps
from megasetup.cli.errors import CommandError
from megasetup.cli.shapes import Shapes


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        shapes: the model.
        modes: of LEVELS.
        overlaps: settings of Megatron's overlap.
        fraction: the share of the optimizer that is offloaded.
        steps: steps a way, the first included; 0 for making alone.
        device: the GPU.
    """

    shapes: Shapes
    modes: Sequence[str]
    overlaps: Sequence[bool]
    fraction: float
    steps: int
    device: torch.device

    @property
    def pairs(self) -> list[tuple[Case, Case]]:
        """Stock and ours, for every combination."""
        return [
            (self._case(STOCK, mode, overlap), self._case(OURS, mode, overlap))
            for mode in self.modes
            for overlap in self.overlaps
        ]

    def _case(self, way: str, mode: str, overlap: bool) -> Case:
        return Case(self.shapes, way, mode, overlap, self.fraction, self.steps, self.device.index or 0)


def measure(options: Options, progress: Steps) -> dict[str, Any]:
    """Run all; plain data.

    Raises:
        CommandError: a measurement failed, with its traceback.
    """
    progress.next("the imports that all need")
    context = _processes()
    alone = None
    if options.steps:
        progress.next("the CPU's Adam alone")
        alone = _settled(_in_own_process(context, step_worker.adam_alone, options.pairs[0][0])["step_seconds"])
    results = []
    for stock_case, our_case in options.pairs:
        found = []
        for case in (stock_case, our_case):
            progress.next(case.label)
            found.append(_with_ratios(_in_own_process(context, step_worker.measure, case), alone))
        stock, ours = found
        ours["made_times_faster"] = stock["made_seconds"] / ours["made_seconds"]
        if options.steps:
            ours["step_times_faster"] = stock["later_step_seconds"] / ours["later_step_seconds"]
        theirs, own = stock.pop("digest"), ours.pop("digest")
        ours["different"] = sorted(name for name in theirs.keys() | own.keys() if theirs.get(name) != own.get(name))
        ours["same_bits"] = not ours["different"]
        results += [stock, ours]
    return {
        "shapes": options.shapes.name,
        "tensors": len(options.shapes.tensors),
        "parameters": options.shapes.parameters,
        "fraction": options.fraction,
        "steps": options.steps,
        "adam_alone_seconds": alone,
        "results": results,
        "verified": all(result.get("same_bits", True) for result in results),
    }


def _settled(seconds: Sequence[float]) -> float:
    """The median of all steps but the first."""
    return statistics.median(seconds[1:] or seconds)


def _with_ratios(found: dict[str, Any], alone: float | None) -> dict[str, Any]:
    steps = found["step_seconds"]
    found["pinned_over_needed"] = found["pinned_bytes"] / found["needed_bytes"]
    if steps:
        found["later_step_seconds"] = _settled(steps)
        found["first_over_later"] = steps[0] / found["later_step_seconds"]
        if alone is not None:
            found["step_over_adam_alone"] = found["later_step_seconds"] / alone
    return found


# What a measurement imports. Megatron's optimizers import Transformer Engine where there is one.
_PRELOADED = [
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.transformer",
    "megasetup.compat.hybrid_optimizer",
    "megasetup.masters.hybrid",
    "megasetup.cli.bench.step_worker",
]


def _processes() -> SpawnContext | ForkServerContext:
    """How processes are started: from the server, unless its imports have touched CUDA."""
    # Counted without the driver: a process that has asked the driver leaves children that cannot use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_PRELOADED)
    ours, theirs = server.Pipe()
    process = server.Process(target=_use_cuda, args=(theirs,), daemon=True)
    try:
        process.start()
        theirs.close()
        usable = bool(ours.recv())
        process.join()
    except (EOFError, OSError):
        usable = False
    return server if usable else multiprocessing.get_context("spawn")


def _use_cuda(answers: Connection) -> None:
    try:
        torch.zeros(1, device="cuda").item()
        answers.send(True)
    except (RuntimeError, AssertionError):
        answers.send(False)


def _in_own_process(
    context: SpawnContext | ForkServerContext, work: Callable[[Case], dict[str, Any]], case: Case
) -> dict[str, Any]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(work, case, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        answer: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        raise CommandError(
            f"{case.label}: its process ended with exit status {process.exitcode} and no answer; a negative status is "
            "a signal, and -9 is mostly the kernel's, for memory: use --scale"
        ) from None
    process.join()
    if "error" in answer:
        raise CommandError(f"{case.label} failed:\n{answer['error']}")
    return answer


def _main(work: Callable[[Case], dict[str, Any]], case: Case, answers: Connection) -> None:
    try:
        answers.send(work(case))
    except Exception:
        answers.send({"error": traceback.format_exc()})
