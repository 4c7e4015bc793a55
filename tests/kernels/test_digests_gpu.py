"""A comparison by digests: what it must see in a tile of 4,096 elements, what it must leave to the elements themselves,
and that a healthy audit moves no weight. Counts and indices are held against plain torch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from bits import bits_of, random_bits
from transfer_cases import place

from megasetup import kernels
from megasetup.kernels import Comparison, ComparisonStats, CopyJob, Transfer, native, plain

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
EQUAL = Comparison(0, 0, -1, -1)
TILE = 4096
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _native_gpu_half() -> None:
    """These tests are about the compiled GPU half: without it they would pass in plain torch."""
    assert kernels.native_status().gpu, kernels.native_status().why


@pytest.fixture(params=native.load().cpu.instruction_sets() if native.load() else [])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    module = native.load()
    assert module is not None
    before = module.cpu.instruction_set()
    module.cpu.set_instruction_set(request.param)
    yield request.param
    module.cpu.set_instruction_set(before)


def numbers(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Finite values, on the GPU."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def job(source: torch.Tensor, *, pinned: bool = False, dtype: torch.dtype = torch.float32) -> CopyJob:
    """A weight and its copy on the host, right."""
    target = place(source.numel(), dtype, 0, pinned=pinned)
    target.copy_(source)
    return CopyJob(source, None, target)


def host(task: CopyJob) -> torch.Tensor:
    assert task.host_target is not None
    return task.host_target


def flip(target: torch.Tensor, *indices: int, bit: int = 20) -> None:
    for index in indices:
        target.view(torch.int32)[index] ^= 1 << bit


def check(jobs: list[CopyJob], **options: int) -> ComparisonStats:
    """Compare twice; counts and indices are plain torch's, no copy changes, and each element went one way."""
    before = [bits_of(host(task)).clone() for task in jobs]
    transfer = Transfer(jobs, DEVICE, **options)
    expected = [Comparison(*plain.compare_one(task.source.cpu(), host(task))) for task in jobs]
    for _ in range(2):
        assert [far for _, far in transfer.compare()] == expected
        assert all(torch.equal(bits_of(host(task)), bits) for task, bits in zip(jobs, before, strict=True))
        stats = transfer.comparison_stats
        assert stats is not None
        assert min(stats.digested_elements, stats.returned_elements, stats.staged_elements) >= 0
        assert stats.digested_elements + stats.returned_elements + stats.staged_elements == sum(
            task.source.numel() for task in jobs
        )
    return stats


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_both_sides_make_the_same_digests(offset: int) -> None:
    jobs = []
    for count in [1, 2, 7, 33, 1000, 4095, 4096, 4097, 8191, 8192, 300_001]:
        for dtype in DTYPES:
            jobs.append(job(numbers(count + offset, dtype, count)[offset:]))
            jobs.append(job(numbers(count + offset, dtype, count)[offset:], dtype=dtype))
        jobs.append(job(numbers(count + offset, torch.float32, count)[offset:]))
    count = sum(task.source.numel() for task in jobs)
    assert check(jobs) == ComparisonStats(count, 0, 0)
    assert check(jobs, chunk_elements=1024) == ComparisonStats(count, 0, 0)


@pytest.mark.usefixtures("instruction_set")
def test_every_bf16_pattern_needs_no_weight() -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    target = torch.empty(1 << 16)
    target.view(torch.int32).copy_(patterns.view(torch.int16).to(torch.int32) << 16)
    assert check([CopyJob(patterns.cuda(), None, target)]) == ComparisonStats(1 << 16, 0, 0)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("every", [1, 97, 4099])
