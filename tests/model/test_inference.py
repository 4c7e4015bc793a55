"""An inference model in another layout than training's, on the CPU: a reshard gives it the same logits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from flow import path
from flow_models import make, write_tokenizer
from launch import launch

for _module in ("megatron.core", "modelopt", "transformers"):
    pytest.importorskip(_module)

WORKER = Path(__file__).with_name("inference_worker.py")
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="needs megatron-bridge"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs test_setup_two_gpus.py does it"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("inference")
    make("dense").bfloat16().save_pretrained(found / "dense")
    write_tokenizer(found / "dense")
    return found


@pytest.mark.parametrize(("training", "inference"), [(2, 1), (1, 2)])
def test_tensor_parallel_to_data_parallel_and_back(folder: Path, training: int, inference: int) -> None:
    environment = {
        "MEGASETUP_CHECKPOINT_DIR": str(folder / "converted"),
        "PYTHONPATH": path(),
        "FLOW_PARALLEL": json.dumps({"tensor_model_parallel_size": training}),
        "FLOW_INFERENCE": json.dumps({"tensor_model_parallel_size": inference}),
    }
    for rank, ended in enumerate(launch(WORKER, 2, str(folder), timeout=300, environment=environment)):
        assert ended.status == 0, f"rank {rank}:\n{ended.output[-6000:]}"
        assert "as told" in ended.output
