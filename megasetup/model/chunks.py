"""The model's chunks: built and wrapped, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megasetup.config.fields import megatron_cfg as megatron_section
from megasetup.model import bridge
from megasetup.model.hooks import Hook, run_hooks


def build_chunks(
    policy_cfg: Mapping[str, Any], cfg: Any, groups: Any, hooks: list[Hook], *, wrap_with_ddp: bool = True
) -> list[Any]:
    """Build the model's chunks from cfg.model and wrap them.

    Args:
        policy_cfg: the policy config.
        cfg: the ConfigContainer.
        groups: the process groups.
        hooks: what runs before the wrapping, in order.
        wrap_with_ddp: whether to wrap for training.
    """
    from megatron.core.transformer.module import Float16Module

    from megasetup.moe import MoEFloat16Module

    experts = getattr(cfg.model, "num_moe_experts", None) or megatron_section(policy_cfg).get("freeze_moe_router")
    overlaps_step = wrap_with_ddp and cfg.optimizer.overlap_param_gather_with_optimizer_step
    chunks: list[Any] = bridge.quietly(cfg.model.provide_distributed_model)(
        ddp_config=cfg.ddp if wrap_with_ddp else None,
        wrap_with_ddp=wrap_with_ddp,
        use_megatron_fsdp=cfg.dist.use_megatron_fsdp,
        use_torch_fsdp2=cfg.dist.use_torch_fsdp2,
        overlap_param_gather_with_optimizer_step=overlaps_step,
        data_parallel_random_init=cfg.rng.data_parallel_random_init,
        pre_wrap_hook=run_hooks(hooks),
        mixed_precision_wrapper=MoEFloat16Module if experts else Float16Module,
        use_cpu_initialization=not torch.cuda.is_available(),
        pg_collection=groups,
    )
    return chunks


def bytes_of(chunks: list[Any]) -> int:
    """The bytes of the parameters on this rank."""
    return sum(parameter.numel() * parameter.element_size() for chunk in chunks for parameter in chunk.parameters())


def param_sync_function(cfg: Any, chunks: list[Any]) -> Any:
    """What starts the gathering of parameters, where that overlaps with the forward pass and is aligned over stages."""
    if not (cfg.ddp.overlap_param_gather and cfg.ddp.align_param_gather):
        return None
    functions = [chunk.start_param_sync for chunk in chunks]
    return functions if len(functions) > 1 else functions[0]
