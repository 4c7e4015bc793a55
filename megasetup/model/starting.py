"""What a setup does before there is a model: the global state, and settings of this process that the model asks for."""

from __future__ import annotations

from typing import Any

import torch

from megasetup.compat.bridge import import_bridge
from megasetup.compat.signal_handler import patch_signal_handler
from megasetup.model import bridge


def need_gpu() -> None:
    """Refuse to train without a GPU.

    Raises:
        RuntimeError: this process sees none.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "training needs a GPU, and this process sees none: look at CUDA_VISIBLE_DEVICES and `megasetup doctor`. "
            "Without one, checkpoints can be converted and configs checked"
        )


def new_state(cfg: Any, lora: Any) -> Any:
    """The GlobalState of a config, which is completed, with the worker of asynchronous saves started before CUDA is.

    Args:
        cfg: the ConfigContainer, completed here: validated for this many ranks.
        lora: what create_lora made, or None.
    """
    patch_signal_handler()
    # Each process was given its GPU by whoever started it, by CUDA_VISIBLE_DEVICES or by setup_distributed.
    cfg.dist.external_gpu_device_mapping = True
    if lora is not None:
        cfg.peft = lora
    cfg.set_data_parallel_size()
    bridge.quietly(cfg.validate)()
    state = import_bridge("megatron.bridge.training.state").GlobalState()
    state.cfg = cfg
    state.initialize_async_checkpoint_worker()
    return state


def tune_process(cfg: Any) -> None:
    """Settings of this process that a model's features ask for."""
    from megatron.core.config import set_experimental_flag
    from megatron.core.jit import disable_jit_fuser

    set_experimental_flag(cfg.dist.enable_megatron_core_experimental)
    if cfg.dist.disable_jit_fuser:
        disable_jit_fuser()
    if getattr(cfg.model, "fine_grained_activation_offloading", False):
        from megatron.core.pipeline_parallel.utils import set_ideal_affinity_for_current_gpu

        set_ideal_affinity_for_current_gpu()
    if getattr(cfg.model, "cuda_graph_impl", "none") != "none":
        # Nothing may be compiled while a graph is captured. Without graphs, the first step compiles what it needs.
        bridge.quietly(import_bridge("megatron.bridge.training.initialize").set_jit_fusion_options)(
            cfg.model, cfg.train.micro_batch_size
        )


def fill_vocabulary(cfg: Any) -> None:
    """The size of the vocabulary is the tokenizer's where the model's config has none."""
    if cfg.model.vocab_size is None:
        tokenizer = bridge.quietly(import_bridge("megatron.bridge.training.tokenizers.tokenizer").build_tokenizer)(
            cfg.tokenizer
        )
        cfg.model.vocab_size, cfg.model.should_pad_vocab = tokenizer.vocab_size, True
