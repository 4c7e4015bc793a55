"""Builds one of Megatron's or Bridge's config dataclasses from a section of the config.

The section goes in field by field, so a field that a later version adds needs no line here. Some fields are not the
section's to choose, because they follow from settings elsewhere; a section that contradicts one is told so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from megasetup.config.dtypes import to_dtype
from megasetup.config.errors import ConfigAttributeError, Problems

BRIDGE_CONFIG = "megatron.bridge.training.config"
"""Where Bridge keeps its config classes. It is imported when first needed, which takes a while."""


class Derivation(NamedTuple):
    """A value that follows from something else.

    Attributes:
        value: what the field is set to.
        source: what it follows from, for messages.
    """

    value: Any
    source: str


type Derived = Mapping[str, Derivation]
"""By field, what is not the section's to choose."""


def build_from_section(
    cls: type[Any], settings: Mapping[str, Any], path: str, derived: Derived, problems: Problems
) -> Any:
    """Build a config object.

    Args:
        cls: its class, a dataclass whose fields all have defaults.
        settings: the section; each key is a field. Names of dtypes become dtypes.
        path: the section's full path.
        derived: by field, what is not the section's to choose. The section may repeat it, and may not contradict it.
        problems: takes unknown fields, unknown dtypes and contradictions.

    Returns:
        The object. Settings with problems are left out of it.
    """
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in fields:
            problems.add(f"{path}.{key}", value, f"{cls.__name__} has no such field: remove it", ConfigAttributeError)
        elif key in derived:
            if value != derived[key].value:
                wanted, source = derived[key]
                problems.add(f"{path}.{key}", value, f"must be {wanted}, {source}: remove it")
        else:
            with problems.collect():
                values[key] = to_dtype(value, f"{path}.{key}") if key.endswith("_dtype") else value
    return cls(**values, **{field: derivation.value for field, derivation in derived.items() if field in fields})
