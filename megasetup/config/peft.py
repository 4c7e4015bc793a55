"""LoRA: what its settings need, from the config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import MISSING, ConfigAssertionError, Problems
from megasetup.config.fields import MEGATRON, section

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
                f"{MEGATRON}.peft.{name}",
                settings.get(name, MISSING),
                "must be given for LoRA: the adapters' rank is dim, their weight alpha / dim",
                ConfigAssertionError,
            )
    problems.raise_any()
