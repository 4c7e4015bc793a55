"""What one data-parallel rank holds of a model, on the CPU.

Megatron's distributed optimizer lays all weights into one flat buffer, each from a 64-element start, pads the end so
that the ranks' shares are equal, and gives each rank one contiguous share; so a rank holds some weights whole, two in
part, and most not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from megasetup.masters import Repair, SyncPlan, WeightCopies, audit_plan

_START_ALIGNMENT = 64  # elements
_END_ALIGNMENT = 128  # elements; the buffer's length is a multiple of this and of the number of ranks


class Piece(NamedTuple):
    """The part of one weight that a rank holds.

    Attributes:
        name: of the weight.
        start: of the weight in the flat buffer, in elements.
        first, last: the part, as a half-open range within the weight.
    """

    name: str
    start: int
    first: int
    last: int


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def pieces(counts: Mapping[str, int], rank: int, ranks: int) -> tuple[list[Piece], int]:
    """Which part of which weight a rank holds.

    Args:
        counts: elements of each weight, in the model's order.
        rank, ranks: the data-parallel rank and how many there are.

    Returns:
        The pieces, and the flat buffer's length in elements.
    """
    starts: dict[str, int] = {}
    end = 0
    # Gradients arrive from the last layer to the first, so the buffer holds the weights in that order.
    for name in reversed(list(counts)):
        starts[name] = _up(end, _START_ALIGNMENT)
        end = starts[name] + counts[name]
    length = _up(end, math.lcm(ranks, _END_ALIGNMENT))
    low, high = length // ranks * rank, length // ranks * (rank + 1)
    found = []
    for name, start in starts.items():
        first, last = max(low - start, 0), min(high - start, counts[name])
        if first < last:
            found.append(Piece(name, start, first, last))
    return found, length


def hold(weights: Mapping[str, torch.Tensor], rank: int, ranks: int) -> list[WeightCopies]:
    """The rank's share of the weights, with copies that hold other values, as a fine-tuning load leaves them.

    Args:
        weights: BF16 tensors by name.
        rank, ranks: the data-parallel rank and how many there are.

    Returns:
        One entry a piece: level 1 is its FP32 shard, level 2 its clone.
    """
    found, length = pieces({name: weight.numel() for name, weight in weights.items()}, rank, ranks)
    flat = torch.zeros(length, dtype=torch.bfloat16)
    held = []
    for piece in found:
        whole = flat[piece.start : piece.start + weights[piece.name].numel()]
        whole.copy_(weights[piece.name].view(-1))
        source = whole[piece.first : piece.last]
        shard = torch.randn(source.shape) * 0.02
        held.append(WeightCopies(piece.name, source, ((1, shard), (2, shard.clone())), offset=piece.first))
    return held


def repair_stale(plan: SyncPlan) -> list[Repair]:
    """Rewrite the stale copies of a plan from their weights, and no others.

    ensure_master_weights does this for an optimizer; here there are only tensors.
    """
    stale = {(copy.name, copy.level) for copy in audit_plan(plan).stale}
    jobs = [
        entry._replace(levels=tuple(pair for pair in entry.levels if (entry.name, pair[0]) in stale))
        for entry in plan.copies
    ]
    jobs = [entry for entry in jobs if entry.levels]
    SyncPlan.from_copies(jobs).run()
    return [Repair(entry.name, level, "model", copy.numel(), "stale") for entry in jobs for level, copy in entry.levels]
