"""Tensors by their bit patterns, and comparison by bits: what the tests of the kernels are made of."""

from __future__ import annotations

import functools

import torch

LOW_DTYPES = [torch.bfloat16, torch.float16]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns, as integers on the CPU."""
    return tensor.detach().cpu().view(_INTEGERS[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Each of the 65,536 values of a 16-bit dtype once."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@functools.cache
def _wide_patterns(dtype: torch.dtype) -> torch.Tensor:
    return all_patterns(dtype).float()


def widened(low: torch.Tensor) -> torch.Tensor:
    """The FP32 values of a 16-bit tensor, on the CPU, by torch's own cast of every pattern.

    (Of every pattern, because torch casts an FP16 NaN in one way in the vectors of a long tensor, where its payload
    stays, and in another in the few elements that are left over.)
    """
    return _wide_patterns(low.dtype)[bits_of(low).to(torch.int64) & 0xFFFF]


def random_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bit pattern at all, NaN and infinities included."""
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * width,), dtype=torch.uint8, generator=generator).view(dtype)


def values_to_narrow() -> torch.Tensor:
    """FP32 values around every rounding boundary of BF16 and FP16 (ties, subnormals, overflow, NaN), and at random."""
    low = torch.tensor([0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF])
    edges = (torch.arange(1 << 16).unsqueeze(1) << 16 | low).reshape(-1).to(torch.int32).view(torch.float32)
    return torch.cat([edges, random_bits(200_000, torch.float32, torch.Generator().manual_seed(3))])


def check_narrowed(values: torch.Tensor, narrowed: torch.Tensor, *, nan_signs: bool = True) -> None:
    """`narrowed` holds torch's own rounding of `values`; where that is a NaN, some NaN (of its sign)."""
    values, narrowed = values.cpu(), narrowed.cpu()
    numbers = ~values.isnan()
    assert same_bits(narrowed[numbers], values[numbers].to(narrowed.dtype))
    assert narrowed[~numbers].isnan().all()
    if nan_signs:
        assert torch.equal(narrowed[~numbers].signbit(), values[~numbers].signbit())
