"""How far a config agrees with the schema: values of the wrong type, keys that are missing, keys that nobody knows.

pydantic finds them all in one pass. Its words are made for programmers and its paths name the members of unions, so
both are made anew here from the schema, as the reference page has them.
"""

import contextlib
import difflib
import enum
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megasetup.config.errors import MISSING, ConfigError, ConfigKeyError, ConfigTypeError, Problem, Problems

from .describe import in_words, keys_of, section_in, type_at, walk
from .key import is_open

type Names = tuple[str | int, ...]
"""A path below a section: keys, and indices of list items."""

_LIKE = 0.6
"""How alike two names are when one may be meant by the other."""
_SURE = 0.8
"""The same in a section that passes unlisted keys on, where a key may well be right that is not listed."""


def check(config: Any, section: Any, path: str, problems: Problems) -> list[Problem]:
    """Hold a config against a section of the schema.

    Args:
        config: what YAML gave. Tuples pass for lists, other mappings for dicts, dtypes for their names.
        section: a TypedDict of the schema.
        path: the config's own path, "" for none.
        problems: takes what must be put right.

    Returns:
        Keys that are not known, each with the nearest known one where there is one.
    """
    plain = _plain(config)
    errors: list[Any] = []
    try:
        _adapter(section).validate_python(plain)
    except ValidationError as invalid:
        errors = list(invalid.errors(include_url=False))
    reported: set[Names] = set()
    unknown: list[Names] = []
    for error in errors:
        names = _names(error, plain)
        if names in reported:
            continue  # (a union complains once for each of its members)
        reported.add(names)
        if error["type"] == "extra_forbidden":
            unknown.append(names)
        elif error["type"] == "missing":
            _add_missing(names, plain, section, path, problems)
        else:
            kind = ConfigTypeError if error["type"].endswith("_type") else ConfigError
            found, wanted = _value(plain, names), type_at(section, names)
            hint = _hint(found, optional=not _is_required(names, section))
            problems.add(dotted(path, names) or "the config", found, f"must be {in_words(wanted)}{hint}", kind)
    return [warning for names in unknown if (warning := _unknown(names, plain, section, path)) is not None]


def dotted(path: str, names: Sequence[str | int]) -> str:
    """The full path of what stands at `names` below `path`: "policy.generation.stop_token_ids[1]"."""
    for name in names:
        path += f"[{name}]" if isinstance(name, int) else f".{name}" if path else name
    return path


@functools.cache
def _adapter(section: Any) -> TypeAdapter[Any]:
    return TypeAdapter(section)


def _plain(value: Any) -> Any:
    """Plain containers, as a strict check wants them; a dtype, and a member of an enum, becomes its name."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    return value.name if isinstance(value, enum.Enum) else value


def _names(error: Any, plain: Any) -> Names:
    """Where an error is. (In pydantic's own location the members of a union stand between the keys.)"""
    *inner, last = error["loc"] or (None,)
    names: list[str | int] = []
    for name in (*inner, last):
        is_key = isinstance(plain, dict) and name in plain
        is_item = isinstance(plain, list) and isinstance(name, int)
        if is_key or is_item:
            plain = plain[name]
            names.append(name)
        elif name == last and error["type"] == "missing":
            names.append(name)
    return tuple(names)


def _value(plain: Any, names: Names) -> Any:
    for name in names:
        plain = plain[name]
    return plain


def _add_missing(names: Names, plain: Any, section: Any, path: str, problems: Problems) -> None:
    *inner, name = names
    parent = section_in(type_at(section, inner))
    key = keys_of(parent)[str(name)]
    beside = [other for other in _value(plain, tuple(inner)) if other not in keys_of(parent)]
    slip = _nearest(str(name), beside, _LIKE)
    hint = f"; {dotted(path, (*inner, slip))} looks like a slip of the pen" if slip else ""
    problems.add(dotted(path, names), MISSING, f"must be given: {in_words(key.type)}{hint}", ConfigKeyError)


def _is_required(names: Names, section: Any) -> bool:
    *inner, name = names or (0,)
    parent = section_in(type_at(section, inner))
    return parent is None or isinstance(name, int) or keys_of(parent)[name].required


def _hint(found: Any, *, optional: bool) -> str:
    if found is None:
        return "; leave the key out for its default" if optional else ""
    if isinstance(found, str):
        if found.lower() in ("true", "false", "null"):
            return f"; {found!r} in quotes is text"
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(found)):
                return f"; YAML read {found} as text: write {number!r} without quotes"
    return ""


def _unknown(names: Names, plain: Any, section: Any, path: str) -> Problem | None:
    """What to say of a key that is not listed, None where that is no surprise."""
    *inner, name = names
    parent = section_in(type_at(section, inner))
    beside = _value(plain, tuple(inner))
    here = [key for key in keys_of(parent) if key not in beside]
    near = _nearest(str(name), here, _SURE if is_open(parent) else _LIKE)
    if near is None and is_open(parent):
        return None
    # (a key that is given already may be what was meant too: an override of it, with a slip)
    near = near or _nearest(str(name), list(keys_of(parent)), _SURE)
    meant = dotted(path, (*inner, near)) if near else _elsewhere(str(name), section, path)
    remedy = f"not a known key; did you mean {meant}?" if meant else "not a known key"
    return Problem(dotted(path, names), _value(plain, names), remedy)


def _nearest(name: str, known: Sequence[str], alike: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=alike)), None)


def _elsewhere(name: str, section: Any, path: str) -> str | None:
    """A key of the same name in another part of the config."""
    found: Iterator[str] = (full for full, key in walk(section, path) if key.name == name)
    return next(found, None)
