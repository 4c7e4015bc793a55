"""One rank of test_two_gpus.py: python two_gpus_worker.py RANK STORE precision_aware|standard."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import itertools

import torch
import torch.distributed as dist
from real_megatron import build, parallel_state_of, train
from standins import assert_exact, bits, copies_of, load_new_weights

from megasetup.masters import audit_master_weights, ensure_master_weights, plan_sync

WORLD = 2


def check(rank: int, *, precision_aware: bool) -> None:
    chunk, optimizer = build(precision_aware=precision_aware, fraction=1.0)
    (part,) = optimizer.chained_optimizers
    load_new_weights(chunk, seed=7)  # the same full weights on both ranks
    assert not audit_master_weights(optimizer, chunk).ok

    plan = plan_sync(optimizer, chunk)
    dist.barrier()  # so that both ranks load the host's memory at once
    report = plan.run()
    assert_exact(part)
    assert audit_master_weights(optimizer, chunk).ok

    # The ranks' shards are distinct, and together they are the whole model.
    own = {entry.name: (entry.offset, entry.offset + entry.source.numel()) for entry in plan.copies}
    assert report.elements == sum(end - start for start, end in own.values())
    every: list[dict[str, tuple[int, int]]] = [{} for _ in range(WORLD)]
    dist.all_gather_object(every, own)
    for name, parameter in chunk.named_parameters():
        spans = sorted(shards[name] for shards in every if name in shards)
        assert spans[0][0] == 0, (name, spans)
        assert spans[-1][1] == parameter.numel(), (name, spans)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(spans)), (name, spans)
    assert every[0] != every[1]

    # Training goes on from there: both ranks agree, and no master needs a repair.
    train(chunk, optimizer, 2, seed=rank)
    for parameter in chunk.parameters():
        other = parameter.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, parameter.detach())
    before = bits(*copies_of(part))
    assert ensure_master_weights(optimizer, chunk).repairs == ()
    assert bits(*copies_of(part)) == before


def main() -> None:
    rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with parallel_state_of(rank, WORLD, dist.FileStore(store, WORLD)):
        check(rank, precision_aware=mode == "precision_aware")
    print(f"rank {rank}: ok")


if __name__ == "__main__":
    main()
