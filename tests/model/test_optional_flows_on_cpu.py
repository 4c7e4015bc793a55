"""What the GPU tests of drafts, routing replay and fused log-probabilities do, without a GPU: setup, steps, resume."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flow import path
from flow_models import make, write_tokenizer
from launch import launch

for _module in ("megatron.core", "modelopt", "transformers"):
    pytest.importorskip(_module)

WORKER = Path(__file__).with_name("gpu_worker_on_cpu.py")
LOCAL = {"transformer_impl": "local", "fraction": None}
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="needs megatron-bridge"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="on GPUs test_draft_gpu.py and test_optional_flows_gpu.py do it"
    ),
]


def check(folder: Path, worker: str, world: int, **sizes: Any) -> None:
    environment = {
        "MEGASETUP_CHECKPOINT_DIR": str(folder / "converted"),
        "PYTHONPATH": path(),
        "FLOW_PARALLEL": json.dumps(LOCAL | sizes),
    }
    for rank, ended in enumerate(launch(WORKER, world, worker, str(folder), timeout=350, environment=environment)):
        assert ended.status == 0, f"rank {rank}:\n{ended.output[-6000:]}"
        assert "all as told" in ended.output


def test_a_draft_is_trained_saved_and_resumed(tmp_path: Path) -> None:
    from draft_gpu_model import write_models

    write_models(tmp_path)
    check(tmp_path, "draft_gpu_worker", 2, tensor_model_parallel_size=2, sequence_parallel=True)


def test_replayed_routes_and_fused_log_probabilities_from_a_config_to_a_step(tmp_path: Path) -> None:
    make("moe").bfloat16().save_pretrained(tmp_path / "moe")
    write_tokenizer(tmp_path / "moe")
    check(tmp_path, "optional_flows_worker", 1)
