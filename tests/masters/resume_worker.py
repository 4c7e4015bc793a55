"""One process of a resume test: trains ten steps, or five and saves a checkpoint, or loads it and trains five more.

Arguments: "ten", "five" or "five more"; the mode; the sharding type of the optimizer's checkpoint; who writes it:
"this" process, or a "temporary" or "persistent" one of Megatron's; a folder; this rank; the number of ranks. What was
reached is written to the folder as "<what>-<rank>.pt". While another process writes, this one takes another step.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from real_megatron import build, parallel_state_of, train


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


def save(chunk: Any, optimizer: Any, sharding: str, writer: str, checkpoint: Path) -> AsyncCallsQueue | None:
    """The queue with the save that is under way, if another process writes."""
    checkpoint.mkdir(exist_ok=True)
    state = sharded(chunk, optimizer, sharding, is_loading=False)
    if writer == "this":
        dist_checkpointing.save(state, str(checkpoint))
        return None
    queue = AsyncCallsQueue(persistent=writer == "persistent")
    queue.schedule_async_request(
        dist_checkpointing.save(state, str(checkpoint), async_sharded_save=True, async_strategy="mcore")
    )
    return queue


def run(
    what: str, mode: str, sharding: str, writer: str, folder: Path, rank: int, *, has_expert: bool
) -> dict[str, torch.Tensor]:
    # Another initialisation in the process that loads, so that nothing is right by chance.
    torch.manual_seed(7 if what == "five more" else 3)
    chunk, optimizer = build(
        precision_aware=mode == "precision-aware", fraction=0.7, overlap=True, fast=True, has_expert=has_expert
    )
    checkpoint = folder / "checkpoint"
    if what == "five more":
        state = sharded(chunk, optimizer, sharding, is_loading=True)
        loaded = dist_checkpointing.load(state, str(checkpoint))
        chunk.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        train(chunk, optimizer, 5, first=5, seed=rank)
        return reached(chunk, optimizer)
    train(chunk, optimizer, 10 if what == "ten" else 5, seed=rank)
    found = reached(chunk, optimizer)
    if what == "five" and (queue := save(chunk, optimizer, sharding, writer, checkpoint)) is not None:
        train(chunk, optimizer, 1, first=20, seed=rank)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        clones = [clone for part in optimizer.chained_optimizers for clone in part.optimizer.cpu_copys_map_gpu_param]
        found["pinned"] = torch.tensor([clone.is_pinned() for clone in clones])
    return found


def main() -> None:
    what, mode, sharding, writer, folder = sys.argv[1:6]
    rank, ranks = map(int, sys.argv[6:])
    store = dist.FileStore(str(Path(folder) / f"store-{what}"), ranks)
    with parallel_state_of(rank, ranks, store, expert_parallel=ranks):
        found = run(what, mode, sharding, writer, Path(folder), rank, has_expert=ranks > 1)
        torch.save(found, Path(folder) / f"{what}-{rank}.pt")
        dist.barrier()


if __name__ == "__main__":
    main()
