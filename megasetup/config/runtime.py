"""From a policy config to everything that the setup needs to know before it builds a model.

Every check runs before anything is built, and what they find is reported together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megasetup.compat.bridge import import_bridge
from megasetup.config.errors import ConfigError
from megasetup.config.fields import section
from megasetup.config.precision import policy_dtype
from megasetup.config.refusals import names_no_key
from megasetup.config.setup import setup_model_config
from megasetup.config.validate import examine_policy


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
    if isinstance(config, Mapping):
        config = {"model_name": hf_model_name, **config}
    findings = examine_policy(config)
    problems, known = findings.problems, findings.problems.paths()
    if rank == 0:
        findings.log_warnings()
    container = model_cfg = cause = None
    try:
        dtype = _dtype_to_check_with(config)
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
    except ConfigError as error:
        if not (known and names_no_key(error)):
            problems.add_news(error, known)
    except Exception as error:
        if not problems:
            raise
        cause = error  # (a config that is wrong may break any step)
    problems.raise_any(cause)
    is_generation_colocated, sampling_params = _generation(config)
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


def _generation(config: Mapping[str, Any]) -> tuple[bool | None, SamplingParams | None]:
    generation = config.get("generation")
    if generation is None:
        return None, None
    sampling = SamplingParams(
        top_k=generation.get("top_k"),
        top_p=generation.get("top_p", 1.0),
        temperature=generation.get("temperature", 1.0),
    )
    return generation["colocated"]["enabled"], sampling


def _dtype_to_check_with(config: Mapping[str, Any]) -> torch.dtype:
    """The training dtype. Where it is wrong, which is reported, the other checks run with the optimizer's."""
    with contextlib.suppress(ConfigError):
        return policy_dtype(config)
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
