"""`bench step`: what it makes of its measurements, what counts as pinned and needed, and the whole of it on a GPU."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from megasetup.cli import shapes
from megasetup.cli.app import app
from megasetup.cli.bench import step, step_memory, step_worker, tables, turns
from megasetup.cli.bench.step_worker import OURS, STOCK, Case
from megasetup.cli.console import steps


@contextmanager
def started_here(prepare: Any, works: list[tuple[str, Any, Case]]) -> Iterator[list[Any]]:
    """In place of the processes, which test_turns.py is about."""
    yield [SimpleNamespace(take=functools.partial(work, case)) for _, work, case in works]


def a_measurement(case: Case) -> dict[str, Any]:
    """In place of a measurement, which needs a GPU. Ours has other bits with overlap."""
    is_ours = case.way == OURS
    return {
        "way": case.way,
        "mode": case.mode,
        "overlap": case.overlap,
        "made_seconds": 1.0 if is_ours else 9.0,
        "step_seconds": [3.0, 2.0, 1.0, 2.0] if is_ours else [8.0, 4.0, 4.0, 4.0],
        "pinned_bytes": 100 if is_ours else 300,
        "needed_bytes": 100 if is_ours else 0,
        "peak_gpu_bytes": 1,
        "peak_gpu_bytes_making": 1,
        "peak_host_bytes": 1,
        "digest": {"weight a": [1, 2], "clone 0": [3 if case.overlap and is_ours else 4]},
    }


def adam(case: Case) -> dict[str, Any]:
    """In place of the CPU's Adam."""
    return {"step_seconds": [5.0, 1.0, 1.0, 2.0]}


def test_ratios_comparison_and_what_is_reported_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "started", started_here)
    monkeypatch.setattr(step_worker, "measure", a_measurement)
    monkeypatch.setattr(step_worker, "adam_alone", adam)
    options = step.Options(shapes.named("tiny"), ["standard"], [False, True], 1.0, 4, torch.device("cuda"))
    known = []
    with steps(6) as progress:
        data = step.measure(options, progress, lambda found: known.append((len(found["results"]), found["complete"])))
    assert known == [(0, False), (1, False), (2, False), (3, False), (4, True)]
    assert data["adam_alone_seconds"] == 1.0
    stock, ours, _, other = data["results"]
    assert (stock["way"], ours["way"]) == (STOCK, OURS)
    assert (stock["later_step_seconds"], stock["first_over_later"], stock["step_over_adam_alone"]) == (4.0, 2.0, 4.0)
    assert stock["pinned_over_needed"] is None
    assert ours["pinned_over_needed"] == 1.0
    assert (ours["made_times_faster"], ours["step_times_faster"], ours["pinned_times_less"]) == (9.0, 2.0, 3.0)
    assert ours["same_bits"]
    assert other["different"] == ["clone 0"]
    assert not data["verified"]
    console = Console(width=200)
    with console.capture() as capture:
        tables.show_latest_step(data, console)
        tables.show_step(data, console)
    shown = capture.get()
    assert shown.count("same bits") == 1
    assert shown.count("other bits") == 2  # in the line and in the table
    assert "9.00x" in shown
    assert "3.00x" in shown


def test_needed_is_what_lies_in_pinned_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.numel() != 7)
    clone, pageable = torch.zeros(10), torch.zeros(7)
    stock = SimpleNamespace(
        cpu_copys_map_gpu_param={clone: None, pageable: None},
        cpu_copy_map_grad=defaultdict(torch.Tensor, {clone: torch.zeros(10), pageable: torch.zeros(9)}),
        state={"param": {"master_param": clone, "exp_avg": torch.zeros(7), "count": 3}},
    )
    assert step_memory.needed_bytes(stock) == 4 * (10 + 10 + 9)
    ours = SimpleNamespace(
        cpu_copys_map_gpu_param={clone: None}, cpu_copy_map_grad={}, gradient_buffers=[torch.zeros(5)], state={}
    )
    assert step_memory.needed_bytes(ours) == 4 * (10 + 5)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    file = tmp_path / "step.json"
    arguments = ["bench", "step", "--shapes", "tiny", "--mode", "both", "--overlap", "yes", "--json", str(file)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    assert data["complete"]
    assert data["verified"]
    assert len(data["results"]) == 4
    for result in data["results"]:
        assert result["needed_bytes"] > 0
        assert result["pinned_over_needed"] >= 1.0
        if result["way"] == OURS:
            assert result["same_bits"]
            assert result["pinned_bytes"] <= 1.01 * result["needed_bytes"] + 65536
