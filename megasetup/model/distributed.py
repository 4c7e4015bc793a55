"""The process group and Megatron's parallel state: made once, unmade as often as anyone likes.

A conversion from Hugging Face, a test or an earlier setup in the same process may have left a process group, Megatron's
parallel state and asynchronous saves behind. A setup starts from none of them: what is left is taken down first,
whatever state it is in, and nothing that goes wrong while taking it down may keep the new one from starting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from megasetup.config.environment import configure_refit_environment, configure_rendezvous_environment

_logger = logging.getLogger("megasetup")

_MEETING = timedelta(minutes=10)  # torch's own timeout for ranks that are still starting
_BARRIER = timedelta(seconds=60)  # a rank that has died never comes, and the others go on without it


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an exception of the body and go on."""
    try:
        yield
    except Exception as error:
        _logger.warning("%s failed and was left: %s: %s", what, type(error).__name__, error)


def destroy_parallel_state(state: Any = None) -> None:
    """Take down the process group, Megatron's parallel state and the queue of asynchronous saves.

    Safe whether or not anything was initialised, and twice in a row. Saves that are still being written are finished
    first, while there is a process group to finish them with. Failures are logged, never raised.

    Args:
        state: the GlobalState of an earlier setup, if there is one: its queue of asynchronous saves is closed and
            replaced by a fresh one, so that all ranks start from the same call index. Megatron's own queue, which is
            module-level, is dealt with in any case.
    """
    _renew_async_queues(state)
    if dist.is_initialized():
        with _logged("the barrier before taking down the process group"):
            dist.barrier(async_op=True).wait(_BARRIER)
        with _logged("taking down the process group"):
            dist.destroy_process_group()
    parallel_state = sys.modules.get("megatron.core.parallel_state")  # (never imported: nothing to take down)
    if parallel_state is not None:
        with _logged("taking down Megatron's parallel state"):
            parallel_state.destroy_model_parallel()


def _renew_async_queues(state: Any) -> None:
    # Megatron's own training loop keeps its queue in a module, Megatron-Bridge in its GlobalState.
    for holder in (sys.modules.get("megatron.training.async_utils"), state):
        queue = getattr(holder, "_async_calls_queue", None)
        if queue is None:
            continue
        with _logged("replacing the queue of asynchronous saves"):
            holder._async_calls_queue = type(queue)(persistent=getattr(queue, "persistent", False))  # type: ignore[union-attr]
        unfinished = queue.get_num_unfinalized_calls()
        if unfinished:
            warnings.warn(
                f"{unfinished} asynchronous checkpoint saves were unfinished when the parallel state was taken down: "
                "wait for them at the end of training (maybe_finalize_async_save(blocking=True))",
                stacklevel=3,
            )
        try:
            # Finishing a save is collective work.
            queue.close(abort=bool(unfinished) and not dist.is_initialized())
        except Exception as error:
            _logger.warning("asynchronous saves were given up: %s: %s", type(error).__name__, error)
            with _logged("ending the writer of asynchronous saves"):
                queue.close(abort=True)


def setup_distributed(config: Mapping[str, Any]) -> None:
    """Make the default process group: NCCL, or gloo with a warning where there is no GPU.

    Whatever was there before is taken down. Ranks and the address to meet at come from the launcher: torchrun's or
    Ray's variables, or Slurm's; a process that nothing launched becomes a world of its own. On a GPU machine the
    process uses the GPU of its local rank, or the only one that it sees.

    Args:
        config: the policy config; `generation` decides about NCCL's allocator (configure_refit_environment).

    Raises:
        KeyError: generation does not say whether it is colocated.
        RuntimeError: the launcher's variables are incomplete, or the ranks did not meet.
    """
    configure_refit_environment(config)
    from torch._inductor import config as inductor_config

    # Inductor reads this cache back at start-up, and one that another version wrote can crash it.
    inductor_config.autotune_local_cache = False
    destroy_parallel_state()
    configure_rendezvous_environment()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        _init_process_group("nccl")
        return
    warnings.warn(
        "no GPU is visible to this process, so its process group is gloo: enough for conversion and tests, not for "
        "training. If there should be one, look at CUDA_VISIBLE_DEVICES and `megasetup doctor`",
        stacklevel=2,
    )
    _init_process_group("gloo")


def _init_process_group(backend: str) -> None:
    """Make the default process group at the launcher's address, also when there was one before at the same address.

    A store that outlives a process group, as torchrun's does, still holds its keys, and NCCL would take an old one for
    a new one. A store that ends with its group, as rank 0's own does, may still answer others for a moment. So each
    group has a number in the store, and a rank goes on when it has met all others under that number.
    """
    deadline = time.monotonic() + _MEETING.total_seconds()
    while True:
        try:
            store, rank, world = next(rendezvous("env://", timeout=_MEETING))
            turn = store.add(f"megasetup/turn/{rank}", 1)
            store = distributed_c10d.PrefixStore(f"megasetup/{turn}", store)
            store.set(f"here/{rank}", "1")
            store.wait([f"here/{other}" for other in range(world)], _MEETING)
            break
        except dist.DistNetworkError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
