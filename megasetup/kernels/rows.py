"""How tensors become the rows of addresses that csrc/ takes.

One row is `kind, source address, target address(es), element count`, all int64, back to back in one array, so that a
hundred thousand tensors cross into C++ in one call.
"""

from __future__ import annotations

import torch

# Mirrors csrc/common/rows.h.
WIDEN_BF16, WIDEN_FP16, COPY_4_BYTES, COPY_2_BYTES = range(4)

_KINDS = {
    (torch.bfloat16, torch.float32): WIDEN_BF16,
    (torch.float16, torch.float32): WIDEN_FP16,
    (torch.float32, torch.float32): COPY_4_BYTES,
    (torch.bfloat16, torch.bfloat16): COPY_2_BYTES,
    (torch.float16, torch.float16): COPY_2_BYTES,
}


def kind_of(low: torch.dtype, high: torch.dtype) -> int:
    """The row kind for a weight of dtype `low` and its copy of dtype `high`.

    Raises:
        TypeError: the pair is none that a master weight can have.
    """
    kind = _KINDS.get((low, high))
    if kind is None:
        raise TypeError(
            f"a copy of dtype {high} cannot hold a weight of dtype {low}: "
            "BF16 and FP16 weights have FP32 copies or copies of their own dtype, FP32 weights have FP32 copies"
        )
    return kind


def check_pair(low: torch.Tensor, high: torch.Tensor) -> int:
    """Check two tensors that a kernel will read and write as flat memory, and return their row kind.

    Raises:
        TypeError: dtypes that do not go together.
        ValueError: different element counts or devices, or memory that is not contiguous, is absent, or holds the
            values negated.
    """
    kind = kind_of(low.dtype, high.dtype)
    if low.numel() != high.numel():
        raise ValueError(f"a weight of {low.numel()} elements and a copy of {high.numel()} do not match")
    if low.device != high.device:
        raise ValueError(f"a weight on {low.device} and a copy on {high.device}: both must be on one device")
    for what, tensor in (("weight", low), ("copy", high)):
        if not tensor.is_contiguous():
            raise ValueError(f"a {what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
        if tensor.is_neg():
            raise ValueError(f"a {what} of shape {tuple(tensor.shape)} is a negated view: call resolve_neg() first")
        if not tensor.is_meta and tensor.numel() and not tensor.data_ptr():
            raise ValueError(
                f"a {what} of {tensor.numel()} elements on {tensor.device} has no memory: restore its storage first"
            )
    return kind
