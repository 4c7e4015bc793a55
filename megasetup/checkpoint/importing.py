"""A Megatron checkpoint from a Hugging Face model: made once, whole or not at all, whoever asks and however often.

Each conversion builds its checkpoint beside the place and moves it there when it is whole, so a run that is killed
leaves nothing that looks finished. Processes that share a folder agree through a lock on who converts. The ranks of one
process group convert together with the sizes of the config; where their machines do not share the folder, one rank of
each machine converts for it, in a process of its own, because a process group cannot be two at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasetup.checkpoint import nodes
from megasetup.checkpoint.converting import Conversion
from megasetup.checkpoint.once import import_alone, import_together
from megasetup.checkpoint.settings import ALONE
from megasetup.config.fields import section
from megasetup.config.model_name import what_is_wrong

_logger = logging.getLogger("megasetup")


def handle_model_import(
    config: Mapping[str, Any],
    hf_model_name: str,
    pretrained_path: str,
    pt_checkpoint_exists: bool,
    model_post_wrap_hook: Callable[[Any], Any] | None = None,
    transformer_layer_spec: Any | None = None,
    mamba_stack_spec: Any | None = None,
) -> None:
    """Convert the Hugging Face model that a config starts from, unless a checkpoint is there.

    Nothing is done for a pretrained_checkpoint, which needs no conversion, and for a checkpoint that exists, unless
    policy.megatron_cfg.force_reconvert_from_hf is set. Where there is a process group, every rank calls this.

    Args:
        config: the policy config: pretrained_checkpoint, hf_config_overrides and megatron_cfg are read.
        hf_model_name: a Hugging Face id, or a folder as save_pretrained makes it.
        pretrained_path: the folder to put the checkpoint in, as validate_model_paths gives it.
        pt_checkpoint_exists: whether it is there, as validate_model_paths says.
        model_post_wrap_hook: called with each chunk of the model when its weights are loaded.
        transformer_layer_spec: a ModuleSpec, or a callable that returns one, in place of the provider's.
        mamba_stack_spec: the same for the layer stack of Mamba and hybrid models.

    Raises:
        ValueError: Megatron-Bridge does not know the model, or it needs code that may not run: code of a model runs
            only when policy.megatron_cfg.trust_remote_code is true.
        OSError: there is no such model, or the folder cannot be written.
        RuntimeError: the ranks do not fit the sizes, or a machine does not see the result.
    """
    if section(config, "pretrained_checkpoint"):
        return
    megatron = section(config, "megatron_cfg")
    force = bool(megatron.get("force_reconvert_from_hf"))
    if pt_checkpoint_exists and not force:
        _logger.info("the converted checkpoint %s is there", pretrained_path)
        return
    import_model_from_hf(
        hf_model_name,
        pretrained_path,
        megatron_cfg=megatron,
        hf_config_overrides=section(config, "hf_config_overrides"),
        trust_remote_code=bool(megatron.get("trust_remote_code")),
        force=force,
        model_post_wrap_hook=model_post_wrap_hook,
        transformer_layer_spec=transformer_layer_spec,
        hybrid_stack_spec=mamba_stack_spec,
    )


def import_model_from_hf(
    hf_model_name: str,
    output_path: str | os.PathLike[str],
    *,
    megatron_cfg: Mapping[str, Any] | None = None,
    hf_config_overrides: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    model_post_wrap_hook: Callable[[Any], Any] | None = None,
    transformer_layer_spec: Any | None = None,
    hybrid_stack_spec: Any | None = None,
) -> bool:
    """Convert a Hugging Face model to a Megatron checkpoint, unless another process did or does it.

    With a process group its ranks convert together and all call this; NCCL ranks on their GPUs with Transformer
    Engine's layers, gloo ranks on the CPU. Without one this process converts alone, on the CPU, and puts nothing on
    a GPU.

    Args:
        hf_model_name: a Hugging Face id, or a folder as save_pretrained makes it.
        output_path: the folder to put the checkpoint in.
        megatron_cfg: parallel sizes and stage layer counts, as in policy.megatron_cfg. A process alone needs none.
        hf_config_overrides: fields of the Hugging Face config to change.
        trust_remote_code: whether code that comes with the model may run.
        force: convert though a checkpoint is there. Processes that do so at the same time convert once.
        model_post_wrap_hook: called with each chunk of the model when its weights are loaded.
        transformer_layer_spec: a ModuleSpec, or a callable that returns one, in place of the provider's.
        hybrid_stack_spec: the same for the layer stack of Mamba and hybrid models.

    Returns:
        Whether this call converted; False where the checkpoint was there, or another process made it meanwhile.

    Raises:
        ValueError: Megatron-Bridge does not know the model, it needs code that may not run, or the provider lacks what
            is to be overridden.
        OSError: there is no such model, the folder cannot be written, or what is there is no checkpoint, broken or
            whole (FileExistsError).
        RuntimeError: Megatron's parallel state is up, the ranks do not fit the sizes, or a machine does not see the
            result.
    """
    settings = megatron_cfg or {}
    conversion = Conversion(
        hf_model_name=hf_model_name,
        sizes={name: settings[name] for name in ALONE if name in settings},
        overrides=dict(hf_config_overrides or {}),
        trust_remote_code=trust_remote_code,
        model_post_wrap_hook=model_post_wrap_hook,
        transformer_layer_spec=transformer_layer_spec,
        hybrid_stack_spec=hybrid_stack_spec,
    )
    target = Path(os.path.abspath(output_path))
    if not dist.is_initialized():
        if (wrong := what_is_wrong(hf_model_name)) is not None:
            raise FileNotFoundError(f"the model is {hf_model_name!r}: {wrong}")
        return import_alone(conversion, target, force=force)
    if nodes.all_see(target.parent):
        return import_together(conversion, target, force=force)
    return nodes.import_on_each(conversion, target, force=force)
