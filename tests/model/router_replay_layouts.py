"""Runs the worker that replays routes in several layouts, on the CPU or on GPUs, and checks what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch import launch

WORKER = Path(__file__).with_name("router_replay_worker.py")
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SEQUENCE_EXPERT = SEQUENCE | EXPERT | {"expert_tensor_parallel_size": 1}


def check_layouts(world: int, device: str, layouts: list[dict[str, Any]]) -> None:
    """Every router follows its routes: forward, in each kind of recompute, and in every layout."""
    for rank, ended in enumerate(launch(WORKER, world, device, json.dumps(layouts), timeout=200)):
        assert ended.status == 0, ended.output
        for layout in layouts:
            local = [1, 2, 3]
            if "pipeline_model_parallel_size" in layout:
                local = [[1], [2, 3]][rank]
            for recompute in ("none", "full", "moe"):
                assert f"rank {rank}: {json.dumps(layout)} {recompute} layers {local}" in ended.output
