"""A Hugging Face folder from a Megatron checkpoint: the way back, every tensor as it is.

One process on the CPU does it, with Megatron's local layers, so that a checkpoint can be taken out of a training job
without its GPUs. The Hugging Face model that the checkpoint came from gives the config, the tokenizer and the names of
the tensors; the folder appears when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasetup.checkpoint.bridges import open_model
from megasetup.checkpoint.marks import MARK, RUN_CONFIG, what_is_missing
from megasetup.checkpoint.paths import resolve_iter_dir_from_root
from megasetup.checkpoint.safety import check_index
from megasetup.checkpoint.settings import ALONE, UNSTAGED, changed
from megasetup.checkpoint.worlds import lone_world, parallel_state_of
from megasetup.compat.bridge import import_bridge
from megasetup.compat.hf_config import patch_hf_configs
from megasetup.compat.local_layers import (
    building_local_layers,
    local_layer_settings,
    name_as_transformer_engine,
    uses_local_layers,
)
from megasetup.compat.no_gpu import no_gpu
from megasetup.config.model_name import what_is_wrong

_logger = logging.getLogger("megasetup")


def export_model_to_hf(
    checkpoint: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    hf_model_name: str | None = None,
    hf_config_overrides: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the weights of a Megatron-Bridge checkpoint as a Hugging Face folder.

    Args:
        checkpoint: an iteration's folder, or one that holds iterations, of which the latest is taken.
        output_path: the folder to make; an empty one may exist.
        hf_model_name: the Hugging Face id or folder of the model's kind; None for the one it was converted from.
        hf_config_overrides: fields of its config to change; None for those that it was converted with.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        The folder of the iteration that was exported.

    Raises:
        FileNotFoundError: there is no Megatron-Bridge checkpoint, or it is not whole.
        FileExistsError: the folder exists and is not empty.
        UnsafeCheckpointError: the checkpoint may run code.
        ValueError: nothing says which Hugging Face model it is, or the names of the tensors are not that model's.
        RuntimeError: this process is part of a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("a checkpoint is exported by one process alone, and this one is part of a process group")
    iteration = _iteration(Path(checkpoint))
    target = Path(os.path.abspath(output_path))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty: choose another folder, or remove it")
    check_index(iteration)
    import_bridge("megatron.bridge.training.checkpointing")  # (before torch.cuda is answered for: imports look at it)
    patch_hf_configs()
    source = _source(iteration)
    provider = _provider(iteration)
    name = hf_model_name or source.get("hf_model_name") or getattr(provider, "hf_model_id", None)
    if not name:
        raise ValueError(f"{iteration} does not say which Hugging Face model it came from: name it (--model)")
    if (wrong := what_is_wrong(name)) is not None:
        raise FileNotFoundError(f"the model that {iteration} is of is {name!r}: {wrong} (--model)")
    overrides = source.get("hf_config_overrides", {}) if hf_config_overrides is None else hf_config_overrides

    if not uses_local_layers(provider):
        provider.register_pre_wrap_hook(name_as_transformer_engine)
    settings = {**ALONE, **UNSTAGED, **local_layer_settings(provider)}
    if isinstance(getattr(provider, "hybrid_layer_pattern", None), str):
        settings["hybrid_layer_pattern"] = provider.hybrid_layer_pattern.replace("|", "")
    with (
        no_gpu(),
        warnings.catch_warnings(),
        changed(provider, settings),
        lone_world(),
        _written_whole(target) as folder,
    ):
        warnings.simplefilter("ignore")  # (Megatron's and Bridge's, about settings that are not the user's here)
        bridge = _open(name, iteration, overrides, trust_remote_code)
        provider.finalize()
        with parallel_state_of(provider), building_local_layers():
            model = import_bridge("megatron.bridge.training.model_load_save").build_and_load_model(
                str(iteration), provider, use_cpu_init=True, skip_temp_dist_context=True
            )
            try:
                bridge.save_hf_pretrained(model if isinstance(model, list) else [model], str(folder), strict=True)
            except AttributeError as error:
                # (what Bridge makes of a tensor that its mapping for this kind of model does not know)
                raise ValueError(
                    f"the tensors of {iteration} are not those of a model like {name}: name one of its kind (--model)"
                ) from error
    _logger.info("%s is written, from %s", target, iteration)
    return iteration


def _iteration(checkpoint: Path) -> Path:
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"{checkpoint} is no folder of a checkpoint")
    iteration = checkpoint
    if not (checkpoint / RUN_CONFIG).is_file():
        message = (
            f"{checkpoint} holds neither {RUN_CONFIG} nor an iteration (iter_*): it is no Megatron-Bridge checkpoint"
        )
        iteration = Path(resolve_iter_dir_from_root(str(checkpoint), message))
    root = iteration.parent
    missing = what_is_missing(root) if (root / MARK).is_file() else None
    if missing is None:
        for file in (RUN_CONFIG, "metadata.json", ".metadata"):
            if not (iteration / file).is_file():
                missing = f"{iteration.name}/{file} is missing"
                break
    if missing is not None:
        raise FileNotFoundError(f"{root} is no whole Megatron-Bridge checkpoint in the torch_dist format: {missing}")
    return iteration


def _source(iteration: Path) -> dict[str, Any]:
    """What the mark of a conversion says; nothing for a checkpoint that a training run saved."""
    mark = iteration.parent / MARK
    return dict(json.loads(mark.read_text())) if mark.is_file() else {}


def _provider(iteration: Path) -> Any:
    try:
        return import_bridge("megatron.bridge.training.model_load_save").load_model_config(str(iteration))[0]
    except Exception as error:
        error.add_note(
            f"megasetup: Megatron-Bridge could not load {iteration / RUN_CONFIG}. The usual cause is a checkpoint made "
            "by an older Megatron-Bridge: convert it again, or export it with that version"
        )
        raise


def _open(name: str, iteration: Path, overrides: Mapping[str, Any], trust_remote_code: bool) -> Any:
    try:
        return open_model(name, overrides=overrides, trust_remote_code=trust_remote_code)
    except Exception as error:
        error.add_note(
            f"megasetup: the export of {iteration} needs config and tokenizer of {name}. If that has moved, or is not "
            "to be had here, name another folder or id of the same model (--model)"
        )
        raise


@contextlib.contextmanager
def _written_whole(target: Path) -> Any:
    """A folder beside the target that takes its place when the block is done, and is gone when it fails."""
    folder = target.parent / f".{target.name}.exporting-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    try:
        yield folder
        if target.exists():
            target.rmdir()
        os.rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
