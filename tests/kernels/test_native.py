"""The compiled module found or absent, and the number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from megasetup import _C, kernels


def python(code: str, **environment: str) -> str:
    """What `code` prints in a Python of its own, whose warnings are errors unless the code says otherwise."""
    # Where tests run under a launcher, its variables must not reach the child.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "MPI_"))}
    for name in ("LOCAL_WORLD_SIZE", "MEGASETUP_NUM_THREADS", "MEGASETUP_CPU_ISA"):
        clean.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_status_of_the_compiled_module() -> None:
    status = kernels.native_status()
    assert status.cpu
    assert status.cpu_instruction_set == _C.cpu.instruction_set()
    assert status.cpu_instruction_set in _C.cpu.instruction_sets()
    assert _C.cpu.instruction_sets()[-1] == "scalar"
    assert status.gpu == (status.why == "")
    assert status.gpu_architectures or not status.gpu


def test_without_the_module_one_warning_and_the_same_values() -> None:
    code = """
import sys, warnings
sys.modules["megasetup._C"] = None
import torch
from megasetup import kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    source = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    target, back = torch.empty(1 << 16), torch.empty(1 << 16, dtype=torch.bfloat16)
    for _ in range(3):
        kernels.widen([source], [target])
        kernels.narrow([target], [back])
        same = kernels.compare([source], [target])
    target[7] = 1.0
    differ = kernels.compare([source], [target])
    kernels.Transfer([kernels.CopyJob(source, target, None)], torch.device("cpu")).run()
    kernels.set_num_threads(2)
    threads = kernels.get_num_threads()
    status = kernels.native_status()
assert [warning.category for warning in caught] == [RuntimeWarning], caught
assert "pip install ." in str(caught[0].message)
assert target.view(torch.int32).equal(source.float().view(torch.int32))
numbers = ~source.isnan()
assert back[numbers].equal(source[numbers]) and back[~numbers].isnan().all()
assert same == [(0, 0, -1, -1)] and differ == [(1, 1, 7, 7)], (same, differ)
assert threads == torch.get_num_threads()
assert (status.cpu, status.gpu, status.cpu_instruction_set) == (False, False, "torch") and "absent" in status.why
"""
    python(code)


def test_import_is_quick_and_light() -> None:
    code = """
import sys, time
import torch
start = time.perf_counter()
import megasetup
print(time.perf_counter() - start)
heavy = {"megatron", "transformer_engine", "transformers", "safetensors", "megasetup._C"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    assert min(float(python(code)) for _ in range(2)) < 0.3


THREADS = "from megasetup import kernels; print(kernels.get_num_threads())"


def test_default_threads() -> None:
    cores = len(os.sched_getaffinity(0))
    assert int(python(THREADS)) == min(8, cores)
    assert int(python(THREADS, LOCAL_WORLD_SIZE="2")) == max(1, min(8, cores // 2))
    assert int(python(THREADS, LOCAL_WORLD_SIZE="100000")) == 1
    assert int(python(THREADS, SLURM_NTASKS_PER_NODE="2")) == max(1, min(8, cores // 2))
    assert int(python(THREADS, MEGASETUP_NUM_THREADS="5", LOCAL_WORLD_SIZE="2")) == 5
    assert int(python("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});" + THREADS)) == 1


def test_instruction_set_from_the_environment() -> None:
    code = "from megasetup import kernels; print(kernels.native_status().cpu_instruction_set)"
    assert python(code, MEGASETUP_CPU_ISA="scalar") == "scalar"


@pytest.mark.parametrize("threads", [0, -3])
def test_too_few_threads_are_refused(threads: int) -> None:
    before = kernels.get_num_threads()
    with pytest.raises(ValueError, match=f"threads is {threads}"):
        kernels.set_num_threads(threads)
    assert kernels.get_num_threads() == before


def test_set_num_threads_sets_how_many_there_are() -> None:
    source, target = torch.ones(1_000_000, dtype=torch.bfloat16), torch.empty(1_000_000)

    def tasks(threads: int) -> int:
        kernels.set_num_threads(threads)
        kernels.widen([source], [target])
        assert kernels.get_num_threads() == kernels.get_num_reading_threads() == threads
        return len(os.listdir("/proc/self/task"))

    try:
        one = tasks(1)
        assert [tasks(threads) - one for threads in (4, 2, 7, 1)] == [3, 1, 6, 0]
    finally:
        kernels.set_num_threads(None)


@pytest.mark.parametrize(
    ("ranks", "setting", "expected"),
    [
        ("1", "", lambda cores: (min(8, cores), max(min(8, cores), min(16, cores - 1)))),
        ("1000000", "", lambda cores: (1, 1)),
        ("1", "5", lambda cores: (5, 5)),
    ],
)
def test_default_threads_for_converting_and_reading(
    ranks: str, setting: str, expected: Callable[[int], tuple[int, int]]
) -> None:
    code = (
        "from megasetup import kernels\n"
        "counts = kernels.get_num_threads(), kernels.get_num_reading_threads()\n"
        "kernels.set_num_threads(3)\n"
        "assert (kernels.get_num_threads(), kernels.get_num_reading_threads()) == (3, 3)\n"
        "kernels.set_num_threads(None)\n"
        "assert counts == (kernels.get_num_threads(), kernels.get_num_reading_threads())\n"
        "print(*counts)"
    )
    found = python(code, LOCAL_WORLD_SIZE=ranks, MEGASETUP_NUM_THREADS=setting)
    assert tuple(map(int, found.split())) == expected(len(os.sched_getaffinity(0)))
