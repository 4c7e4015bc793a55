"""The reference model: the weights that a policy started from, kept on the CPU to compare it with.

It is built once, loaded, copied out and dropped again, so it takes GPU memory only while the setup runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megasetup.compat.bridge import import_bridge
from megasetup.config.peft import create_lora
from megasetup.model import bridge
from megasetup.model.chunks import build_chunks
from megasetup.model.hooks import Hook, lora_hook, pre_wrap_hooks
from megasetup.model.router_replay import forget_routers_made_inside
from megasetup.model.stages import Stages


def setup_reference_model_state(
    config: Mapping[str, Any],
    megatron_cfg: Any,
    pretrained_path: str,
    pre_load_checkpoint_hook: Callable[[list[Any]], object] | None = None,
) -> dict[str, Any]:
    """Load the reference model and return its state on the CPU.

    Collective: every rank calls it, after setup_model_and_optimizer, whose parallel state it uses.

    Args:
        config: the policy config.
        megatron_cfg: the ConfigContainer that the policy was set up with; not changed.
        pretrained_path: the checkpoint that the policy started from.
        pre_load_checkpoint_hook: called with the list of chunks before the checkpoint is loaded.

    Returns:
        The state_dict of the wrapped model, tensors on the CPU, by the names that the policy's own has; for several
        chunks one such dict with the chunk's index before each name ("0.decoder...").

    Raises:
        FileNotFoundError: pretrained_path holds no checkpoint.
        PeerFailedError: another rank failed.
    """
    with Stages("reference model") as stages, forget_routers_made_inside():
        with stages.stage("config", "see the key that the message names"):
            # Adapters must add nothing, or the reference would not be the model that the policy started from.
            lora = create_lora(config, lora_B_init_method="zero")
            cfg = _reference_config(megatron_cfg, pretrained_path, lora)
            state = import_bridge("megatron.bridge.training.state").GlobalState()
            state.cfg = cfg
            if not bridge.is_checkpoint(pretrained_path):
                raise FileNotFoundError(f"{pretrained_path} holds no checkpoint for the reference model")
        with stages.stage("model", "free GPU memory: the reference model stands beside the policy while it is loaded"):
            from megatron.core.process_groups_config import ProcessGroupCollection

            hooks: list[Hook] = pre_wrap_hooks(
                config, cfg.model, None if lora is None else lora_hook(lora, state, load_base=True)
            )
            groups = ProcessGroupCollection.use_mpu_process_groups()
            chunks = build_chunks(config, cfg, groups, hooks, wrap_with_ddp=False)
        with stages.stage("load", "check that every node sees the folder and that it is complete") as stage:
            if pre_load_checkpoint_hook is not None:
                pre_load_checkpoint_hook(chunks)
            if lora is None:  # (with LoRA its hook has loaded them)
                stage.bytes = bridge.load_weights_from(pretrained_path, state, chunks)
            stages.report.weights = f"pretrained, {pretrained_path}"
        with stages.stage("copy to the CPU", "free host memory") as stage:
            found = _on_cpu(chunks)
            stage.bytes = sum(value.nbytes for value in found.values() if isinstance(value, torch.Tensor))
        del chunks
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
    return found


def _reference_config(megatron_cfg: Any, pretrained_path: str, lora: Any) -> Any:
    """The policy's configuration without an optimizer, a resume or a place to save to."""
    cfg = copy.copy(megatron_cfg)
    # The policy's provider holds its process groups and hooks, which are no one else's and cannot be copied.
    cfg.model = _bare_copy(megatron_cfg.model)
    cfg.peft = lora
    cfg.checkpoint = copy.copy(megatron_cfg.checkpoint)
    cfg.checkpoint.pretrained_checkpoint = pretrained_path
    cfg.checkpoint.load = cfg.checkpoint.save = None
    cfg.checkpoint.async_save = False
    cfg.checkpoint.load_optim = False
    cfg.checkpoint.load_main_params_from_ckpt = False
    return cfg


def _bare_copy(provider: Any) -> Any:
    bare = copy.copy(provider)
    for name in ("_pre_wrap_hooks", "_post_wrap_hooks"):
        if name in vars(bare):
            setattr(bare, name, [])
    # Callbacks of the policy's training must not be called for another model.
    for name in ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "grad_scale_func"):
        if hasattr(bare, name):
            setattr(bare, name, None)
    return bare


def _on_cpu(chunks: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        prefix = f"{index}." if len(chunks) > 1 else ""
        for name, value in chunk.state_dict().items():
            found[prefix + name] = (
                value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            )
    return found
