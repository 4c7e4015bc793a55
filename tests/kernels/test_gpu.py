"""widen, narrow and compare on a GPU, held to torch's results on the CPU (its GPU treats NaN in a way of its own)."""

from __future__ import annotations

import pytest
import torch
from bits import LOW_DTYPES, all_patterns, check_narrowed, random_bits, same_bits, values_to_narrow, widened

from megasetup import kernels
from megasetup.kernels import plain

pytestmark = pytest.mark.gpu

EQUAL = kernels.Comparison(0, 0, -1, -1)


@pytest.fixture(autouse=True)
def _native_gpu_half() -> None:
    """These tests are about the compiled GPU half: without it they would pass in plain torch."""
    assert kernels.native_status().gpu, kernels.native_status().why


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_widen_is_exact_for_every_pattern(dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    target = torch.empty(1 << 16, device="cuda")
    kernels.widen([patterns.cuda()], [target])
    assert same_bits(target, widened(patterns))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_narrow_rounds_as_torch_does(dtype: torch.dtype) -> None:
    values = values_to_narrow()
    target = torch.empty(values.numel(), dtype=dtype, device="cuda")
    kernels.narrow([values.cuda()], [target])
    check_narrowed(values, target)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_every_misalignment_and_awkward_length(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [*range(35), 127, 128, 129, 1023, 1024, 1025, 70_001]
    sources, targets, backs, starts = [], [], [], []
    slot = 70_001 + 32
    memory = torch.full((len(lengths) * 17 * slot,), 7.0, device="cuda")
    expected = memory.cpu()
    for index, length in enumerate(lengths):
        for offset in range(17):
            source = random_bits(length, dtype, generator)
            sources.append(torch.empty(length + 17, dtype=dtype, device="cuda")[16 - offset : 16 - offset + length])
            sources[-1].copy_(source)
            starts.append((index * 17 + offset) * slot + 8 + offset)
            targets.append(memory[starts[-1] : starts[-1] + length])
            expected[starts[-1] : starts[-1] + length] = widened(source)
            backs.append(torch.full((length + 2,), 7.0, dtype=dtype, device="cuda"))
    kernels.widen(sources, targets)
    assert same_bits(memory, expected)  # the targets, and everything around them
    assert kernels.compare(sources, targets) == [EQUAL] * len(sources)
    kernels.narrow(targets, [back[1:-1] for back in backs])
    for source, back in zip(sources, backs, strict=True):
        check_narrowed(widened(source), back[1:-1])
        assert back[0] == 7.0
        assert back[-1] == 7.0


@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float32])
def test_copies_of_the_weights_own_dtype(dtype: torch.dtype) -> None:
    source = random_bits(100_003, dtype, torch.Generator().manual_seed(2)).cuda()[1:]
    target = torch.empty(100_005, dtype=dtype, device="cuda")[3:]
    kernels.widen([source], [target])
    assert same_bits(source, target)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_compare_counts_and_finds_the_first(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    weights = [random_bits(count, dtype, generator) for count in (0, 1, 5, 33, 1000, 300_000, 0, 77)]
    masters = [weight.float() for weight in weights]
    for master in masters:
        for _ in range(min(master.numel(), 20)):
            at = int(torch.randint(master.numel(), (1,), generator=generator))
            master.view(torch.int32)[at] ^= 1 << int(torch.randint(31, (1,), generator=generator))
    expected = plain.compare(weights, masters)
    found = kernels.compare([weight.cuda() for weight in weights], [master.cuda() for master in masters])
    assert [tuple(result) for result in found] == expected
    assert sum(result.exact_differences for result in found) > 40


def test_nan_equals_nan_and_zeros_differ_by_sign() -> None:
    weight = torch.tensor([float("nan"), -0.0, 0.0, 1.0], dtype=torch.bfloat16, device="cuda")
    master = torch.tensor([-float("nan"), 0.0, 0.0, float("nan")], device="cuda")
    assert kernels.compare([weight], [master]) == [kernels.Comparison(2, 2, 1, 1)]


def test_a_hundred_thousand_tensors_in_one_call() -> None:
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 40, (100_000,), generator=generator).tolist()
    counts[50_000] = 5_000_000
    source = random_bits(sum(counts), torch.bfloat16, generator).cuda()
    target = torch.full((sum(counts),), 7.0, device="cuda")
    sources, targets = source.split(counts), target.split(counts)
    kernels.widen(sources, targets)
    assert same_bits(target, widened(source))
    assert set(kernels.compare(sources, targets)) == {EQUAL}
    planted = {70_000: 0, 50_000: 4_999_999, 99_999: 0}
    for index in (70_000, 99_999):
        while not counts[index] or not sources[index][0].isfinite():
            planted.pop(index)
            index -= 1
            planted[index] = 0
    sources[50_000][-1] = 1.0
    kernels.widen(sources, targets)
    for index, at in planted.items():
        targets[index][at] *= -1.0
    results = kernels.compare(sources, targets)
    assert {i: result for i, result in enumerate(results) if result != EQUAL} == {
        index: kernels.Comparison(1, 1, at, at) for index, at in planted.items()
    }


def test_more_than_two_to_the_31_elements() -> None:
    limit = 1 << 31
    count = limit + 100_003
    source = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    # Finite values, another at each place of a window of 2^14.
    pattern = torch.arange(1 << 14, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    whole = count >> 14 << 14
    source[:whole].view(-1, 1 << 14).copy_(pattern)
    source[whole:].copy_(pattern[: count - whole])
    target = torch.zeros(count, device="cuda")
    kernels.widen([source], [target])
    for start in (0, limit // 2 - 50, limit - 50, limit + 50_000, count - 100):
        part = slice(start, start + 100)
        assert same_bits(target[part], widened(source[part]))
    assert kernels.compare([source], [target]) == [EQUAL]
    target[limit + 7] = 3.0e38
    target.view(torch.int32)[count - 1] ^= 1
    assert kernels.compare([source], [target]) == [kernels.Comparison(2, 1, limit + 7, limit + 7)]
    target.view(torch.int32)[12_345] ^= 1
    assert kernels.compare([source], [target]) == [kernels.Comparison(3, 1, 12_345, limit + 7)]
    kernels.narrow([target], [source])
    assert source[limit + 7].item() == torch.tensor(3.0e38).bfloat16().item()
    assert same_bits(source[count - 1], pattern[count - 1 - whole])


def test_work_waits_for_the_current_stream_alone() -> None:
    source = torch.zeros(50_000_000, dtype=torch.bfloat16, device="cuda")
    target = torch.full((50_000_000,), 7.0, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.fill_(2.0)
        kernels.widen([source], [target])
        total = (target == 2.0).sum()
    stream.synchronize()
    assert int(total) == target.numel()


def test_tensors_of_two_devices_are_refused_and_nothing_is_written() -> None:
    source = [torch.ones(4, dtype=torch.bfloat16, device="cuda"), torch.ones(4, dtype=torch.bfloat16)]
    target = [torch.zeros(4, device="cuda"), torch.zeros(4)]
    with pytest.raises(ValueError, match="one device"):
        kernels.widen(source, target)
    assert not target[0].any()
    assert not target[1].any()
