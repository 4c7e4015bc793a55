"""`megasetup bench expert-bias`: FP32 expert bias for every router, one cast each and all in one launch.

The buffers are tiny, so what is timed is launches and Python: host time to the end of a final synchronize, with both
ways taking turns on the same buffers.
"""

from __future__ import annotations

from typing import Any

import torch

from megasetup.cli.timing import seconds_of, summary
from megasetup.moe import recast_buffers


def _one_each(buffers: list[torch.Tensor]) -> None:
    for buffer in buffers:
        buffer.data = buffer.data.to(torch.float32)


def measure(routers: int, experts: int, repeat: int, device: torch.device) -> dict[str, Any]:
    """Time both ways; plain data.

    Args:
        routers: buffers to recast, each of `experts` BF16 elements.
        repeat: timed runs of each way, after a few that warm up.
        device: a GPU or the CPU.
    """
    originals = [torch.randn(experts, device=device).bfloat16() for _ in range(routers)]
    expected = [original.float() for original in originals]
    buffers = [original.clone() for original in originals]
    ways = {"one_to_each": _one_each, "recast_buffers": recast_buffers}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    verified = True
    warm_up = max(3, repeat // 10)
    for turn in range(warm_up + repeat):
        for name, way in ways.items():
            for buffer, original in zip(buffers, originals, strict=True):
                buffer.data = original
            taken, _ = seconds_of(lambda way=way: way(buffers), device)  # type: ignore[misc]
            if turn >= warm_up:
                seconds[name].append(taken)
            if turn == warm_up + repeat - 1:
                verified &= all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))
    results: dict[str, Any] = {name: summary(taken, routers * experts) for name, taken in seconds.items()}
    return {
        "routers": routers,
        "experts": experts,
        "device": str(device),
        **results,
        "times_faster": results["one_to_each"]["median_seconds"] / results["recast_buffers"]["median_seconds"],
        "verified": verified,
    }
