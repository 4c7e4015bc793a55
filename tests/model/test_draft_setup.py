"""Drafts through the setup on the CPU, with LoRA and without: loaded, saved, resumed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flow import path
from launch import launch

for _module in ("megatron.core", "modelopt", "transformers"):
    pytest.importorskip(_module)

WORKER = Path(__file__).with_name("draft_setup_worker.py")
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="needs megatron-bridge"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_draft_gpu.py does it with the real layers"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from draft_gpu_model import write_models

    folder = tmp_path_factory.mktemp("draft")
    write_models(folder)
    return folder


@pytest.mark.parametrize(
    ("world", "sizes", "kinds"),
    [(1, {}, ["adapters"]), (2, {"pipeline_model_parallel_size": 2}, ["whole", "adapters"])],
    ids=["one rank", "pipeline"],
)
def test_saved_and_resumed(models: Path, tmp_path: Path, world: int, sizes: dict[str, Any], kinds: list[str]) -> None:
    for name in ("dense", "draft"):
        (tmp_path / name).symlink_to(models / name)
    environment = {
        "MEGASETUP_CHECKPOINT_DIR": str(tmp_path / "converted"),
        "PYTHONPATH": path(),
        "FLOW_PARALLEL": json.dumps(sizes),
    }
    for rank, ended in enumerate(launch(WORKER, world, str(tmp_path), *kinds, timeout=300, environment=environment)):
        assert ended.status == 0, f"rank {rank}:\n{ended.output[-6000:]}"
        for kind in kinds:
            assert f"{kind} as told" in ended.output
