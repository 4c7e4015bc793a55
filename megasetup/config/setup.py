"""The model provider with the whole config applied to it, and Megatron-Bridge's ConfigContainer around it.

Each concern has a file of its own; this one runs them in their order and puts what they find together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megasetup.config.architecture import apply_architecture_config
from megasetup.config.checkpoint import create_policy_checkpoint_config
from megasetup.config.colocated import validate_colocated_config
from megasetup.config.container import create_megatron_config, validate_training_config
from megasetup.config.draft import validate_draft_config
from megasetup.config.errors import Problems
from megasetup.config.fields import POLICY, megatron_cfg, section
from megasetup.config.logprobs import fused_linear_logprobs_settings, validate_chunking_config
from megasetup.config.moe import apply_moe_config
from megasetup.config.mtp import apply_mtp_config
from megasetup.config.optimizer import validate_optimizer_config
from megasetup.config.overrides import merge_model_overrides, validate_model_override_conflicts
from megasetup.config.parallelism import apply_parallelism_config, validate_layout
from megasetup.config.peft import create_lora
from megasetup.config.performance import apply_performance_config, fp8_settings, validate_fusions
from megasetup.config.precision import apply_precision_config
from megasetup.config.provider import provider_from_checkpoint, provider_from_hf
from megasetup.config.refusals import REFUSALS, refusal
from megasetup.config.router_replay import validate_router_replay_config

_logger = logging.getLogger("megasetup")


def setup_model_config(
    config: Mapping[str, Any],
    rank: int,
    dtype: torch.dtype,
    hf_model_name: str,
    pretrained_path: str | None,
    weights_path: str | None = None,
    optimizer_path: str | None = None,
    *,
    skip_weight_load: bool = False,
) -> tuple[Any, Any]:
    """Find the model provider, apply the config to it, and build the ConfigContainer.

    Args:
        config: the policy config.
        rank: the global rank, for messages.
        dtype: the training dtype.
        hf_model_name: a Hugging Face id or folder: the architecture, if no checkpoint says it, and the tokenizer.
        pretrained_path: the Megatron checkpoint to start from.
        weights_path: where training checkpoints are saved and loaded; None on a fresh run.
        optimizer_path: the optimizer state to resume, or None.
        skip_weight_load: no checkpoint is read, because weights arrive in another way; pretrained_path may be None.

    Returns:
        (ConfigContainer, its model provider).

    Raises:
        ConfigError: what is wrong with the config, all of it.
        FileNotFoundError: pretrained_path holds no run_config.yaml.
    """
    megatron = megatron_cfg(config)
    model_cfg, is_fresh = _find_provider(config, rank, hf_model_name, pretrained_path, skip_weight_load)

    problems = Problems()
    overrides = section(config, "megatron_cfg", "model_overrides")
    if overrides:
        with problems.collect():
            validate_model_override_conflicts(megatron, overrides)
        with problems.collect():
            model_cfg = merge_model_overrides(model_cfg, overrides)

    # In this order: a later step sees what an earlier one has set.
    steps: tuple[Callable[[], object], ...] = (
        lambda: apply_parallelism_config(model_cfg, config),
        lambda: apply_moe_config(model_cfg, config),
        lambda: apply_mtp_config(model_cfg, config),
        lambda: apply_precision_config(model_cfg, config, dtype),
        lambda: apply_performance_config(model_cfg, config),
        lambda: validate_fusions(config),
        lambda: validate_optimizer_config(config),
        lambda: apply_architecture_config(model_cfg, config),
        lambda: validate_chunking_config(config),
        lambda: fused_linear_logprobs_settings(config),
        lambda: validate_router_replay_config(config),
        lambda: validate_draft_config(config),
        lambda: validate_colocated_config(config),
        lambda: create_lora(config),
        lambda: validate_layout(model_cfg),
        lambda: validate_training_config(config, model_cfg),
    )
    for step in steps:
        with problems.collect():
            step()
    checkpoint_config = container = None
    fp8_param = False
    with problems.collect():
        fp8_param = bool(fp8_settings(config).get("fp8_param"))
    with problems.collect():
        checkpoint_config = create_policy_checkpoint_config(
            config, pretrained_path, weights_path, optimizer_path, skip_weight_load=skip_weight_load
        )
    with problems.collect():
        container = create_megatron_config(model_cfg, checkpoint_config, config, hf_model_name, dtype, fp8_param)
    problems.raise_any()

    try:
        if is_fresh or overrides:
            model_cfg.finalize()
        model_cfg.__post_init__()
    except REFUSALS as error:
        raise refusal(error, config, f"Megatron says of {hf_model_name}") from error
    return container, model_cfg


def _find_provider(
    config: Mapping[str, Any], rank: int, hf_model_name: str, pretrained_path: str | None, skip_weight_load: bool
) -> tuple[Any, bool]:
    """The provider, and whether nobody has finalized it yet."""
    checkpoint_format = section(config, "pretrained_checkpoint").get("format")
    if skip_weight_load or checkpoint_format == "megatron_lm":
        return provider_from_hf(config, hf_model_name), True
    if pretrained_path is None:
        raise ValueError("pretrained_path is None: it must be the checkpoint to start from, unless skip_weight_load")
    if checkpoint_format == "megatron_bridge" and config.get("hf_config_overrides"):
        _logger.warning(
            "%s.hf_config_overrides are ignored: the architecture comes from the checkpoint %s", POLICY, pretrained_path
        )
    return provider_from_checkpoint(pretrained_path, rank), False
