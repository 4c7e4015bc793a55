"""model_overrides: provider fields that have no setting of their own.

A provider has some three hundred fields. The few that people tune have a setting each; all others can be reached here,
by their own names. A field must not have two places where it is decided, so an override of one that has a setting is an
error that names both.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any

from megasetup.config import architecture, container, moe, mtp, parallelism, performance, precision
from megasetup.config.errors import ConfigAttributeError, ConfigTypeError, Problems, config_error
from megasetup.config.fields import MEGATRON

OVERRIDES = f"{MEGATRON}.model_overrides"

_TABLES = (
    parallelism.FIELDS,
    moe.FIELDS,
    mtp.FIELDS,
    performance.FIELDS,
    architecture.FIELDS,
    architecture.TOWER_FIELDS,
)

SETTINGS: Mapping[str, str] = {
    **{field: f"{MEGATRON}.{key}" for table in _TABLES for key, field in table.items()},
    **{field: f"{MEGATRON}.{field}" for field in moe.NUM_SMS},
    "moe_enable_routing_replay": "policy.router_replay.enabled",
    "use_te_rng_tracker": f"{MEGATRON}.cuda_graph_impl",
    **precision.SETTINGS,
    **performance.SETTINGS,
    **container.SETTINGS,
}
"""Full path of the setting by the provider field that it decides."""


def validate_model_override_conflicts(megatron_cfg: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Reject overrides of fields that have a setting.

    Args:
        megatron_cfg: policy.megatron_cfg.
        overrides: its model_overrides.

    Raises:
        ConfigError: lists all such overrides, each with both paths.
    """
    problems = Problems()
    for field, value in overrides.items():
        setting = SETTINGS.get(field) or (f"{MEGATRON}.{field}" if field in megatron_cfg else None)
        if setting is not None:
            problems.add(f"{OVERRIDES}.{field}", value, f"must not be given here, because it is decided by {setting}")
    problems.raise_any()


def merge_model_overrides(target: Any, overrides: Mapping[str, Any], path: str = OVERRIDES) -> Any:
    """Merge overrides into a copy of a provider, level by level.

    Dataclasses are copied by `dataclasses.replace`, mappings by copying, other objects by a shallow copy; nothing that
    the input holds is changed.

    Args:
        target: the provider, a dataclass.
        overrides: by field, a value, or a mapping to be merged into what the field holds.
        path: the full path of `overrides`.

    Returns:
        The copy.

    Raises:
        ConfigTypeError: the provider is no dataclass.
        ConfigAttributeError: no such field; lists all, of every level.
    """
    if not _is_dataclass_object(target):
        raise config_error(
            path,
            dict(overrides),
            f"needs a provider that is a dataclass, not a {type(target).__name__}",
            ConfigTypeError,
        )
    return _merge_into_object(target, overrides, path)


def merge_model_override_value(current_value: Any, override_value: Any, path: str) -> Any:
    """What a field holds after its override.

    Args:
        current_value: what it holds now; not changed.
        override_value: a mapping is merged into a mapping, a dataclass or another object; anything else replaces.
        path: the override's full path.

    Raises:
        ConfigAttributeError: an object without the field that the override names.
    """
    if isinstance(override_value, Mapping):
        if isinstance(current_value, Mapping):
            merged = dict(current_value)
            problems = Problems()
            for key, value in override_value.items():
                with problems.collect():
                    merged[key] = merge_model_override_value(merged.get(key), value, f"{path}.{key}")
            problems.raise_any()
            return merged
        if _has_fields(current_value):
            return _merge_into_object(current_value, override_value, path)
    # (so that the provider and the config share no list or mapping)
    return copy.deepcopy(override_value)


def _merge_into_object(target: Any, overrides: Mapping[str, Any], path: str) -> Any:
    problems = Problems()
    merged: dict[str, Any] = {}
    for name, value in overrides.items():
        if not _has_field(target, name):
            problems.add(f"{path}.{name}", value, f"{type(target).__name__} has no such field", ConfigAttributeError)
            continue
        if isinstance(value, str) and isinstance(getattr(target, name), types.FunctionType | types.BuiltinFunctionType):
            remedy = "is a function there, which text cannot be: leave it out, or set it in Python"
            problems.add(f"{path}.{name}", value, remedy, ConfigTypeError)
            continue
        with problems.collect():
            merged[name] = merge_model_override_value(getattr(target, name), value, f"{path}.{name}")
    problems.raise_any()
    if _is_dataclass_object(target):
        return _replace(target, merged)
    copied = copy.copy(target)
    for name, value in merged.items():
        setattr(copied, name, value)
    return copied


def _replace(target: Any, values: Mapping[str, Any]) -> Any:
    settable = {field.name for field in dataclasses.fields(target) if field.init}
    copied = dataclasses.replace(target, **{name: value for name, value in values.items() if name in settable})
    # `replace` makes a new object from the fields alone: hooks and the like, which a provider keeps beside its fields,
    # and fields that are no argument, are carried over.
    names = {field.name for field in dataclasses.fields(target)}
    for name, value in vars(target).items():
        if name not in names:
            object.__setattr__(copied, name, copy.copy(value) if isinstance(value, list | dict) else value)
    for name, value in values.items():
        if name not in settable:
            object.__setattr__(copied, name, value)
    return copied


def _is_dataclass_object(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _has_field(target: Any, name: str) -> bool:
    """Whether an object holds a field of this name, and not a method of its class."""
    if _is_dataclass_object(target) and name in {field.name for field in dataclasses.fields(target)}:
        return hasattr(target, name)
    return hasattr(target, name) and not name.startswith("__") and not callable(getattr(type(target), name, None))


def _has_fields(value: Any) -> bool:
    if isinstance(value, type | enum.Enum | types.FunctionType | types.MethodType):
        return False
    return _is_dataclass_object(value) or hasattr(value, "__dict__")
