"""Transfer from a GPU: every kind of job, each way over the wire, audited, interrupted, and two at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bits import random_bits, same_bits, widened
from transfer_cases import check_written, flip_bits, place, random_jobs

from megasetup import kernels
from megasetup.kernels import Comparison, CopyJob, Transfer, plain

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
EQUAL = Comparison(0, 0, -1, -1)


@pytest.fixture(autouse=True)
def _native_gpu_half() -> None:
    """These tests are about the compiled GPU half: without it they would pass in plain torch."""
    assert kernels.native_status().gpu, kernels.native_status().why


@pytest.fixture
def one_thread() -> Iterator[None]:
    kernels.set_num_threads(1)
    yield
    kernels.set_num_threads(None)


def host_elements(jobs: list[CopyJob]) -> int:
    return sum(job.source.numel() for job in jobs if job.host_target is not None)


def expected_comparisons(jobs: list[CopyJob]) -> list[tuple[tuple[int, ...] | None, ...]]:
    """What plain torch finds, on the CPU."""
    return [
        tuple(None if copy is None else plain.compare_one(job.source.cpu(), copy.cpu()) for copy in job[1:])
        for job in jobs
    ]


def run_and_check(jobs: list[CopyJob], **options: int) -> None:
    transfer = Transfer(jobs, DEVICE, **options)
    for _ in range(2):
        stats = transfer.run()
        check_written(jobs)
        assert stats.staged_elements + stats.direct_elements == host_elements(jobs)
        assert 0.0 <= stats.device_seconds <= stats.seconds
        assert stats.threads == kernels.get_num_threads()
        assert stats.wire_bandwidth > 0
        for _, *targets in jobs:
            for target in targets:
                if target is not None:
                    target.fill_(7.0)
    transfer.run()
    assert all(side in (None, EQUAL) for result in transfer.compare() for side in result)
    assert flip_bits(jobs, seed=9) > 0
    torch.cuda.synchronize()
    found = [tuple(None if side is None else tuple(side) for side in result) for result in transfer.compare()]
    assert found == expected_comparisons(jobs)


@pytest.mark.parametrize("seed", range(6))
def test_random_jobs(seed: int) -> None:
    run_and_check(random_jobs(seed, "cuda"))


@pytest.mark.parametrize("seed", range(3))
def test_random_jobs_in_tiny_chunks(seed: int) -> None:
    run_and_check(random_jobs(seed, "cuda"), chunk_elements=1024)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("chunk_elements", [1024, 1 << 16, 1 << 21])
def test_random_jobs_with_one_thread(chunk_elements: int) -> None:
    run_and_check(random_jobs(11, "cuda"), chunk_elements=chunk_elements)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pinned", [True, False])
def test_a_large_weight_when_the_cpu_is_behind(pinned: bool) -> None:
    count = 100_000_007
    source = random_bits(count, torch.bfloat16, torch.Generator().manual_seed(1)).cuda()
    jobs = [
        CopyJob(source, place(count, torch.float32, 0, device="cuda"), place(count, torch.float32, 0, pinned=pinned))
    ]
    stats = Transfer(jobs, DEVICE).run()
    check_written(jobs)
    assert stats.staged_elements + stats.direct_elements == count
    # A piece takes whole 16 bytes of its slot.
    assert 0 <= stats.staged_wire_bytes - 2 * stats.staged_elements < 16
    assert stats.direct_wire_bytes == 4 * stats.direct_elements
    if not pinned:
        assert stats.direct_elements == 0


def test_no_jobs_and_empty_jobs() -> None:
    assert Transfer([], DEVICE).compare() == []
    assert Transfer([], DEVICE).run().staged_elements == 0
    nothing = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    transfer = Transfer([CopyJob(nothing, nothing.float(), torch.empty(0)), CopyJob(nothing, None, None)], DEVICE)
    assert transfer.run().staged_elements == 0
    assert transfer.compare() == [(EQUAL, EQUAL), (None, None)]


def test_a_hundred_thousand_tiny_tensors() -> None:
    generator = torch.Generator().manual_seed(2)
    counts = torch.randint(0, 40, (100_000,), generator=generator).tolist()
    source = random_bits(sum(counts), torch.bfloat16, generator).cuda()
    near, far = place(sum(counts), torch.float32, 0, device="cuda"), place(sum(counts), torch.float32, 0, pinned=True)
    parts = zip(source.split(counts), near.split(counts), far.split(counts), strict=True)
    jobs = [CopyJob(*part) for part in parts]
    transfer = Transfer(jobs, DEVICE)
    transfer.run()
    expected = widened(source)
    assert same_bits(near, expected)
    assert same_bits(far, expected)
    assert set(transfer.compare()) == {(EQUAL, EQUAL)}


def test_two_transfers_of_two_threads() -> None:
    lists = [random_jobs(21, "cuda"), random_jobs(22, "cuda")]

    def repeat(jobs: list[CopyJob]) -> int:
        transfer = Transfer(jobs, DEVICE, chunk_elements=1 << 14)
        return [transfer.run() for _ in range(20)][-1].staged_elements

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(repeat, jobs) for jobs in lists]:
            done.result()
    for jobs in lists:
        check_written(jobs)


def test_run_waits_for_work_already_on_the_stream() -> None:
    count = 3_000_000
    source = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    jobs = [CopyJob(source, place(count, torch.float32, 0, device="cuda"), place(count, torch.float32, 0))]
    transfer = Transfer(jobs, DEVICE)
    torch.cuda._sleep(100_000_000)
    source.fill_(3.0)
    transfer.run()
    check_written(jobs)


INTERRUPTED = """
import os, torch
from megasetup.kernels import CopyJob, Transfer

count = 400_000_000
source = torch.full((count,), 1.5, dtype=torch.bfloat16, device="cuda")
host = torch.zeros(count)
transfer = Transfer([CopyJob(source, torch.zeros(count, device="cuda"), host)], torch.device("cuda", 0))
transfer.run()
threads = len(os.listdir("/proc/self/task"))
print("ready", flush=True)
try:
    while True:
        transfer.run()
except KeyboardInterrupt:
    print("interrupted", flush=True)
if len(os.listdir("/proc/self/task")) > threads:
    raise SystemExit("threads were left behind")
host.zero_()
transfer.run()
if not bool((host == 1.5).all()):
    raise SystemExit("the run after the interrupt is wrong")
print("finished", flush=True)
"""


def test_ctrl_c_in_the_middle_of_a_run() -> None:
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)
            start = time.monotonic()
            process.send_signal(2)
            assert process.stdout.readline() == "interrupted\n"
            assert time.monotonic() - start < 2.0
            assert process.stdout.readline() == "finished\n"
            assert process.wait(60) == 0
        finally:
            process.kill()
