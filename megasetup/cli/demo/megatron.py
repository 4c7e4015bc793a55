"""The small model in real Megatron optimizers, on one GPU: DistributedOptimizer over HybridDeviceOptimizer.

Megatron's optimizers take any MegatronModule, so the Hugging Face model is wrapped in one and no weight has to be
renamed. The optimizer is made first and the weights are loaded after it, as a fine-tuning start does; then
reload_model_params() is called, as Megatron's own load does, which reaches level 1 only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megasetup.cli.demo import model
from megasetup.cli.errors import CommandError


class Setup(NamedTuple):
    """A model chunk (wrapped in Megatron's DistributedDataParallel) and its optimizer."""

    chunk: Any
    optimizer: Any


@contextmanager
def _one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone, and Megatron's parallel state on it."""
    from megatron.core import parallel_state
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _build(device: torch.device) -> Setup:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import MegatronModule, TransformerConfig

    settings = model.config()
    config = TransformerConfig(
        num_layers=settings.num_hidden_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    wrapped = MegatronModule(config)
    wrapped.add_module("model", model.build(seed=1).to(device))
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), wrapped)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            use_torch_optimizer_for_cpu_offload=True,
            overlap_cpu_optimizer_d2h_h2d=False,
        ),
        [chunk],
        use_gloo_process_groups=False,
    )
    return Setup(chunk, optimizer)


@contextmanager
def loaded(folder: Path, device: torch.device) -> Iterator[Setup]:
    """The model with the folder's weights, and an optimizer whose clones still hold the initial ones.

    Raises:
        CommandError: megatron-core is not installed.
    """
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise CommandError("on a GPU the demo needs megatron-core: pip install 'megasetup[megatron]'") from error
    with _one_rank(device):
        setup = _build(device)
        inner = setup.chunk.module.model
        inner.load_state_dict(model.load(folder))
        setup.optimizer.reload_model_params()
        yield setup
