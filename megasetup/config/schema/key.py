"""How the schema describes one key: its type, and beside it one sentence for people.

The schema is made of TypedDicts, because a config is a plain mapping everywhere and stays one. What a type cannot say
stands in a `Key` beside it, from which the reference page is made, so that neither can be changed without the other.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import ConfigDict, StringConstraints, with_config

PROVIDER = "the provider's"
TRAINER = "the trainer; not read here"


@dataclass(frozen=True)
class Key:
    """What the reference says about one key.

    Attributes:
        does: one sentence.
        goes: the object and field that receive it, or who reads it.
        default: what holds when the key is absent, in words.
    """

    does: str
    goes: str
    default: str = PROVIDER


Size = Annotated[int, Ge(1)]
"""A count of something that there must be one of."""

Count = Annotated[int, Ge(0)]
"""A count that may be 0."""

Fraction = Annotated[float, Ge(0.0), Le(1.0)]
"""A share of a whole, 0 and 1 included."""

DtypeName = Annotated[
    str, StringConstraints(pattern=r"^(torch\.)?(float32|bfloat16|float16|fp32|bf16|fp16|fp8|uint8)$")
]
"""A dtype as YAML spells it."""

_OPEN = "__open_section__"

section = with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
"""Marks a TypedDict whose keys are all listed: another key is noticed, and no value is converted to fit its type."""


def open_section[T: type](cls: T) -> T:
    """Mark a TypedDict which passes on keys that are not listed. They are noticed only when they look like a slip."""
    section(cls)
    setattr(cls, _OPEN, True)
    return cls


def is_open(section_type: Any) -> bool:
    """Whether a TypedDict passes on keys that it does not list."""
    return bool(getattr(section_type, _OPEN, False))
