"""Which optional flows a config switches on: what a plain fine-tuning run does without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def optional_flows(policy: Mapping[str, Any]) -> list[str]:
    """A sentence for each, which begins with the key that switches it on.

    Args:
        policy: the policy config.
    """
    from megasetup.config.fields import section
    from megasetup.config.logprobs import FUSED_KEY, fused_linear_logprobs_settings
    from megasetup.config.router_replay import ENABLED_KEY, router_replay_enabled

    flows = []
    draft = section(policy, "draft")
    if draft.get("enabled"):
        weights = draft.get("model_name")
        flows.append(
            "policy.draft.enabled: a draft model is trained beside the policy, "
            + (f"from {weights}." if weights else "from fresh weights.")
        )
    if router_replay_enabled(policy):
        flows.append(f"{ENABLED_KEY}: training routes tokens to the experts that generation chose.")
    fused = fused_linear_logprobs_settings(policy)
    if fused is not None:
        size, temperature = fused
        tokens = "the usual number of" if size is None else f"{size:,}"
        flows.append(
            f"{FUSED_KEY}: log-probabilities come from hidden states, {tokens} tokens at a time, at temperature "
            f"{temperature:g}; the logits of a batch are never whole."
        )
    if section(policy, "generation").get("backend") == "megatron" and section(policy, "generation", "colocated").get(
        "enabled"
    ):
        flows.append("policy.generation.backend: Megatron generates on the GPUs that train.")
    return flows
