"""widen, narrow and compare over any number of tensors in one call.

Megatron's per-tensor copies pay a launch, or a thread-pool barrier, for each of thousands of small tensors. These take
the whole list: one launch on a GPU, one parallel loop on the CPU.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megasetup.kernels import native, plain
from megasetup.kernels.rows import check_pair


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


def _check_sequences(**given: object) -> None:
    # (a tensor has a length and items too, and would be taken apart by its first dimension)
    for name, tensors in given.items():
        if isinstance(tensors, torch.Tensor):
            raise TypeError(
                f"{name} is a tensor of shape {tuple(tensors.shape)}: a sequence of tensors is needed, as in [tensor]"
            )


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
        TypeError: dtypes that do not go together, or a tensor in place of a sequence.
        ValueError: counts, element counts, devices or strides that do not match; nothing has been written then.
    """
    _check_sequences(sources=sources, targets=targets)
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

# Types whose memory is what they say; a subclass may be anything underneath.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def widened(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """New FP32 tensors with the values of small 16-bit ones, exactly: one allocation and, on a GPU, one launch.

    Made for many tiny tensors, where Python's few microseconds a tensor are the whole cost: so they are read and
    checked in C++, and one by one only where that is not possible, to say which is wrong.

    Args:
        sources: contiguous tensors of shape [n], n may differ, of bfloat16 or float16 alike, all on one device.

    Returns:
        float32 tensors of the same shapes, views of one allocation in which each starts on 16 bytes. On the meta
        device they have no values either.

    Raises:
        TypeError: a tensor in place of a sequence, several dtypes, or one that is not bfloat16 or float16.
        ValueError: several devices, or a tensor that is not contiguous or has not one dimension.

    Nothing has been allocated when it raises.
    """
    _check_sequences(sources=sources)
    if not sources:
        return []
    vectors = _read(sources)
    if vectors is None:
        return _widened_one_by_one(sources)
    flat = torch.empty(vectors.total, dtype=torch.float32, device=sources[0].device)
    # Launched before the views are made, so that a GPU works meanwhile.
    module: Any = native.load()
    (module.gpu if vectors.on_gpu else module.cpu).widen_vectors(vectors, flat.data_ptr())
    return _cut(flat, vectors.places, vectors.counts if vectors.padded else None)


def _widened_one_by_one(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    counts = _checked_counts(sources)
    places = [-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts]
    flat = torch.empty(sum(places), dtype=torch.float32, device=sources[0].device)
    targets = _cut(flat, places, counts if places != counts else None)
    if flat.device.type != "meta":
        widen(sources, targets)
    return targets


def _read(sources: Sequence[torch.Tensor]) -> Any:
    """The sources as the compiled module reads them all in one call; None where it cannot, or one is not as it should.

    This goes by DLPack's C interface, which needs no torch header; torch has it since 2.10.
    """
    exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    device = sources[0].device
    if exchange_api is None or device.type not in ("cpu", "cuda"):
        return None
    module = native.for_device(device)
    # A tensor that holds its values negated shows them as they lie in memory.
    if module is None or (device.type == "cpu" and any(map(torch.Tensor.is_neg, sources))):
        return None
    return module.Vectors.read(exchange_api, _PLAIN_TYPES, sources, _ALIGNMENT)


def _checked_counts(sources: Sequence[torch.Tensor]) -> list[int]:
    dtypes = {source.dtype for source in sources}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        raise TypeError(f"sources of {sorted(map(str, dtypes))}: they must all be torch.bfloat16, or all torch.float16")
    devices = {source.device for source in sources}
    if len(devices) > 1:
        raise ValueError(f"sources on {sorted(map(str, devices))}: one call takes one device")
    for index, source in enumerate(sources):
        if source.dim() != 1 or not source.is_contiguous():
            raise ValueError(
                f"source {index} has shape {tuple(source.shape)} and strides {source.stride()}: "
                "it must have one dimension, and its elements side by side"
            )
    return [source.numel() for source in sources]


def _cut(flat: torch.Tensor, places: list[int], counts: list[int] | None) -> list[torch.Tensor]:
    # Views made by one call; the unsafe split keeps no record that they are views, and nothing here sees autograd.
    # Of torch's ways to make many views it is the quickest, with chunk, unbind and split half as slow again.
    views = flat.unsafe_split_with_sizes(places)
    if counts is None:
        return list(views)
    return [view[:count] for view, count in zip(views, counts, strict=True)]


def set_data(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """`tensor.data = value` for each pair: the tensor objects stay, and show the values' memory and dtype from then on.

    Raises:
        ValueError: not as many values as tensors; nothing has been set then.
    """
    if len(tensors) != len(values):
        raise ValueError(
            f"{len(tensors)} tensors and {len(values)} values: there must be as many of one as of the other"
        )
    module = native.load()
    if module is not None:
        module.set_data(list(tensors), list(values))
        return
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data = value


def narrow(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Write each FP32 source into its BF16 or FP16 target, rounded to nearest even; a NaN stays a NaN.

    Args:
        sources: contiguous float32 tensors, any shapes, all on one device.
        targets: contiguous bfloat16, float16 or float32 tensors with the same element counts, on the same device.

    Raises:
        TypeError: dtypes that do not go together, or a tensor in place of a sequence.
        ValueError: counts, element counts, devices or strides that do not match; nothing has been written then.
    """
    _check_sequences(sources=sources, targets=targets)
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
        TypeError: dtypes that do not go together, or a tensor in place of a sequence.
        ValueError: counts, element counts, devices or strides that do not match.
    """
    _check_sequences(weights=weights, masters=masters)
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
