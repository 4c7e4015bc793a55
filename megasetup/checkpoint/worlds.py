"""The process group that a conversion runs in, and the end of everything that it left in the process.

A conversion needs a process group and Megatron's parallel state, as training does, but of other sizes. Whoever calls
for one must find the process afterwards as it was, or the setup that follows starts from the wrong state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megasetup.compat.bridge import import_bridge


@contextmanager
def lone_world() -> Iterator[None]:
    """A process group of this process alone: gloo, over no port and no variable of a launcher."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def uses_gpu() -> bool:
    """Whether the ranks of the default process group work on GPUs."""
    return torch.cuda.is_available() and "nccl" in dist.get_backend()


@contextmanager
def parallel_state_of(provider: Any) -> Iterator[None]:
    """Megatron's parallel state with a provider's sizes, on the default process group, and no trace of it afterwards.

    On GPUs the generators are seeded as Bridge does it, and put back. The rerun state machine, which saving a
    checkpoint makes, and the tracker of random states are gone afterwards, so that the setup makes its own.

    Raises:
        RuntimeError: the parallel state is already up, or the number of ranks does not fit the sizes.
    """
    core = import_bridge("megatron.core.parallel_state")
    if core.model_parallel_is_initialized():
        raise RuntimeError(
            "a checkpoint is to be converted while Megatron's parallel state is up, and needs sizes of its own: "
            "convert before the model is set up, or call destroy_parallel_state() first"
        )
    devices = [torch.cuda.current_device()] if uses_gpu() else []
    with torch.random.fork_rng(devices=devices):
        try:
            provider.initialize_model_parallel(seed=0 if devices else None)
            yield
        finally:
            core.destroy_model_parallel()
            _forget()


def _forget() -> None:
    rerun = sys.modules.get("megatron.core.rerun_state_machine")
    if rerun is not None:
        rerun.destroy_rerun_state_machine()
    tracker = sys.modules.get("megatron.core.tensor_parallel.random")
    if tracker is not None:
        # Megatron has no call that leaves the tracker unmade, and one that is made keeps its kind for good.
        tracker._CUDA_RNG_STATE_TRACKER = None  # type: ignore[attr-defined]
        tracker._CUDA_RNG_STATE_TRACKER_INITIALIZED = False  # type: ignore[attr-defined]
