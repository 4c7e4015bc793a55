"""The examples of optional flows run as they stand, on this machine's device."""

import subprocess
import sys
from pathlib import Path

import pytest
from launch import bare_environment

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def _run(name: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        env=bare_environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_linear_logprobs():
    said = _run("linear_logprobs.py")
    for name in ("log-probabilities", "d hidden", "d weight"):
        assert f"{name}: relative difference" in said


def test_router_replay():
    pytest.importorskip("megatron.core")
    said = _run("router_replay.py")
    assert "layer 0: alone" in said
    assert "replayed [[0, 1], [4, 5], " in said
    assert "replayed [[2, 3], [6, 7], " in said
