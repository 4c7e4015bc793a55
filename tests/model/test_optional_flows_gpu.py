"""Routing replay and fused log-probabilities from a config to a training step, through the setup, on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from flow import path
from flow_models import make, write_tokenizer
from launch import launch

for _module in ("megatron.core", "transformers"):
    pytest.importorskip(_module)

WORKER = Path(__file__).with_name("optional_flows_worker.py")


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="needs megatron-bridge")
def test_from_a_config_to_a_step(tmp_path: Path) -> None:
    make("moe").bfloat16().save_pretrained(tmp_path / "moe")
    write_tokenizer(tmp_path / "moe")
    environment = {"MEGASETUP_CHECKPOINT_DIR": str(tmp_path / "converted"), "PYTHONPATH": path()}
    (ended,) = launch(WORKER, 1, str(tmp_path), timeout=200, environment=environment)
    assert ended.status == 0, ended.output[-6000:]
    assert "all as told" in ended.output
