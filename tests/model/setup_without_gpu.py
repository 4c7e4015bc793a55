"""The setup of a model on a machine without a GPU, as far as it goes there: no optimizer, no steps.

Import, config, Bridge's model, hooks, LoRA and checkpoints are the real ones. What asks for a GPU stands aside: the
check for one, DistributedDataParallel, and the question whether layers are Transformer Engine's.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megasetup.checkpoint.importing import handle_model_import
from megasetup.checkpoint.paths import validate_model_paths
from megasetup.compat.bridge import import_bridge
from megasetup.compat.no_gpu import no_gpu
from megasetup.config.runtime import validate_and_set_config
from megasetup.model import training
from megasetup.model.chunks import build_chunks
from megasetup.model.distributed import setup_distributed
from megasetup.model.result import ModelAndOptimizerState


def set_up(config: dict[str, Any], saved: Path | None = None) -> tuple[Any, ModelAndOptimizerState]:
    """The completed ConfigContainer and what the setup made of a config with transformer_impl local.

    Args:
        config: the policy config.
        saved: a checkpoint to resume.
    """
    setup_distributed(config)
    name, pretrained, exists = validate_model_paths(config)
    handle_model_import(config, name, pretrained, exists)
    place = None if saved is None else str(saved)
    cfg = validate_and_set_config(config, dist.get_rank(), name, pretrained, place, None).megatron_cfg
    cfg.dist.distributed_backend = "gloo"
    # (what data-parallel ranks read for each other travels through GPUs)
    cfg.checkpoint.fully_parallel_load = False
    bare = functools.partial(build_chunks, wrap_with_ddp=False)
    with (
        no_gpu(),
        mock.patch.object(training, "need_gpu"),
        mock.patch.object(training, "check_supported"),
        mock.patch.object(training, "build_chunks", bare),
        # (it says that Transformer Engine is there wherever Megatron can be imported)
        mock.patch.object(import_bridge("megatron.bridge.peft.utils"), "HAVE_TE", False),
    ):
        return cfg, training.setup_model_and_optimizer(config, cfg, load_optimizer=False)
