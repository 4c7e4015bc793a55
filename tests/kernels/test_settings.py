"""Settings that come from the environment: a wrong one is an error of the call, never the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megasetup import kernels
from megasetup.kernels import native

pytestmark = pytest.mark.skipif(native.load() is None, reason="the compiled module is absent")

LARGE_WIDEN = (
    "import torch\n"
    "from megasetup import kernels\n"
    "low = torch.ones(1 << 20, dtype=torch.bfloat16)\n"
    "kernels.widen([low], [torch.empty(1 << 20)])\n"
)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_a_wrong_instruction_set_is_an_error_that_names_it() -> None:
    done = run(LARGE_WIDEN, MEGASETUP_CPU_ISA="bogus")
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert "'bogus'" in done.stderr
    assert "MEGASETUP_CPU_ISA" in done.stderr


@pytest.mark.parametrize(("setting", "threads"), [("3", 3), ("99999999999", 1024)])
def test_the_number_of_threads_from_the_environment(setting: str, threads: int) -> None:
    done = run("from megasetup import kernels; print(kernels.get_num_threads())", MEGASETUP_NUM_THREADS=setting)
    assert int(done.stdout) == threads


def test_more_threads_than_any_host_has_are_refused() -> None:
    before = kernels.get_num_threads()
    with pytest.raises(ValueError, match="200000"):
        kernels.set_num_threads(200_000)
    assert kernels.get_num_threads() == before
