"""`megasetup bench step`: Megatron's hybrid optimizer and ours, made and stepped over the same weights.

Each combination runs in a process of its own (step_worker.py), one after another (turns.py), so that neither finds the
other's memory in an allocator. The CPU Adam alone is one of them, as the limit of any step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megasetup.cli.bench import step_worker, turns
from megasetup.cli.bench.step_worker import OURS, STOCK, Case
from megasetup.cli.console import Steps
from megasetup.cli.shapes import Shapes

ADAM_ALONE = "the CPU's Adam alone"


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


def measure(options: Options, progress: Steps, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run all; plain data.

    Args:
        options: what to measure.
        progress: told what happens now.
        report: called after each measurement with all that is known by then, "complete" being false before the last.

    Raises:
        CommandError: a measurement failed, with its traceback.
    """
    data: dict[str, Any] = {
        "shapes": options.shapes.name,
        "tensors": len(options.shapes.tensors),
        "parameters": options.shapes.parameters,
        "fraction": options.fraction,
        "steps": options.steps,
        "adam_alone_seconds": None,
        "results": [],
        "verified": True,
        "complete": False,
    }
    cases = [case for pair in options.pairs for case in pair]
    works: list[tuple[str, Callable[[Case], dict[str, Any]], Case]] = [
        (case.label, step_worker.measure, case) for case in cases
    ]
    if options.steps:
        works.insert(0, (ADAM_ALONE, step_worker.adam_alone, cases[0]))
    progress.next("the imports that all need")
    with turns.started(step_worker.import_all, works) as waiting:
        if options.steps:
            progress.next(ADAM_ALONE)
            data["adam_alone_seconds"] = _settled(waiting.pop(0).take()["step_seconds"])
            report(data)
        stock_digest: dict[str, list[int]] = {}
        for case, turn in zip(cases, waiting, strict=True):
            progress.next(case.label)
            found = _with_ratios(turn.take(), data["adam_alone_seconds"])
            digest = found.pop("digest")
            if case.way == STOCK:
                stock_digest = digest
            else:
                _compare(found, digest, data["results"][-1], stock_digest)
            data["results"].append(found)
            data["verified"] = all(result.get("same_bits", True) for result in data["results"])
            data["complete"] = len(data["results"]) == len(cases)
            report(data)
    return data


def _compare(
    ours: dict[str, Any], our_digest: dict[str, list[int]], stock: dict[str, Any], stock_digest: dict[str, list[int]]
) -> None:
    """Add to ours what it gains on stock and where its values differ."""
    ours["made_times_faster"] = stock["made_seconds"] / ours["made_seconds"]
    ours["pinned_times_less"] = stock["pinned_bytes"] / ours["pinned_bytes"] if ours["pinned_bytes"] else None
    if ours["step_seconds"]:
        ours["step_times_faster"] = stock["later_step_seconds"] / ours["later_step_seconds"]
    names = stock_digest.keys() | our_digest.keys()
    ours["different"] = sorted(name for name in names if stock_digest.get(name) != our_digest.get(name))
    ours["same_bits"] = not ours["different"]


def _settled(seconds: Sequence[float]) -> float:
    """The median of all steps but the first."""
    return statistics.median(seconds[1:] or seconds)


def _with_ratios(found: dict[str, Any], alone: float | None) -> dict[str, Any]:
    steps = found["step_seconds"]
    found["pinned_over_needed"] = found["pinned_bytes"] / found["needed_bytes"] if found["needed_bytes"] else None
    if steps:
        found["later_step_seconds"] = _settled(steps)
        found["first_over_later"] = steps[0] / found["later_step_seconds"]
        if alone is not None:
            found["step_over_adam_alone"] = found["later_step_seconds"] / alone
    return found
