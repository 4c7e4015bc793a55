"""What the schema says, asked from outside: the keys of a section, the type at a path, a type in words.

The reference page and the messages of validation both speak from here, so that a reader of one recognises the other.
"""

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

from annotated_types import Ge, Le
from pydantic import StringConstraints

from .key import Key

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
    Any: "anything",
    types.NoneType: "null",
}


class Described(NamedTuple):
    """One key of a section.

    Attributes:
        name: the key.
        type: its type, with bounds (`Annotated`), without its `Key`.
        key: what the reference says of it.
        required: whether it must be there.
        section: the section that the type is or may be, None for a plain value.
    """

    name: str
    type: Any
    key: Key
    required: bool
    section: Any


@functools.cache
def keys_of(section: Any) -> dict[str, Described]:
    """The keys of a section, by name, in the schema's order.

    Args:
        section: a TypedDict of the schema.

    Raises:
        TypeError: a key has no `Key` beside its type.
    """
    found = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        while get_origin(hint) is not Annotated and get_args(hint):  # Required[...] and NotRequired[...]
            hint = get_args(hint)[0]
        base, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        key = next((extra for extra in extras if isinstance(extra, Key)), None)
        if key is None:
            raise TypeError(f"{section.__name__}.{name} has no Key: say what it does and where it goes")
        for extra in extras:
            if not isinstance(extra, Key):
                base = Annotated[base, extra]
        found[name] = Described(name, base, key, name in section.__required_keys__, section_in(base))
    return found


def walk(section: Any, path: str) -> Iterator[tuple[str, Described]]:
    """Every key under a section with its full path, sections before what is in them.

    Args:
        section: a TypedDict of the schema.
        path: the section's own path, "" for none.
    """
    for name, described in keys_of(section).items():
        full = f"{path}.{name}" if path else name
        yield full, described
        if described.section is not None:
            yield from walk(described.section, full)


def type_at(section: Any, names: Sequence[str | int]) -> Any:
    """The type at a path below a section, `Any` where the schema does not look.

    Args:
        section: a TypedDict of the schema.
        names: keys, and indices of list items.
    """
    found = section
    for name in names:
        options = _options(found)
        inner: Any = Any
        for option in options:
            if is_typeddict(option) and name in keys_of(option):
                inner = keys_of(option)[str(name)].type
            elif get_origin(option) is list and isinstance(name, int):
                inner = get_args(option)[0]
        found = inner
    return found


def section_in(kind: Any) -> Any:
    """The section that a type is or may be (`OptimizerConfig | None`), None for a plain value."""
    return next((option for option in _options(kind) if is_typeddict(option)), None)


def in_words(kind: Any) -> str:
    """A type as a reader would say it: "a whole number, 1 or more, or null"."""
    words: list[str] = []
    for option in _options(kind):
        words.extend(word for word in _option_in_words(option) if word not in words)
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _options(kind: Any) -> list[Any]:
    """The members of a union, in order; any other type alone."""
    if get_origin(kind) in (Union, types.UnionType):
        return [option for member in get_args(kind) for option in _options(member)]
    return [kind]


def _option_in_words(option: Any) -> list[str]:
    origin = get_origin(option)
    if origin is Annotated:
        base, *bounds = get_args(option)
        return [_bounded(in_words(base), bounds)]
    if origin is Literal:
        return [str(choice) for choice in get_args(option)]
    if option is bool:
        return ["true", "false"]
    if origin is list:
        items = in_words(get_args(option)[0])
        return [f"a list of {items.removeprefix('a ') + 's' if items.endswith('number') else items}"]
    if is_typeddict(option):
        return [_WORDS[dict]]
    return [_WORDS[origin or option]]


def _bounded(words: str, bounds: Sequence[Any]) -> str:
    low = next((bound.ge for bound in bounds if isinstance(bound, Ge)), None)
    high = next((bound.le for bound in bounds if isinstance(bound, Le)), None)
    if any(isinstance(bound, StringConstraints) for bound in bounds):
        return "the name of a dtype (float32, bfloat16, float16)"
    if high is not None:
        return f"{words} from {low:g} to {high:g}"
    return f"{words} of at least {low:g}" if low is not None else words
