"""Rules about how log-probabilities are computed: in chunks, or fused with the output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import MISSING, ConfigAssertionError, config_error
from megasetup.config.fields import MEGATRON, POLICY, megatron_cfg, section

FUSED_KEY = f"{MEGATRON}.use_fused_linear_logprobs"


def fused_linear_logprobs(megatron: Mapping[str, Any]) -> bool:
    """Whether policy.megatron_cfg has log-probabilities computed from hidden states, without whole logits."""
    return bool(megatron.get("use_fused_linear_logprobs"))


def fused_linear_logprobs_settings(config: Mapping[str, Any]) -> tuple[int | None, float] | None:
    """What fused log-probabilities are computed with.

    Args:
        config: the policy config.

    Returns:
        (tokens of a chunk or None for the default, what divides the logits: the temperature that generation samples
        with), or None where log-probabilities are not fused.

    Raises:
        ConfigError: a temperature that is not above 0, by which no logits can be divided.
    """
    megatron = megatron_cfg(config)
    if not fused_linear_logprobs(megatron):
        return None
    temperature = section(config, "generation").get("temperature")
    if temperature is not None and not temperature > 0:
        raise config_error(
            f"{POLICY}.generation.temperature", temperature, f"must be above 0, because {FUSED_KEY} is true"
        )
    return megatron.get("fused_linear_logprobs_chunk_size"), 1.0 if temperature is None else float(temperature)


def validate_chunking_config(config: Mapping[str, Any]) -> None:
    """Check that logits stay in the model's dtype where log-probabilities are computed in chunks.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: logprob_chunk_size is above 0 without defer_fp32_logits.
    """
    size = config.get("logprob_chunk_size")
    if size is None or size <= 0:
        return
    megatron = megatron_cfg(config)
    if not megatron.get("defer_fp32_logits"):
        raise config_error(
            f"{MEGATRON}.defer_fp32_logits",
            megatron.get("defer_fp32_logits", MISSING),
            f"must be true, because policy.logprob_chunk_size is {size}: whole logits in FP32 would undo the chunks",
            ConfigAssertionError,
        )
