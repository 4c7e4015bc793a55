"""One process of a resume test: trains ten steps, or five and saves a checkpoint, or loads it and trains five more.

Arguments: "ten", "five" or "five more"; the mode; the sharding type of the optimizer's checkpoint; a folder; this rank
and the number of ranks. What was reached is written to the folder as "<what>-<rank>.pt".
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from real_megatron import build, parallel_state_of, train


def reached(chunk: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """All weights, masters, moments and step counts of this rank, on the host."""
    found = {f"weight {name}": parameter for name, parameter in chunk.named_parameters()}
    for part_index, part in enumerate(optimizer.chained_optimizers):
        hybrid = part.optimizer
        for group_index, group in enumerate(hybrid.param_groups):
            for index, param in enumerate(group["params"]):
                place = f"{part_index}.{group_index}.{index}"
                found[f"param {place}"] = param
                found[f"master {place}"] = hybrid.param_to_inner_param[param]
                for key, value in hybrid.state[param].items():
                    found[f"{key} {place}"] = torch.as_tensor(value)
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def sharded(chunk: Any, optimizer: Any, sharding: str, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
    model = chunk.sharded_state_dict(metadata=dict(metadata))
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
    }


def run(what: str, mode: str, sharding: str, folder: Path, rank: int, *, has_expert: bool) -> dict[str, torch.Tensor]:
    # Another initialisation in the process that loads, so that nothing is right by chance.
    torch.manual_seed(7 if what == "five more" else 3)
    chunk, optimizer = build(
        precision_aware=mode == "precision-aware", fraction=0.7, overlap=True, fast=True, has_expert=has_expert
    )
    checkpoint = folder / "checkpoint"
    if what == "five more":
        state = sharded(chunk, optimizer, sharding, is_loading=True)
        loaded = dist_checkpointing.load(state, str(checkpoint))
        chunk.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        train(chunk, optimizer, 5, first=5, seed=rank)
        return reached(chunk, optimizer)
    train(chunk, optimizer, 10 if what == "ten" else 5, seed=rank)
    if what == "five":
        checkpoint.mkdir(exist_ok=True)
        dist_checkpointing.save(sharded(chunk, optimizer, sharding, is_loading=False), str(checkpoint))
    return reached(chunk, optimizer)


def main() -> None:
    what, mode, sharding, folder = sys.argv[1:5]
    rank, ranks = map(int, sys.argv[5:])
    store = dist.FileStore(str(Path(folder) / f"store-{what}"), ranks)
    with parallel_state_of(rank, ranks, store, expert_parallel=ranks):
        found = run(what, mode, sharding, Path(folder), rank, has_expert=ranks > 1)
        torch.save(found, Path(folder) / f"{what}-{rank}.pt")
        dist.barrier()


if __name__ == "__main__":
    main()
