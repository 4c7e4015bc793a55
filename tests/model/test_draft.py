"""Drafts on the CPU: weights in and out, cut over tensor-parallel ranks, logits, what is captured, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch

pytest.importorskip("megatron.core")
pytest.importorskip("modelopt")

WORKER = Path(__file__).with_name("draft_worker.py")
CASES = [
    "exported_as_loaded",
    "other_names",
    "logits_of_eagle_3",
    "what_is_captured",
    "head_from_the_policy",
    "shapes_that_do_not_fit",
    "values_that_do_not_fit",
    "states_in_fp32",
    "attached_once",
    "saved",
    "resumed",
]


def run(folder: Path, world: int, cases: list[str]) -> None:
    for rank, ended in enumerate(launch(WORKER, world, str(folder), *cases, timeout=240)):
        assert ended.status == 0, f"rank {rank}:\n{ended.output[-6000:]}"
        for name in cases:
            assert f"{name} as told" in ended.output


def test_on_one_rank(tmp_path: Path) -> None:
    run(tmp_path, 1, [*CASES, "nothing_to_preload"])


def test_on_two_tensor_parallel_ranks_and_back_on_one(tmp_path: Path) -> None:
    run(tmp_path, 2, CASES)
    run(tmp_path, 1, ["resumed"])
