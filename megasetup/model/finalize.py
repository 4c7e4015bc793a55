"""The last step of a setup: the model learns how training synchronises it, and the trainer gets what it works with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megasetup.compat.bridge import import_bridge
from megasetup.compat.hf_config import patch_hf_configs
from megasetup.config.fields import megatron_cfg as megatron_section
from megasetup.config.fields import section
from megasetup.model import bridge
from megasetup.model.chunks import param_sync_function


def finalize_megatron_setup(
    config: Mapping[str, Any],
    megatron_cfg: Any,
    hf_model_name: str,
    worker_sharding_annotations: Any,
    model: Any,
    optimizer: Any,
) -> tuple[Any, Any, bool, int]:
    """Finish a setup.

    Args:
        config: the policy config.
        megatron_cfg: the ConfigContainer that the model was set up with.
        hf_model_name: a Hugging Face id or folder: the tokenizer, and the names that weights are exported under.
        worker_sharding_annotations: has get_axis_size("data_parallel"); None to ask Megatron's parallel state.
        model: the wrapped model, or a list of chunks.
        optimizer: Megatron's optimizer, or None.

    Returns:
        (tokenizer, bridge, should_disable_forward_pre_hook, dp_size): Megatron's tokenizer; Bridge's AutoBridge, for
        export; whether the model's forward pre-hook must be disabled around evaluation, because it gathers parameters
        for training; the data-parallel size.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    _set_training_callbacks(megatron_cfg, chunks, optimizer)
    build_tokenizer = import_bridge("megatron.bridge.training.tokenizers.tokenizer").build_tokenizer
    tokenizer = bridge.quietly(build_tokenizer)(megatron_cfg.tokenizer)
    patch_hf_configs()
    kwargs = dict(section(config, "hf_config_overrides"))
    trust = megatron_section(config).get("trust_remote_code", False)
    auto_bridge = import_bridge().AutoBridge.from_hf_pretrained(hf_model_name, trust_remote_code=trust, **kwargs)
    return (
        tokenizer,
        auto_bridge,
        bool(megatron_cfg.optimizer.use_distributed_optimizer and megatron_cfg.ddp.overlap_param_gather),
        _data_parallel_size(worker_sharding_annotations),
    )


def _set_training_callbacks(cfg: Any, chunks: list[Any], optimizer: Any) -> None:
    """Tell Megatron's schedules how this model's gradients and parameters are synchronised."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    settings = get_model_config(chunks[0])
    if cfg.ddp.overlap_grad_reduce and hasattr(chunks[0], "no_sync"):
        settings.no_sync_func = _one_or_list([chunk.no_sync for chunk in chunks])
        if cfg.dist.align_grad_reduce:
            settings.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in chunks])
    settings.param_sync_func = param_sync_function(cfg, chunks)
    if optimizer is not None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        settings.finalize_model_grads_func = functools.partial(finalize_model_grads, pg_collection=groups)
        settings.grad_scale_func = optimizer.scale_loss


def _one_or_list(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def _data_parallel_size(sharding: Any) -> int:
    if sharding is not None:
        return int(sharding.get_axis_size("data_parallel"))
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_world_size())
