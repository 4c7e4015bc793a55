"""From a policy config to everything that the setup needs to know before it builds a model.

Every check runs before anything is built, and what they find is reported together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from megasetup.compat.bridge import import_bridge
from megasetup.config.architecture import apply_architecture_config
from megasetup.config.checkpoint import create_checkpoint_config
from megasetup.config.container import create_megatron_config, validate_training_config
from megasetup.config.errors import (
    MISSING,
    ConfigAssertionError,
    ConfigKeyError,
    ConfigNotImplementedError,
    Problems,
    config_error,
)
from megasetup.config.fields import MEGATRON, POLICY, megatron_cfg, section
from megasetup.config.logprobs import fused_linear_logprobs_settings, validate_chunking_config
from megasetup.config.moe import apply_moe_config
from megasetup.config.mtp import apply_mtp_config
from megasetup.config.optimizer import validate_optimizer_config
from megasetup.config.overrides import merge_model_overrides, validate_model_override_conflicts
from megasetup.config.parallelism import apply_parallelism_config
from megasetup.config.performance import apply_performance_config, fp8_settings
from megasetup.config.precision import apply_precision_config, policy_dtype
from megasetup.config.provider import provider_from_checkpoint, provider_from_hf
from megasetup.config.router_replay import validate_router_replay_config

_logger = logging.getLogger("megasetup")

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


class SamplingParams(NamedTuple):
    """How generation samples, so that training can compute the same probabilities.

    Attributes:
        top_k: the number of tokens sampled from, None for all.
        top_p: the share of the probability sampled from.
        temperature: what logits are divided by.
    """

    top_k: int | None
    top_p: float
    temperature: float


class RuntimeConfig(NamedTuple):
    """What `validate_and_set_config` found out.

    Attributes:
        megatron_cfg: Megatron-Bridge's ConfigContainer.
        model_cfg: its model provider.
        dtype: the training dtype.
        optimizer_cpu_offload: whether the optimizer steps on the CPU.
        offload_optimizer_for_logprob: whether it leaves the GPU while log-probabilities are computed.
        offload_optimizer_for_refit: whether it leaves the GPU while weights go to generation.
        is_generation_colocated: whether generation shares these GPUs; None when there is no generation.
        sampling_params: how generation samples; None when there is no generation.
        final_padded_vocab_size: rows of the embedding over all tensor-parallel ranks.
    """

    megatron_cfg: Any
    model_cfg: Any
    dtype: torch.dtype
    optimizer_cpu_offload: bool
    offload_optimizer_for_logprob: bool
    offload_optimizer_for_refit: bool
    is_generation_colocated: bool | None
    sampling_params: SamplingParams | None
    final_padded_vocab_size: int


def validate_and_set_config(
    config: Mapping[str, Any],
    rank: int,
    hf_model_name: str,
    pretrained_path: str | None,
    weights_path: str | None,
    optimizer_path: str | None,
    *,
    skip_weight_load: bool = False,
) -> RuntimeConfig:
    """Check a policy config, and turn it into Megatron-Bridge's configuration.

    Args:
        config: the policy config.
        rank: the global rank, for messages.
        hf_model_name: a Hugging Face id or folder: the architecture and the tokenizer.
        pretrained_path: the Megatron checkpoint to start from.
        weights_path: where training checkpoints are saved and loaded; None on a fresh run.
        optimizer_path: the optimizer state to resume, or None.
        skip_weight_load: no checkpoint is read, because weights arrive in another way; pretrained_path may be None.

    Raises:
        ConfigError: what is wrong with the config, all of it.
        FileNotFoundError: pretrained_path holds no run_config.yaml.
    """
    problems = Problems()
    dtype = _likely_dtype(config)
    with problems.collect():
        dtype = policy_dtype(config)
    with problems.collect():
        validate_policy_config(config)
    is_generation_colocated = sampling_params = None
    with problems.collect():
        is_generation_colocated, sampling_params = _generation(config)
    container = model_cfg = None
    with problems.collect():
        container, model_cfg = setup_model_config(
            config,
            rank,
            dtype,
            hf_model_name,
            pretrained_path,
            weights_path,
            optimizer_path,
            skip_weight_load=skip_weight_load,
        )
    problems.raise_any()
    return RuntimeConfig(
        megatron_cfg=container,
        model_cfg=model_cfg,
        dtype=dtype,
        optimizer_cpu_offload=bool(section(config, "megatron_cfg", "optimizer").get("optimizer_cpu_offload", False)),
        offload_optimizer_for_logprob=config.get("offload_optimizer_for_logprob", False),
        offload_optimizer_for_refit=config.get("offload_optimizer_for_refit", True),
        is_generation_colocated=is_generation_colocated,
        sampling_params=sampling_params,
        final_padded_vocab_size=_padded_vocab_size(model_cfg),
    )


def validate_policy_config(config: Mapping[str, Any]) -> None:
    """Check what belongs to no single concern, from the config alone.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: transformer_impl inference_optimized with tensor parallelism and no sequence parallelism;
            yarn rope scaling that lacks a parameter.
        ConfigNotImplementedError: a reward model.
    """
    problems = Problems()
    megatron = megatron_cfg(config)
    size = megatron.get("tensor_model_parallel_size") or 1
    if megatron.get("transformer_impl") == "inference_optimized" and size > 1 and not megatron.get("sequence_parallel"):
        problems.add(
            f"{MEGATRON}.sequence_parallel",
            megatron.get("sequence_parallel", MISSING),
            f"must be true, because {MEGATRON}.transformer_impl is inference_optimized and tensor_model_parallel_size "
            f"is {size}",
            ConfigAssertionError,
        )
    if section(config, "reward_model_cfg").get("enabled"):
        problems.add(
            f"{POLICY}.reward_model_cfg.enabled",
            True,
            "must be false: reward models are not supported with Megatron",
            ConfigNotImplementedError,
        )
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
        lambda: validate_optimizer_config(config),
        lambda: apply_architecture_config(model_cfg, config),
        lambda: validate_chunking_config(config),
        lambda: fused_linear_logprobs_settings(config),
        lambda: validate_router_replay_config(config),
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
        checkpoint_config = _create_checkpoint_config(
            config, pretrained_path, weights_path, optimizer_path, fp8_param, skip_weight_load
        )
    with problems.collect():
        container = create_megatron_config(model_cfg, checkpoint_config, config, hf_model_name, dtype, fp8_param)
    problems.raise_any()

    try:
        if is_fresh or overrides:
            model_cfg.finalize()
        model_cfg.__post_init__()
    except Exception as error:
        error.add_note(
            f"megasetup: Megatron rejects the model's settings, which come from {hf_model_name} and {MEGATRON}"
        )
        raise
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


def _create_checkpoint_config(
    config: Mapping[str, Any],
    pretrained_path: str | None,
    weights_path: str | None,
    optimizer_path: str | None,
    fp8_param: bool,
    skip_weight_load: bool,
) -> Any:
    settings = dict(section(config, "megatron_cfg", "checkpoint"))
    if skip_weight_load:
        pretrained_path = None
        if weights_path is None and settings.get("async_save"):
            _logger.info("%s.checkpoint.async_save is left out: this policy saves nothing", MEGATRON)
            settings["async_save"] = False
    # FP8 parameters have lost what master weights need; a resumed run has better ones in its optimizer state.
    resumes = weights_path is not None or optimizer_path is not None
    load_main_params = fp8_param and pretrained_path is not None and not resumes
    return create_checkpoint_config(pretrained_path, weights_path, optimizer_path, load_main_params, settings)


def _generation(config: Mapping[str, Any]) -> tuple[bool | None, SamplingParams | None]:
    generation = config.get("generation")
    if generation is None:
        return None, None
    colocated = section(config, "generation", "colocated").get("enabled", MISSING)
    if colocated is MISSING:
        raise config_error(f"{POLICY}.generation.colocated.enabled", MISSING, "must be true or false", ConfigKeyError)
    sampling = SamplingParams(
        top_k=generation.get("top_k"),
        top_p=generation.get("top_p", 1.0),
        temperature=generation.get("temperature", 1.0),
    )
    return colocated, sampling


def _likely_dtype(config: Mapping[str, Any]) -> torch.dtype:
    # Where the precision is wrong, which is reported, the other checks run with the one that the optimizer is for.
    flags = section(config, "megatron_cfg", "optimizer")
    return torch.bfloat16 if flags.get("bf16") else torch.float16 if flags.get("fp16") else torch.float32


def _padded_vocab_size(model_cfg: Any) -> int:
    calculate = import_bridge("megatron.bridge.utils.vocab_utils").calculate_padded_vocab_size
    size: int = calculate(
        model_cfg.vocab_size,
        model_cfg.make_vocab_size_divisible_by,
        model_cfg.tensor_model_parallel_size,
        logging_enabled=False,  # (it prints)
    )
    return size
