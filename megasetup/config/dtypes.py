"""Names of dtypes, as YAML spells them, and the dtypes that they stand for."""

from __future__ import annotations

from typing import Any

import torch

from megasetup.config.errors import config_error

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What policy.precision may be."""

# Besides those: Megatron's short names. Adam moments in FP8 are kept as bytes.
_NAMES = PRECISIONS | {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
    "uint8": torch.uint8,
}


def to_dtype(value: Any, path: str) -> Any:
    """The dtype that a setting names; a dtype, or None, stays what it is.

    Args:
        value: "float32", "fp32", "torch.float32" and the like.
        path: the full path of the key.

    Raises:
        ConfigError: no such dtype.
    """
    if value is None or isinstance(value, torch.dtype):
        return value
    dtype = _NAMES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if dtype is None:
        raise config_error(path, value, f"must be one of {', '.join(_NAMES)}")
    return dtype
