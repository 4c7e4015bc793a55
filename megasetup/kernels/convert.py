"""widen, narrow and compare over any number of tensors in one call.

Megatron's per-tensor copies pay a launch, or a thread-pool barrier, for each of thousands of small tensors. These take
the whole list: one launch on a GPU, one parallel loop on the CPU.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from megasetup.kernels import native, plain
from megasetup.kernels.rows import check_pair, kind_of


class Comparison(NamedTuple):
    """How a master differs from its weight.

    A NaN on both sides counts as equal, whatever its payload (but a copy in a 16-bit weight's own dtype is compared by
    its bits alone); zeros of different sign differ.

    Attributes:
        exact_differences: elements where the master is not the widened weight, bit for bit.
        rounded_differences: elements where the master, rounded to the weight's dtype, is not the weight.
        first_exact: index of the first of exact_differences, -1 when there is none.
        first_rounded: index of the first of rounded_differences, -1 when there is none.
    """

    exact_differences: int
    rounded_differences: int
    first_exact: int
    first_rounded: int


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _rows(low: Sequence[torch.Tensor], high: Sequence[torch.Tensor], *, low_first: bool) -> array[int]:
    if len(low) != len(high):
        raise ValueError(f"{len(low)} weights and {len(high)} copies: there must be as many of one as of the other")
    device = low[0].device
    rows: array[int] = array("q")
    for weight, copy in zip(low, high, strict=True):
        kind = check_pair(weight, copy)
        if weight.device != device:
            raise ValueError(f"tensors on {device} and on {weight.device} in one call: one call takes one device")
        source, target = (weight, copy) if low_first else (copy, weight)
        rows.extend((kind, source.data_ptr(), target.data_ptr(), weight.numel()))
    return rows


def widen(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Write each BF16 or FP16 source into its FP32 target, exactly (FP32 into FP32 is a plain copy).

    Args:
        sources: contiguous tensors of bfloat16, float16 or float32, any shapes, all on one device.
        targets: contiguous float32 tensors with the sources' element counts, on the same device.

    Raises:
        TypeError: dtypes that do not go together.
        ValueError: counts, element counts, devices or strides that do not match; nothing has been written then.
    """
    if not sources and not targets:
        return
    rows = _rows(sources, targets, low_first=True)
    device = sources[0].device
    module = native.for_device(device)
    if module is None:
        plain.widen(sources, targets)
    elif device.type == "cpu":
        module.cpu.widen(rows)
    else:
        module.gpu.widen(rows, device.index, _stream(device))


# FP32 elements in 16 bytes, the widest store of a kernel.
_ALIGNMENT = 4


def widened(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """New FP32 tensors with the values of small 16-bit ones, exactly: one allocation and, on a GPU, one launch.

    Made for many tiny tensors, where Python's few microseconds a tensor are the whole cost: so the checks run over the
    list at once, and the rows are made in C++.

    Args:
        sources: contiguous tensors of shape [n], n may differ, of bfloat16 or float16 alike, all on one device.

    Returns:
        float32 tensors of the same shapes, views of one allocation in which each starts on 16 bytes. On the meta
        device they have no values either.

    Raises:
        TypeError: several dtypes, or one that is not bfloat16 or float16.
        ValueError: several devices, or a tensor that is not contiguous or has not one dimension.

    Nothing has been allocated when it raises.
    """
    if not sources:
        return []
    # `map` over the list, once for each property: three times as quick as a loop that asks each tensor for all of them.
    dtypes, indices = set(map(attrgetter("dtype"), sources)), set(map(torch.Tensor.get_device, sources))
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        raise TypeError(f"sources of {sorted(map(str, dtypes))}: they must all be torch.bfloat16, or all torch.float16")
    device = sources[0].device
    # The index tells GPUs apart; the device itself, which costs more to compare, the CPU from what else has no index.
    if len(indices) > 1 or (device.type != "cuda" and any(source.device != device for source in sources)):
        names = sorted({str(source.device) for source in sources})
        raise ValueError(f"sources on {names}: one call takes one device")
    if set(map(torch.Tensor.dim, sources)) != {1} or not all(map(torch.Tensor.is_contiguous, sources)):
        index, odd = next((i, s) for i, s in enumerate(sources) if s.dim() != 1 or not s.is_contiguous())
        raise ValueError(
            f"source {index} has shape {tuple(odd.shape)} and strides {odd.stride()}: "
            "it must have one dimension, and its elements side by side"
        )
    counts = [*map(torch.Tensor.numel, sources)]
    places = [-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts]
    flat = torch.empty(sum(places), dtype=torch.float32, device=device)
    # Views made by one call; the unsafe split keeps no record that they are views, and nothing here sees autograd.
    targets: Sequence[torch.Tensor] = flat.unsafe_split_with_sizes(places)
    if places != counts:
        targets = [target[:count] for target, count in zip(targets, counts, strict=True)]
    if device.type == "meta":
        return list(targets)
    module = native.for_device(device)
    if module is None or device.type == "cpu":
        widen(sources, targets)
    else:
        addresses = [*map(torch.Tensor.data_ptr, sources)]
        kind = kind_of(sources[0].dtype, torch.float32)
        module.gpu.widen_into(kind, addresses, counts, flat.data_ptr(), _ALIGNMENT, device.index, _stream(device))
    return list(targets)


def narrow(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Write each FP32 source into its BF16 or FP16 target, rounded to nearest even; a NaN stays a NaN.

    Args:
        sources: contiguous float32 tensors, any shapes, all on one device.
        targets: contiguous bfloat16, float16 or float32 tensors with the same element counts, on the same device.

    Raises:
        TypeError: dtypes that do not go together.
        ValueError: counts, element counts, devices or strides that do not match; nothing has been written then.
    """
    if not sources and not targets:
        return
    rows = _rows(targets, sources, low_first=False)
    device = targets[0].device
    module = native.for_device(device)
    if module is None:
        plain.narrow(sources, targets)
    elif device.type == "cpu":
        module.cpu.narrow(rows)
    else:
        module.gpu.narrow(rows, device.index, _stream(device))


def compare(weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> list[Comparison]:
    """Compare each master with its weight, exactly and after rounding. Waits for the result.

    Args:
        weights: contiguous tensors of bfloat16, float16 or float32, any shapes, all on one device.
        masters: contiguous tensors (float32, or the weight's dtype) with the same element counts, on the same device.

    Returns:
        One Comparison a pair, in order.

    Raises:
        TypeError: dtypes that do not go together.
        ValueError: counts, element counts, devices or strides that do not match.
    """
    if not weights and not masters:
        return []
    rows = _rows(weights, masters, low_first=True)
    device = weights[0].device
    module = native.for_device(device)
    if module is None:
        results = plain.compare(weights, masters)
    elif device.type == "cpu":
        results = module.cpu.compare(rows)
    else:
        results = module.gpu.compare(rows, device.index, _stream(device))
    return [Comparison(*result) for result in results]
