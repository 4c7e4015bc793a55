"""Puts the parts together: Megatron-Bridge's ConfigContainer, with what one part decides for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megasetup.compat.bridge import import_bridge
from megasetup.config.build import BRIDGE_CONFIG, Derivation
from megasetup.config.data_parallel import create_ddp_config, overlaps_param_gather, validate_data_parallel_config
from megasetup.config.errors import MISSING, ConfigAssertionError, Problems, config_error
from megasetup.config.fields import MEGATRON, megatron_cfg, section
from megasetup.config.optimizer import create_optimizer_config, create_scheduler_config
from megasetup.config.performance import fp8_settings
from megasetup.config.precision import validate_dtype_config

SETTINGS = {
    "calculate_per_token_loss": "megasetup, which always sets it",
    "perform_initialization": "megasetup, which always sets it",
    "parallel_output": "megasetup, which always sets it",
}
"""What decides the provider fields that are no choice."""


def validate_training_config(config: Mapping[str, Any], model_cfg: Any) -> None:
    """Check that the length of the run is known, and set what training needs.

    The loss is computed per token, because a batch's samples differ in length. Parameters that no checkpoint holds (a
    value head, adapters) must be initialised, so initialisation is on.

    Args:
        config: the policy config.
        model_cfg: the model provider, changed in place.

    Raises:
        ConfigAssertionError: there is no train_iters.
    """
    train_iters = megatron_cfg(config).get("train_iters", MISSING)
    if train_iters is MISSING or train_iters is None:
        raise config_error(
            f"{MEGATRON}.train_iters",
            train_iters,
            "must be the number of steps of the whole run: the learning rate's schedule needs it",
            ConfigAssertionError,
        )
    model_cfg.calculate_per_token_loss = True
    model_cfg.perform_initialization = True


def create_megatron_config(
    model_cfg: Any,
    checkpoint_config: Any,
    config: Mapping[str, Any],
    hf_model_name: str,
    dtype: torch.dtype,
    fp8_param_enabled: bool = False,
) -> Any:
    """Megatron-Bridge's ConfigContainer. Its `validate()` is for the caller, who knows the world's size.

    Args:
        model_cfg: the model provider.
        checkpoint_config: what `create_checkpoint_config` made.
        config: the policy config.
        hf_model_name: whose tokenizer is used: a Hugging Face id, or a folder.
        dtype: the training dtype.
        fp8_param_enabled: whether the parameters themselves are FP8.

    Returns:
        The ConfigContainer.

    Raises:
        ConfigError: settings that Megatron does not have or that contradict each other, flags that do not agree with
            the dtype; lists all.
    """
    classes = import_bridge(BRIDGE_CONFIG)
    megatron = megatron_cfg(config)
    problems = Problems()
    with problems.collect():
        validate_data_parallel_config(config)

    recipe = None
    with problems.collect():
        recipe = fp8_settings(config).get("fp8_recipe")
    fp8_source = f"from {MEGATRON}.fp8_cfg"
    reuse = Derivation(fp8_param_enabled and recipe == "mxfp8", fp8_source)
    overlap = Derivation(
        overlaps_param_gather(config), f"from {MEGATRON}.distributed_data_parallel_config.overlap_param_gather"
    )
    optimizer = create_optimizer_config(
        config,
        {
            "overlap_param_gather": overlap,
            "reuse_grad_buf_for_mxfp8_param_ag": reuse,
            "fp8_recipe": Derivation(recipe, fp8_source),
        },
        problems,
    )
    ddp = create_ddp_config(
        config,
        {
            "use_distributed_optimizer": Derivation(
                optimizer.use_distributed_optimizer, f"from {MEGATRON}.optimizer.use_distributed_optimizer"
            ),
            "fp8_param_gather": Derivation(fp8_param_enabled, fp8_source),
            "reuse_grad_buf_for_mxfp8_param_ag": reuse,
        },
        problems,
    )
    scheduler = create_scheduler_config(config, optimizer.weight_decay, problems)
    with problems.collect():
        validate_dtype_config(dtype, model_cfg, optimizer)
    problems.raise_any()

    train = classes.TrainingConfig(train_iters=megatron.get("train_iters"), micro_batch_size=_micro_batch_size(config))
    if "train_global_batch_size" in config:
        train.global_batch_size = config["train_global_batch_size"]
    dist = classes.DistributedInitConfig()
    if "use_gloo_process_groups" in megatron:
        dist.use_gloo_process_groups = megatron["use_gloo_process_groups"]
    tokenizer = classes.TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=hf_model_name)
    if "trust_remote_code" in megatron:
        tokenizer.hf_tokenizer_kwargs = {"trust_remote_code": megatron["trust_remote_code"]}
    return classes.ConfigContainer(
        model=model_cfg,
        checkpoint=checkpoint_config,
        logger=classes.LoggerConfig(),
        train=train,
        optimizer=optimizer,
        ddp=ddp,
        scheduler=scheduler,
        dist=dist,
        tokenizer=tokenizer,
        dataset=None,  # (batches come from the trainer)
    )


def _micro_batch_size(config: Mapping[str, Any]) -> int:
    # Where batches are cut by tokens, the number of samples in one is not known, and one is the size that always fits.
    by_tokens = any(section(config, name).get("enabled") for name in ("sequence_packing", "dynamic_batching"))
    return 1 if by_tokens else config.get("train_micro_batch_size", 1)
