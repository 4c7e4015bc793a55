"""Rotary embeddings that a config scales: yarn, whose parameters Megatron takes as they are and never guesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import MISSING, ConfigAssertionError, Problems
from megasetup.config.fields import POLICY, section

_YARN_KEYS = (
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "truncate",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def validate_rope_config(config: Mapping[str, Any]) -> None:
    """Check that yarn scaling in hf_config_overrides is complete.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: a parameter is absent; lists all that are.
    """
    problems = Problems()
    # (transformers 5 calls rope_parameters what it called rope_scaling, and takes both)
    for key in ("rope_scaling", "rope_parameters"):
        rope = section(config, "hf_config_overrides", key)
        if "yarn" not in (rope.get("rope_type"), rope.get("type")):
            continue
        for name in _YARN_KEYS:
            if name not in rope:
                problems.add(
                    f"{POLICY}.hf_config_overrides.{key}.{name}",
                    MISSING,
                    "is needed for yarn, whose parameters Megatron does not guess",
                    ConfigAssertionError,
                )
    problems.raise_any()
