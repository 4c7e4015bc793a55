"""Runs commands as a user does: in a process of their own, with nothing but their arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megasetup as package

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def megasetup(tmp_path) -> Run:
    """Run `python -m megasetup ARGUMENTS` in an empty folder; the exit status must be the expected one."""

    def run(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        # No GPU for the command, so that it measures the same thing on every machine.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
        # The tests may run in a source tree that is not installed.
        paths = [str(Path(package.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-m", "megasetup", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == status, f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
