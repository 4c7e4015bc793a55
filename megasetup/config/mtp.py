"""Multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import Problems
from megasetup.config.fields import MEGATRON, megatron_cfg, same_names, set_fields

FIELDS = same_names("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads")
"""Provider field by key of policy.megatron_cfg."""


def apply_mtp_config(model_cfg: Any, config: Mapping[str, Any]) -> None:
    """Set what the config says of multi-token prediction.

    Args:
        model_cfg: the model provider, changed in place.
        config: the policy config.

    Raises:
        ConfigAttributeError: this Megatron has no such setting, and the config switches it on.
    """
    problems = Problems()
    set_fields(model_cfg, megatron_cfg(config), FIELDS, MEGATRON, problems)
    problems.raise_any()
