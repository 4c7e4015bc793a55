"""LoRA: what its settings need, and Megatron-Bridge's own object made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.compat.bridge import import_bridge
from megasetup.config.build import build_from_section
from megasetup.config.errors import MISSING, ConfigAssertionError, Problems
from megasetup.config.fields import MEGATRON, section

_PEFT = f"{MEGATRON}.peft"
_NEEDED = ("dim", "alpha")


def validate_peft_config(config: Mapping[str, Any]) -> None:
    """Check that the adapters' size and weight are given where they are enabled.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: dim or alpha is absent; lists both if both are.
    """
    settings = section(config, "megatron_cfg", "peft")
    if not settings.get("enabled"):
        return
    problems = Problems()
    for name in _NEEDED:
        if settings.get(name) is None:
            problems.add(
                f"{_PEFT}.{name}",
                settings.get(name, MISSING),
                "must be given for LoRA: the adapters' rank is dim, their weight alpha / dim",
                ConfigAssertionError,
            )
    problems.raise_any()


def create_lora(config: Mapping[str, Any], **changes: Any) -> Any | None:
    """Megatron-Bridge's LoRA as policy.megatron_cfg.peft describes it, or None where that is absent or not enabled.

    Args:
        config: the policy config. target_modules and exclude_modules that are None are LoRA's own.
        changes: fields that are set whatever the config says.

    Raises:
        ConfigError: dim or alpha is absent; a setting that this LoRA does not have; no dtype. Lists all.
    """
    settings = dict(section(config, "megatron_cfg", "peft"))
    if not settings.pop("enabled", False):
        return None
    problems = Problems()
    with problems.collect():
        validate_peft_config(config)
    for name in ("target_modules", "exclude_modules"):
        if name in settings and settings[name] is None:
            del settings[name]
    lora_class = import_bridge("megatron.bridge.peft.lora").LoRA
    lora = build_from_section(lora_class, settings | changes, _PEFT, {}, problems)
    problems.raise_any()
    return lora
