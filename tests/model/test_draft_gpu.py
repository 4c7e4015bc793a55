"""A draft beside its policy on GPUs: set up, fed by what is captured, trained with it, saved and resumed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from flow import path
from launch import launch

for _module in ("megatron.core", "modelopt", "transformers"):
    pytest.importorskip(_module)

WORKER = Path(__file__).with_name("draft_gpu_worker.py")
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}

pytestmark = [
    pytest.mark.timeout(400),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
        for name in ("megatron.bridge", "transformer_engine")
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from draft_gpu_model import write_models

    write_models(tmp_path)
    return tmp_path


def check(folder: Path, world: int, layout: dict[str, Any]) -> None:
    environment = {
        "MEGASETUP_CHECKPOINT_DIR": str(folder / "converted"),
        "PYTHONPATH": path(),
        "FLOW_PARALLEL": json.dumps(layout),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    for rank, ended in enumerate(launch(WORKER, world, str(folder), timeout=240, environment=environment)):
        assert ended.status == 0, f"rank {rank}:\n{ended.output[-8000:]}"
        assert "all as told" in ended.output


@pytest.mark.gpu
def test_one_gpu(folder: Path) -> None:
    check(folder, 1, {})


@pytest.mark.multigpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus(folder: Path, layout: str) -> None:
    check(folder, 2, LAYOUTS[layout])
