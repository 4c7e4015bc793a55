"""The worker threads: asleep when idle, alive after a fork, shared by threads, and stopped by Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from bits import random_bits, same_bits

from megasetup import kernels


def large() -> tuple[torch.Tensor, torch.Tensor]:
    source = random_bits(3_000_000, torch.bfloat16, torch.Generator().manual_seed(1))
    return source, torch.empty(source.numel())


def test_workers_sleep_when_idle() -> None:
    source, target = large()
    kernels.widen([source], [target])
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


# In a process of its own: a child forked from a test run would inherit whatever other tests left running.
FORKED = """
import os, torch
from megasetup import kernels

source, target = torch.full((3_000_000,), 1.5, dtype=torch.bfloat16), torch.zeros(3_000_000)
kernels.set_num_threads(3)
kernels.widen([source], [target])
child = os.fork()
if child == 0:
    source.view(torch.int16)[:] = 0x4000
    kernels.widen([source], [target])
    right = target.min() == target.max() == 2.0 and kernels.get_num_threads() == 3
    os._exit(0 if right else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
kernels.widen([source], [target])
assert target.min() == target.max() == 1.5
"""


def test_a_forked_child_has_workers_of_its_own() -> None:
    # torch's own threads do not survive a fork; one of them is enough here.
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_two_threads_at_once() -> None:
    pairs = [large() for _ in range(2)]
    pairs[1][0].view(torch.int16).neg_()

    def repeat(source: torch.Tensor, target: torch.Tensor) -> set[kernels.Comparison]:
        results = set()
        for _ in range(20):
            target.zero_()
            kernels.widen([source], [target])
            results.update(kernels.compare([source], [target]))
        return results

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(repeat, *pair) for pair in pairs]:
            assert done.result() == {kernels.Comparison(0, 0, -1, -1)}
    for source, target in pairs:
        assert same_bits(target, source.float())


INTERRUPTED = """
import os, torch
from megasetup import kernels

# One pair, many times over: a call of many seconds in a little memory.
source, target = torch.full((4_000_000,), 1.5, dtype=torch.bfloat16), torch.zeros(4_000_000)
kernels.widen([source], [target])
threads = len(os.listdir("/proc/self/task"))
sources, targets = [source] * 20_000, [target] * 20_000
print("ready", flush=True)
try:
    kernels.{call}(sources, targets)
    raise SystemExit("the call was not long enough to be interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
if len(os.listdir("/proc/self/task")) > threads:
    raise SystemExit("threads were left behind")
target.zero_()
kernels.widen([source], [target])
if not bool((target == 1.5).all()):
    raise SystemExit("the call after the interrupt is wrong")
print("finished", flush=True)
"""


def check_interrupted(call: str) -> None:
    code = INTERRUPTED.replace("{call}", call)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            start = time.monotonic()
            process.send_signal(2)
            assert process.stdout.readline() == "interrupted\n"
            assert time.monotonic() - start < 1.0
            assert process.stdout.readline() == "finished\n"
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_ctrl_c_in_the_middle_of_a_widening() -> None:
    check_interrupted("widen")


def test_ctrl_c_in_the_middle_of_a_comparison() -> None:
    check_interrupted("compare")
