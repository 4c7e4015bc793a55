"""The path that trainers use today: one copy_ a tensor, level after level. What the plan is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megasetup.cli.timing import wait_for
from megasetup.masters.layout import Level, WeightCopies


@torch.no_grad()
def refresh(copies: Sequence[WeightCopies], device: torch.device) -> dict[Level, float]:
    """Write every copy with one copy_ each.

    Level 2 reads the FP32 shard of level 1 where there is one; levels 1 and 3 read the weight.

    Args:
        copies: the weights and their copies.
        device: where the weights lie, to wait for.

    Returns:
        Seconds of each level, lowest first.
    """
    pairs: dict[Level, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for entry in copies:
        targets = dict(entry.levels)
        for level, copy in entry.levels:
            origin = targets.get(1, entry.source) if level == 2 else entry.source
            pairs.setdefault(level, []).append((copy.view(-1), origin.view(-1)))
    seconds: dict[Level, float] = {}
    for level in sorted(pairs):
        wait_for(device)
        start = time.perf_counter()
        for target, origin in pairs[level]:
            target.copy_(origin)
        wait_for(device)
        seconds[level] = time.perf_counter() - start
    return seconds
