"""widen, narrow and compare on the CPU: every pattern, every length and alignment, by every instruction set."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
import torch
from bits import LOW_DTYPES, all_patterns, check_narrowed, random_bits, same_bits, values_to_narrow, widened
from hypothesis import given, settings
from hypothesis import strategies as st

from megasetup import _C, kernels
from megasetup.kernels import Comparison, plain
from megasetup.kernels.rows import WIDEN_BF16, WIDEN_FP16

EQUAL = Comparison(0, 0, -1, -1)
GUARD = 0xA5
LENGTHS = [*range(71), 127, 128, 129, 1023, 1024, 1025]


@pytest.fixture(params=_C.cpu.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.cpu.instruction_set()
    _C.cpu.set_instruction_set(request.param)
    yield request.param
    _C.cpu.set_instruction_set(before)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("repeats", [1, 20])  # within the cache, and past it by streaming stores
def test_widen_is_exact_for_every_pattern(dtype: torch.dtype, repeats: int) -> None:
    patterns = all_patterns(dtype).repeat(repeats)
    target = torch.empty(patterns.numel())
    kernels.widen([patterns], [target])
    assert same_bits(target, widened(patterns))
    assert kernels.compare([patterns], [target]) == [EQUAL]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_narrow_rounds_as_torch_does(dtype: torch.dtype) -> None:
    values = values_to_narrow()
    target = torch.empty(values.numel(), dtype=dtype)
    kernels.narrow([values], [target])
    check_narrowed(values, target)


@pytest.mark.parametrize("function", [kernels.widen, kernels.narrow, kernels.compare])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,), ()])
def test_a_tensor_is_no_sequence_of_tensors(function, shape) -> None:
    low, high = torch.ones(shape, dtype=torch.bfloat16), torch.zeros(shape)
    first, second = (high, low) if function is kernels.narrow else (low, high)
    for pair in ((first, second), ([first], second), (first, [second])):
        with pytest.raises(TypeError, match="a sequence of tensors is needed"):
            function(*pair)
    assert (low == 1).all()
    assert (high == 0).all()


def test_widened_takes_a_sequence_too() -> None:
    with pytest.raises(TypeError, match=r"sources is a tensor of shape \(4,\): a sequence of tensors is needed"):
        kernels.widened(torch.ones(4, dtype=torch.bfloat16))


def slots(length: int) -> torch.Tensor:
    """Guard bytes with room for `length` bytes in each row from column 64 on, one more byte off alignment each row."""
    stride = (length + 64) // 64 * 64 + 128 + 1
    return torch.full((64, stride), GUARD, dtype=torch.uint8)


def addresses(memory: torch.Tensor) -> list[int]:
    assert memory.data_ptr() % 64 == 0
    return [memory.data_ptr() + row * memory.stride(0) + 64 for row in range(64)]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("streaming", [False, True])
def test_every_length_at_every_byte_address(dtype: torch.dtype, streaming: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    kind = WIDEN_BF16 if dtype == torch.bfloat16 else WIDEN_FP16
    # A large tensor in the same call is what makes the call stream.
    large = random_bits(300_000 if streaming else 0, dtype, generator)
    large_wide, large_back = torch.empty(large.numel()), torch.empty_like(large)
    for length in LENGTHS:
        values = random_bits(length, dtype, generator)
        low, wide, back = slots(2 * length), slots(4 * length), slots(2 * length)
        low[:, 64 : 64 + 2 * length] = values.view(torch.uint8)
        before = low.clone()
        sources = addresses(low)[::-1]  # so that a source and its target are misaligned differently
        rows = array("q", (kind, large.data_ptr(), large_wide.data_ptr(), large.numel()))
        for source, target in zip(sources, addresses(wide), strict=True):
            rows.extend((kind, source, target, length))
        _C.cpu.widen(rows)
        expected = slots(4 * length)
        expected[:, 64 : 64 + 4 * length] = widened(values).view(torch.uint8)
        assert torch.equal(wide, expected), length
        assert _C.cpu.compare(rows) == [tuple(EQUAL)] * 65

        rows = array("q", (kind, large_wide.data_ptr(), large_back.data_ptr(), large.numel()))
        for source, target in zip(addresses(wide)[::-1], addresses(back), strict=True):
            rows.extend((kind, source, target, length))
        _C.cpu.narrow(rows)
        narrowed = torch.empty_like(values)
        kernels.narrow([widened(values)], [narrowed])
        check_narrowed(widened(values), narrowed)
        expected = slots(2 * length)
        expected[:, 64 : 64 + 2 * length] = narrowed.view(torch.uint8)
        assert torch.equal(back, expected), length
        assert torch.equal(low, before)
        assert torch.equal(wide[:, 64 : 64 + 4 * length], widened(values).view(torch.uint8).expand(64, -1))
    assert same_bits(large_wide, widened(large))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 1000, 1_000_003])
def test_copies_of_the_weights_own_dtype(dtype: torch.dtype, count: int) -> None:
    source = random_bits(count + 1, dtype, torch.Generator().manual_seed(2))[1:]
    memory = torch.full((count + 5,), 7.0, dtype=dtype)
    kernels.widen([source], [memory[3:-2]])
    assert same_bits(memory[3:-2], source)
    assert memory[:3].eq(7.0).all()
    assert memory[-2:].eq(7.0).all()
    kernels.narrow([source], [memory[:count]])
    assert same_bits(memory[:count], source)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float32])
@pytest.mark.parametrize("own", [False, True])
def test_compare_agrees_with_plain_torch(dtype: torch.dtype, own: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    counts = [0, 1, 5, 16, 33, 0, 1000, 300_001, *([0, 1, 2, 3, 70] * 400)]
    weights = [random_bits(count, dtype, generator) for count in counts]
    masters = [weight.clone() if own else weight.to(torch.float32, copy=True) for weight in weights]
    assert kernels.compare(weights, masters) == [EQUAL] * len(weights)
    for master in masters:
        integers = master.view(torch.int32 if master.element_size() == 4 else torch.int16)
        for _ in range(min(master.numel(), 3)):
            at = int(torch.randint(master.numel(), (1,), generator=generator))
            integers[at] ^= 1 << int(torch.randint(8 * master.element_size() - 1, (1,), generator=generator))
    found = kernels.compare(weights, masters)
    assert [tuple(result) for result in found] == plain.compare(weights, masters)
    assert sum(result.exact_differences for result in found) > 1000


@pytest.mark.usefixtures("instruction_set")
def test_compare_of_unrelated_bits_agrees_with_plain_torch() -> None:
    generator = torch.Generator().manual_seed(5)
    for dtype in LOW_DTYPES:
        weights = [random_bits(200_003, dtype, generator)]
        masters = [random_bits(200_003, torch.float32, generator)]
        assert [tuple(result) for result in kernels.compare(weights, masters)] == plain.compare(weights, masters)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_nan_equals_nan_and_zeros_differ_by_sign(dtype: torch.dtype) -> None:
    nan = float("nan")
    weight = torch.tensor([nan, -0.0, 0.0, 1.0, nan] * 9, dtype=dtype)
    master = torch.tensor([-nan, 0.0, 0.0, nan, 1.0] * 9)
    master[3] = 1.0
    assert kernels.compare([weight], [master]) == [Comparison(26, 26, 1, 1)]


def test_a_more_precise_master_is_consistent() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    master = torch.tensor([1.0, 2.001, 3.5])
    assert kernels.compare([weight], [master]) == [Comparison(2, 1, 1, 2)]


def test_the_first_difference_is_the_first_whoever_finds_it() -> None:
    weight = torch.zeros(3_000_000, dtype=torch.bfloat16)
    master = torch.zeros(3_000_000)
    master[700_000:] = 1.0
    master[699_999] = 1e-45
    for _ in range(20):
        assert kernels.compare([weight], [master]) == [Comparison(2_300_001, 2_300_000, 699_999, 700_000)]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.one_of(st.integers(0, 100), st.integers(60_000, 140_000)), max_size=12),
    offset=st.integers(0, 9),
    dtype=st.sampled_from(LOW_DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_list_of_lengths(counts: list[int], offset: int, dtype: torch.dtype, seed: int) -> None:
    source = random_bits(sum(counts), dtype, torch.Generator().manual_seed(seed))
    memory = torch.full((sum(counts) + offset + 1,), 7.0)
    target = memory[offset:-1]
    kernels.widen(source.split(counts), target.split(counts))
    assert same_bits(target, widened(source))
    assert memory[:offset].eq(7.0).all()
    assert memory[-1] == 7.0
    assert kernels.compare(source.split(counts), target.split(counts)) == [EQUAL] * len(counts)
    back = torch.empty_like(source)
    kernels.narrow(target.split(counts), back.split(counts))
    check_narrowed(widened(source), back)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_plain_torch_gives_the_same(dtype: torch.dtype) -> None:
    values = values_to_narrow()
    wide, low = torch.empty(1 << 16), torch.empty(values.numel(), dtype=dtype)
    plain.widen([all_patterns(dtype)], [wide])
    assert same_bits(wide, widened(all_patterns(dtype)))
    plain.narrow([values], [low])
    check_narrowed(values, low, nan_signs=False)


def test_nothing_in_nothing_out() -> None:
    kernels.widen([], [])
    kernels.narrow([], [])
    assert kernels.compare([], []) == []


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("weights", "copies", "error", "message"),
    [
        ([ones(4), ones(4)], [torch.zeros(4)], ValueError, "2 weights and 1 copies"),
        ([ones(4), ones(4)], [torch.zeros(4), torch.zeros(5)], ValueError, "4 elements and a copy of 5"),
        ([ones(4), ones(4, 6).t()], [torch.zeros(4), torch.zeros(6, 4)], ValueError, "not contiguous"),
        ([ones(4), ones(6, 4)], [torch.zeros(4), torch.zeros(4, 6).t()], ValueError, "not contiguous"),
        ([ones(4), ones(4)], [torch.zeros(4), torch.zeros(4, dtype=torch.float64)], TypeError, "float64"),
        ([ones(4), ones(4)], [torch.zeros(4), torch.zeros(4, dtype=torch.float16)], TypeError, "float16"),
        ([ones(4), ones(4, dtype=torch.float32)], [torch.zeros(4), torch.zeros(4).bfloat16()], TypeError, "bfloat16"),
        ([ones(4), ones(4, dtype=torch.int16)], [torch.zeros(4), torch.zeros(4)], TypeError, "int16"),
        ([ones(4), ones(4).to("meta")], [torch.zeros(4), torch.zeros(4)], ValueError, "must be on one device"),
        ([ones(4), ones(4).to("meta")], [torch.zeros(4), torch.zeros(4).to("meta")], ValueError, "one device"),
    ],
)
def test_errors_come_before_anything_is_written(
    weights: list[torch.Tensor], copies: list[torch.Tensor], error: type[Exception], message: str
) -> None:
    before = [copy.clone() for copy in copies], [weight.clone() for weight in weights]
    for call in (kernels.widen, kernels.compare, lambda low, high: kernels.narrow(high, low)):
        with pytest.raises(error, match=message):
            call(weights, copies)
    for now, then in zip([*copies, *weights], [*before[0], *before[1]], strict=True):
        assert now.is_meta or torch.equal(now, then)


def test_memory_that_does_not_hold_the_values_is_refused() -> None:
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    target = torch.zeros(4)
    for weight, copy, message in (
        (ones(4), freed, "copy of 4 elements on cpu has no memory"),
        (freed, target, "weight of 4 elements on cpu has no memory"),
        (torch._neg_view(ones(4)), target, "weight of shape .* negated view"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.widen([weight], [copy])
    assert torch.equal(target, torch.zeros(4))


def test_rows_that_make_no_sense_are_refused() -> None:
    for rows in (array("q", [0, 0, 0]), array("i", [0] * 4), array("q", [4, 0, 0, 0]), array("q", [0, 0, 0, -1])):
        with pytest.raises(ValueError, match="row"):
            _C.cpu.widen(rows)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match=r"abacus.*scalar"):
        _C.cpu.set_instruction_set("abacus")
