"""How a setting reaches a field of a provider, and where a setting is found in a config.

Most settings are passed through as they are. Each concern keeps those in a table, field by field, so that a new one
takes one line; `set_fields` does the rest: a key that is absent leaves the provider alone, a key that is present is
honoured, also when it is False, 0 or None. Megatron moves fields between versions, so whether a provider has a field is
asked of the provider itself.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import (
    MISSING,
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    Problems,
    config_error,
)

_logger = logging.getLogger("megasetup")

POLICY = "policy"
MEGATRON = "policy.megatron_cfg"


def section(config: Mapping[str, Any], *names: str, path: str = POLICY) -> Mapping[str, Any]:
    """A part of a config; an absent part, and one that is None, is empty.

    Args:
        config: where to begin.
        names: the keys that lead to the part.
        path: the full path of `config`.

    Raises:
        ConfigTypeError: something on the way is no mapping.
    """
    found: Any = config
    for name in names:
        path = f"{path}.{name}"
        found = found.get(name)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise config_error(path, found, "must be a mapping", ConfigTypeError)
    return found  # type: ignore[no-any-return]


def megatron_cfg(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """policy.megatron_cfg, which a config must have.

    Raises:
        ConfigKeyError: it is absent.
        ConfigTypeError: it is no mapping.
    """
    if config.get("megatron_cfg") is None:
        raise config_error(MEGATRON, MISSING, "must hold the settings of Megatron", ConfigKeyError)
    return section(config, "megatron_cfg")


def effective(megatron: Mapping[str, Any], key: str, provider: Any, default: Any = None) -> Any:
    """The value that a key of policy.megatron_cfg will have: the config's, else the provider's, else the default."""
    return megatron[key] if key in megatron else getattr(provider, key, default)


def has_field(provider: Any, field: str) -> bool:
    """Whether a provider can take a field. An object that is no dataclass does not say, and takes what it is given."""
    return hasattr(provider, field) or not dataclasses.is_dataclass(provider)


def set_field(provider: Any, field: str, value: Any, path: str) -> None:
    """Set one field, if the provider has it. One that it has not is as good as off: None and False are passed over.

    Args:
        provider: the model provider, changed in place.
        field: its field.
        value: what to set.
        path: the full path of the key that the value comes from.

    Raises:
        ConfigAttributeError: the provider has no such field, and the value is neither None nor False.
    """
    if has_field(provider, field):
        setattr(provider, field, value)
    elif value is None or value is False:
        _logger.debug("%s is %r: %s has no field %s", path, value, type(provider).__name__, field)
    else:
        raise config_error(
            path,
            value,
            f"{type(provider).__name__} has no field {field}: remove the key, or use a Megatron version that has it",
            ConfigAttributeError,
        )


def set_fields(
    provider: Any, settings: Mapping[str, Any], table: Mapping[str, str], path: str, problems: Problems
) -> None:
    """Pass the settings of a table through to a provider.

    Args:
        provider: the model provider, changed in place.
        settings: a part of the config.
        table: provider field by key. Keys that `settings` lacks are passed over.
        path: the full path of `settings`.
        problems: takes what cannot be set.
    """
    for key, field in table.items():
        if key in settings:
            with problems.collect():
                set_field(provider, field, settings[key], f"{path}.{key}")


def same_names(*names: str) -> dict[str, str]:
    """A table of settings that are called as the fields are."""
    return {name: name for name in names}
