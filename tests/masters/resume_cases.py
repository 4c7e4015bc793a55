"""What the processes of the resume tests do: a first one trains and saves a checkpoint, a new one loads it and goes on.

One process does all cases, one after another, because the imports take longer than all of them. For each case the first
writes what ten steps lead to, in one go, and what five lead to, a checkpoint and five more; while another process
writes the checkpoint it trains on. The second writes what it comes to. A case that fails leaves its traceback.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from real_megatron import build, parallel_state_of, train


class Case(NamedTuple):
    """One resume.

    Attributes:
        mode: "standard" or "precision-aware".
        sharding: how the optimizer's part of the checkpoint is laid out. (Megatron 0.19 has a fourth way,
            fully_sharded_model_space, and refuses it itself: "flattened_range is not supported".)
        writer: who writes: "this" process, or a "temporary" or "persistent" one of Megatron's.
    """

    mode: str
    sharding: str
    writer: str = "this"

    @property
    def name(self) -> str:
        return "-".join(self)


SHARDINGS = ("fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter")
SYNCHRONOUS = [Case(mode, sharding) for sharding in SHARDINGS for mode in ("standard", "precision-aware")]
ASYNCHRONOUS = [
    Case("precision-aware", "fully_reshardable", "temporary"),
    Case("standard", "dp_reshardable", "persistent"),
]
OF_TWO_RANKS = [case for case in SYNCHRONOUS if case.sharding != "dp_zero_gather_scatter"]


def reached(chunk: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """All weights, masters, moments and step counts of this rank, on the host."""
    found = {f"weight {name}": parameter for name, parameter in chunk.named_parameters()}
    for part_index, part in enumerate(optimizer.chained_optimizers):
        hybrid = part.optimizer
        # Transformer Engine's optimizer counts in the group; a load adds a count to the state, which it does not read.
        on_gpu = hybrid.gpu_optimizer.param_groups if hybrid.gpu_optimizer is not None else []
        steps = {param: group["step"] for group in on_gpu if "step" in group for param in group["params"]}
        for group_index, group in enumerate(hybrid.param_groups):
            for index, param in enumerate(group["params"]):
                place = f"{part_index}.{group_index}.{index}"
                found[f"param {place}"] = param
                found[f"master {place}"] = hybrid.param_to_inner_param[param]
                for key, value in hybrid.state[param].items():
                    found[f"{key} {place}"] = torch.as_tensor(value)
                if (inner := hybrid.param_to_inner_param[param]) in steps:
                    found[f"step {place}"] = torch.as_tensor(steps[inner])
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def sharded(chunk: Any, optimizer: Any, sharding: str, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
    model = chunk.module.sharded_state_dict(metadata=dict(metadata))
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
    }


def save(chunk: Any, optimizer: Any, case: Case, checkpoint: Path) -> AsyncCallsQueue | None:
    """The queue with the save that is under way, if another process writes."""
    checkpoint.mkdir(exist_ok=True)  # every rank does
    state = sharded(chunk, optimizer, case.sharding, is_loading=False)
    if case.writer == "this":
        dist_checkpointing.save(state, str(checkpoint))
        return None
    queue = AsyncCallsQueue(persistent=case.writer == "persistent")
    queue.schedule_async_request(
        dist_checkpointing.save(state, str(checkpoint), async_sharded_save=True, async_strategy="mcore")
    )
    return queue


def made(case: Case, *, seed: int, has_expert: bool) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    return build(
        precision_aware=case.mode == "precision-aware",
        fraction=0.7,
        overlap=True,
        fast=True,
        has_expert=has_expert,
        with_gloo=True,
    )


def train_and_save(case: Case, folder: Path, rank: int, *, has_expert: bool) -> None:
    pair = made(case, seed=3, has_expert=has_expert)
    train(*pair, 10, seed=rank)
    torch.save(reached(*pair), folder / f"uninterrupted-{rank}.pt")
    chunk, optimizer = made(case, seed=3, has_expert=has_expert)
    train(chunk, optimizer, 5, seed=rank)
    queue = save(chunk, optimizer, case, folder / "checkpoint")
    train(chunk, optimizer, 5, first=5, seed=rank)
    if queue is not None:
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
    found = reached(chunk, optimizer)
    clones = [clone for part in optimizer.chained_optimizers for clone in part.optimizer.cpu_copys_map_gpu_param]
    found["pinned"] = torch.tensor([clone.is_pinned() for clone in clones])
    torch.save(found, folder / f"saved-{rank}.pt")


def load_and_train(case: Case, folder: Path, rank: int, *, has_expert: bool) -> None:
    # Another initialisation, so that nothing is right by chance.
    chunk, optimizer = made(case, seed=7, has_expert=has_expert)
    state = sharded(chunk, optimizer, case.sharding, is_loading=True)
    loaded = dist_checkpointing.load(state, str(folder / "checkpoint"))
    chunk.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train(chunk, optimizer, 5, first=5, seed=rank)
    torch.save(reached(chunk, optimizer), folder / f"resumed-{rank}.pt")


def main() -> None:
    """Arguments: "first" or "second", a folder, this rank, the number of ranks."""
    which, folder = sys.argv[1], Path(sys.argv[2])
    rank, ranks = map(int, sys.argv[3:])
    cases = SYNCHRONOUS + ASYNCHRONOUS if ranks == 1 else OF_TWO_RANKS
    work = train_and_save if which == "first" else load_and_train
    store = dist.FileStore(str(folder / f"store-{which}"), ranks)
    with parallel_state_of(rank, ranks, store, expert_parallel=ranks, with_gloo=True):
        for case in cases:
            place = folder / case.name
            place.mkdir(exist_ok=True)
            print(which, case.name, flush=True)
            try:
                work(case, place, rank, has_expert=ranks > 1)
            except Exception:
                (place / f"problem-{which}-{rank}.txt").write_text(traceback.format_exc())
                if ranks > 1:  # the others may wait for this one
                    raise
        dist.barrier()