def test_consistent_masters_are_counted_without_their_weights(dtype: torch.dtype, every: int) -> None:
    jobs = [job(numbers(count, dtype, 5)) for count in (TILE + 5, 1_000_003)]
    for task in jobs:
        # The lowest bits round away.
        host(task).view(torch.int32)[every // 2 :: every] ^= 3
    assert check(jobs).staged_elements == 0
    transfer = Transfer(jobs, DEVICE)
    for task, (_, far) in zip(jobs, transfer.compare(), strict=True):
        assert far is not None
        assert far.rounded_differences == 0
        assert far.exact_differences == len(range(every // 2, task.source.numel(), every))
        assert far.first_exact == every // 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [0, 1, TILE - 1, TILE, 2 * TILE + 77, 3 * TILE, 3 * TILE + 4])
@pytest.mark.parametrize("pinned", [True, False])
def test_one_element(dtype: torch.dtype, index: int, pinned: bool) -> None:
    tasks = [job(numbers(3 * TILE + 5, dtype), pinned=pinned), job(numbers(5000, dtype, 1), pinned=pinned)]
    flip(host(tasks[0]), index)
    # Rows below 64 Ki elements are read by the CPU even when they are pinned.
    assert check(tasks).staged_elements == 3 * TILE + 5 + 5000


def distinct(seed: int) -> torch.Tensor:
    """A tile in which no value comes twice."""
    order = torch.randperm(TILE, generator=torch.Generator().manual_seed(seed))
    return (order + 0x3000).to(torch.int16).view(torch.bfloat16).cuda()


# A chunk for each of these weights, so that one that is found does not hide another.


def test_the_smallest_step_of_one_element() -> None:
    tasks = []
    for index in range(0, TILE, 13):
        tasks.append(job(distinct(index)))
        host(tasks[-1]).view(torch.int32)[index] += 1 << 16
    assert check(tasks, chunk_elements=TILE).staged_elements == TILE * len(tasks)


def test_two_elements_that_changed_places() -> None:
    tasks = []
    for first, second in [(0, 1), (3, 19), (16, 4000), (4094, 4095), *((i, 4095 - 3 * i) for i in range(0, 1000, 17))]:
        tasks.append(job(distinct(first)))
        target = host(tasks[-1])
        target[[first, second]] = target[[second, first]]
    assert check(tasks, chunk_elements=TILE).staged_elements == TILE * len(tasks)


def test_one_element_up_and_another_down() -> None:
    """What a plain sum would not see."""
    tasks = []
    for first in range(0, 4000, 50):
        tasks.append(job(distinct(first)))
        host(tasks[-1]).view(torch.int32)[first] += 1 << 16
        host(tasks[-1]).view(torch.int32)[first + 33] -= 1 << 16
    assert check(tasks, chunk_elements=TILE).staged_elements == TILE * len(tasks)


def test_elements_that_moved_by_whole_tiles() -> None:
    source = numbers(8 * TILE, torch.bfloat16)
    for order in ([1, 0, 2, 3, 4, 5, 6, 7], [7, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 7, 6]):
        task = job(source)
        host(task).copy_(source.cpu().float().view(8, TILE)[order].reshape(-1))
        assert check([task]).staged_elements == 8 * TILE
    # The same between two weights.
    tasks = [job(source[: 4 * TILE]), job(source[4 * TILE :])]
    first, second = (host(task).clone() for task in tasks)
    host(tasks[0]).copy_(second)
    host(tasks[1]).copy_(first)
    assert check(tasks).staged_elements == 8 * TILE


@pytest.mark.parametrize("dtype", DTYPES)
def test_nans_of_any_payload_are_equal(dtype: torch.dtype) -> None:
    source = numbers(3 * TILE, dtype)
    source[[5, 9000]] = torch.nan
    task = job(source)
    target = host(task)
    target.view(torch.int32)[5] = 0x7FA12345
    target.view(torch.int32)[9000] = -1
    check([task])
    assert Transfer([task], DEVICE).compare() == [(None, EQUAL)]
    # A NaN where the weight is a number, and a number where it is a NaN.
    target[6] = torch.nan
    target[9000] = 1.0
    check([task])
    assert Transfer([task], DEVICE).compare() == [(None, Comparison(2, 2, 6, 6))]


def test_an_infinite_weight_and_a_nan_are_not_equal() -> None:
    source = numbers(TILE, torch.bfloat16)
    source[7] = torch.inf
    task = job(source)
    host(task).view(torch.int32)[7] = 0x7F800001  # cut off, this NaN would be the infinity
    check([task])
    assert Transfer([task], DEVICE).compare() == [(None, Comparison(1, 1, 7, 7))]


@pytest.mark.parametrize("pinned", [True, False])
def test_all_stale(pinned: bool) -> None:
    tasks = [job(numbers(count, torch.bfloat16), pinned=pinned) for count in (20_000_000, 70_000, 300)]
    for task in tasks:
        host(task).fill_(1000.0)
    stats = check(tasks)
    assert stats.digested_elements == 0
    assert (stats.returned_elements > 0) == pinned


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("seed", range(2))
def test_mixtures(seed: int) -> None:
    """Large and small, pinned and pageable, right, consistent, stale, and with NaNs."""
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for index in range(40):
        count = int(torch.randint(1, 1_000_000 if index % 4 else 9000, (1,), generator=generator))
        dtype = [torch.bfloat16, torch.float16, torch.float32][index % 3]
        source = random_bits(count, dtype, generator).cuda() if index % 5 == 0 else numbers(count, dtype, index)
        task = job(source, pinned=index % 2 == 0)
        kind = int(torch.randint(0, 4, (1,), generator=generator))
        at = int(torch.randint(0, count, (1,), generator=generator))
        if kind == 1 and dtype != torch.float32:
            host(task).view(torch.int32)[at::101] ^= 1
        elif kind == 2:
            flip(host(task), at)
        elif kind == 3:
            host(task).fill_(-5.0)
        tasks.append(task)
    for chunk_elements in (4 << 20, 1 << 17):
        check(tasks, chunk_elements=chunk_elements)


def test_many_small_tensors() -> None:
    """Of those that are small no pinned one takes a copy command: the CPU reads them all."""
    generator = torch.Generator().manual_seed(8)
    counts = torch.randint(0, 6000, (3_000,), generator=generator).tolist()
    source = numbers(sum(counts), torch.bfloat16)
    target = place(sum(counts), torch.float32, 0, pinned=True)
    target.copy_(source)
    tasks = [CopyJob(low, None, high) for low, high in zip(source.split(counts), target.split(counts), strict=True)]
    assert check(tasks) == ComparisonStats(sum(counts), 0, 0)
    large = job(numbers(9_000_000, torch.bfloat16), pinned=True)
    assert check([*tasks, large]).staged_elements == 0
    middle = next(index for index in range(1500, 3000) if counts[index])
    flip(host(tasks[middle]), counts[middle] - 1)
    assert 0 < check([*tasks, large]).staged_elements <= sum(counts)


def test_more_than_one_part_of_digests() -> None:
    """Digests come in parts of 256 Mi elements; the last element of all is the stale one."""
    source = torch.ones(300_000_000, dtype=torch.bfloat16, device="cuda")
    target = torch.ones(300_000_000)
    transfer = Transfer([CopyJob(source, None, target)], DEVICE)
    assert transfer.compare() == [(None, EQUAL)]
    assert transfer.comparison_stats == ComparisonStats(300_000_000, 0, 0)
    target[-1] = 2.0
    assert transfer.compare() == [(None, Comparison(1, 1, 299_999_999, 299_999_999))]
    stats = transfer.comparison_stats
    assert stats is not None
    assert 0 < stats.staged_elements <= 4 << 20


def test_a_repair_is_seen() -> None:
    task = job(numbers(5_000_000, torch.bfloat16))
    transfer = Transfer([task], DEVICE)
    for _ in range(3):
        host(task).fill_(4.0)
        ((_, far),) = transfer.compare()
        assert far is not None
        assert far.rounded_differences > 4_000_000
        transfer.run()
        assert transfer.compare() == [(None, EQUAL)]
        assert transfer.comparison_stats == ComparisonStats(5_000_000, 0, 0)


def test_compare_waits_for_work_already_on_the_stream() -> None:
    source = torch.zeros(3_000_000, dtype=torch.bfloat16, device="cuda")
    task = CopyJob(source, torch.full((3_000_000,), 3.0, device="cuda"), torch.full((3_000_000,), 3.0))
    transfer = Transfer([task], DEVICE)
    assert transfer.compare() == [(Comparison(3_000_000, 3_000_000, 0, 0),) * 2]
    torch.cuda._sleep(100_000_000)
    source.fill_(3.0)
    assert transfer.compare() == [(EQUAL, EQUAL)]


def test_few_threads_read_too() -> None:
    tasks = [job(numbers(9_000_000, torch.bfloat16, seed), pinned=seed > 0) for seed in range(3)]
    flip(host(tasks[1]), 8_999_999)
    try:
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            check(tasks)
            assert kernels.get_num_reading_threads() == threads
    finally:
        kernels.set_num_threads(None)


INTERRUPTED = """
import os, torch
from megasetup.kernels import CopyJob, Transfer

count = 400_000_000
source = torch.full((count,), 1.5, dtype=torch.bfloat16, device="cuda")
host = torch.full((count,), 1.5)
transfer = Transfer([CopyJob(source, torch.full((count,), 1.5, device="cuda"), host)], torch.device("cuda", 0))
transfer.compare()
threads = len(os.listdir("/proc/self/task"))
print("ready", flush=True)
try:
    while True:
        {change}
        transfer.compare()
except KeyboardInterrupt:
    print("interrupted", flush=True)
if len(os.listdir("/proc/self/task")) > threads:
    raise SystemExit("threads were left behind")
host.fill_(1.5)
host[-1] = 2.0
if [tuple(far) for _, far in transfer.compare()] != [(1, 1, count - 1, count - 1)]:
    raise SystemExit("the comparison after the interrupt is wrong")
print("finished", flush=True)
"""


@pytest.mark.parametrize("change", ["", "host[::1000] = 0.0"])
def test_ctrl_c_in_the_middle_of_a_comparison(change: str) -> None:
    code = INTERRUPTED.replace("{change}", change or "pass")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
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
