"""The few settings that change the model itself: the norms' epsilon, and the switches of vision and sound towers.

A tower switch that the provider does not know would silently train (or not train) a tower, so it is an error even when
it is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import Problems
from megasetup.config.fields import MEGATRON, has_field, megatron_cfg, same_names, set_fields

FIELDS = same_names("layernorm_epsilon")
"""Provider field by key of policy.megatron_cfg."""

TOWER_FIELDS = same_names(
    "radio_force_cpe_eval_mode",
    "freeze_vision_model",
    "freeze_vision_projection",
    "freeze_sound_encoder",
    "freeze_sound_projection",
)
"""The same, for switches that only some models have."""


def apply_architecture_config(model_cfg: Any, config: Mapping[str, Any]) -> None:
    """Set layernorm_epsilon and the switches of vision and sound towers.

    Args:
        model_cfg: the model provider, changed in place.
        config: the policy config.

    Raises:
        ConfigError: the provider has no field for a tower's switch; lists all of which this is true.
    """
    megatron = megatron_cfg(config)
    problems = Problems()
    set_fields(model_cfg, megatron, FIELDS, MEGATRON, problems)
    for key, field in TOWER_FIELDS.items():
        if key not in megatron:
            continue
        if has_field(model_cfg, field):
            setattr(model_cfg, field, megatron[key])
        else:
            problems.add(
                f"{MEGATRON}.{key}", megatron[key], f"{type(model_cfg).__name__} has no field {field}: remove the key"
            )
    problems.raise_any()
