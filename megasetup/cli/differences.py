"""Which settings of Megatron's and Bridge's config objects a run changes, as rows that can be printed or written.

A container holds hundreds of fields; a person who checks a config wants those that are not as they would be without it.
"""

from __future__ import annotations

import dataclasses
import enum
from functools import partial
from typing import Any, NamedTuple

import torch


class Difference(NamedTuple):
    """One field that is not at its default.

    Attributes:
        field: its name, nested ones with dots.
        default: what it would be.
        value: what it is.
    """

    field: str
    default: Any
    value: Any


def differences(value: Any, default: Any) -> list[Difference]:
    """Fields of a config object that differ from another one of its class, in the class's order.

    Functions count as equal when they have the same name and arguments: Megatron makes new ones for each object.

    Args:
        value: a dataclass object.
        default: what it is compared with. Fields that it lacks are passed over.
    """
    found = []
    for field in dataclasses.fields(value):
        if field.name.startswith("_") or not hasattr(default, field.name):
            continue
        before, after = plain(getattr(default, field.name)), plain(getattr(value, field.name, None))
        if before != after:
            found.append(Difference(field.name, before, after))
    return found


def plain(value: Any) -> Any:
    """A setting as JSON can hold it: dtypes, enums and functions by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(held) for held in value]
    if isinstance(value, partial):
        arguments = [*map(plain, value.args), *(f"{name}={plain(held)}" for name, held in value.keywords.items())]
        return f"{plain(value.func)}({', '.join(map(str, arguments))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    return getattr(value, "__qualname__", None) or type(value).__qualname__
