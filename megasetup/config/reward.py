"""Reward models, which trainers' files may ask for and Megatron policies do not offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import ConfigNotImplementedError, config_error
from megasetup.config.fields import POLICY, section


def validate_reward_model_config(config: Mapping[str, Any]) -> None:
    """Check that no reward model is asked for.

    Args:
        config: the policy config.

    Raises:
        ConfigNotImplementedError: one is.
    """
    if section(config, "reward_model_cfg").get("enabled"):
        raise config_error(
            f"{POLICY}.reward_model_cfg.enabled",
            True,
            "must be false: reward models are not supported with Megatron",
            ConfigNotImplementedError,
        )
