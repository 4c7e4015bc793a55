"""Starts flow_worker.py for the GPU tests, once for all the cases of a module, and hands out the results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import Ended, bare_environment, launch

HERE = Path(__file__).resolve().parent


def make_models(folder: Path) -> dict[str, Any]:
    """The small models, taught, and what Hugging Face computes with them."""
    for module in ("megatron.bridge", "transformers", "transformer_engine"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    done = subprocess.run(
        [sys.executable, str(HERE / "flow_models.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        env=bare_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def run_cases(folder: Path, world: int, cases: list[str], **environment: str) -> dict[str, list[dict[str, Any]]]:
    """The results of every case, a list of one for each rank."""
    ended = launch(
        HERE / "flow_worker.py",
        world,
        str(folder),
        *cases,
        timeout=280,
        environment={"MEGASETUP_CHECKPOINT_DIR": str(folder / "converted"), "PYTHONPATH": path()}
        # A resume is compared bit for bit with a run that went on.
        | {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
        | environment,
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for name in cases:
        found[name] = [result_of(name, rank) for rank in ended]
    return found


def path() -> str:
    return f"{HERE}:{bare_environment()['PYTHONPATH']}"


def result_of(name: str, rank: Ended) -> dict[str, Any]:
    marker = f"RESULT {name} "
    lines = [line for line in rank.output.splitlines() if line.startswith(marker)]
    if not lines:
        return {"failed": f"no result; exit status {rank.status}\n{rank.output[-6000:]}"}
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(marker))
    return result


def check_training(result: dict[str, Any], facts: dict[str, Any]) -> None:
    """The weights are Hugging Face's before training and stay while it trains, and every FP32 copy is right."""
    assert "failed" not in result, result["failed"]
    # BF16 has 8 bits: the same weights in other kernels give losses some thousandths apart.
    assert result["known"] == pytest.approx(facts["known"], rel=0.05, abs=0.005)
    assert result["unknown"] == pytest.approx(facts["unknown"], rel=0.01)
    assert all(abs(loss - result["known"]) < 0.02 for loss in [*result["losses"], result["after"]]), result["losses"]
    assert result["ok_after_training"]
