"""Makes the config of a value model look like a policy's, so that the same setup builds both."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# What the setup takes where a policy has no such key, so that readers of the result may ask for it by name.
_DEFAULTS: Mapping[str, Any] = {
    "generation": None,  # (a value model generates nothing)
    "pretrained_checkpoint": None,
    "hf_config_overrides": {},
    "sequence_packing": {"enabled": False},
    "dynamic_batching": {"enabled": False},
    "reward_model_cfg": {"enabled": False},
    "router_replay": None,
    "draft": None,
    "logprob_chunk_size": None,
    "offload_optimizer_for_logprob": False,
    "offload_optimizer_for_refit": True,
}


def make_policy_like_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A policy config that sets a value model up.

    Args:
        config: the value model's config, a mapping with model_name, precision and megatron_cfg as a policy has them.
            It is not changed, and the result shares nothing with it.

    Returns:
        A dict with every key of the value model and, for each further key that the setup reads, the setup's default.
    """
    return copy.deepcopy({**_DEFAULTS, **config})
