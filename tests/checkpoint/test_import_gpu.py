"""Import on GPUs with Transformer Engine, and what the CPU made loaded there: every tensor bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_models import KINDS, assert_same_bits, make
from launch import Ended, bare_environment, launch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from megasetup.checkpoint.marks import what_is_missing
from megasetup.compat.transformer_engine import ensure_importable, is_installed

_HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed(), reason="Transformer Engine is not installed"),
]


def _run(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *([str(_HERE / script)] if script.endswith(".py") else ["-c", script]), *map(str, arguments)],
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _facts(ended: Ended) -> list[dict[str, Any]]:
    assert ended.status == 0, ended.output
    return [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]


_ALONE = """
import sys, torch
from megasetup.checkpoint.importing import import_model_from_hf
assert import_model_from_hf(sys.argv[1], sys.argv[2]) is True
print("CUDA", torch.cuda.max_memory_allocated(), torch.cuda.is_initialized())
"""
_EXPORT = """
import sys, torch
from megasetup.checkpoint.exporting import export_model_to_hf
export_model_to_hf(sys.argv[1], sys.argv[2])
print("CUDA", torch.cuda.max_memory_allocated(), torch.cuda.is_initialized())
"""


def test_an_installed_transformer_engine_is_used() -> None:
    assert ensure_importable() is False


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_process_alone_made_loads_into_transformer_engines_layers(kind: str, tmp_path: Path) -> None:
    """The process converts on the CPU, with Megatron's local layers, and puts nothing on the GPU."""
    model = make(kind, tmp_path / "hf")
    assert "CUDA 0 " in _run(_ALONE, model, tmp_path / "megatron")
    said = _run("load_worker.py", tmp_path / "megatron", model, tmp_path / "on-gpu")
    assert "TELayerNormColumnParallelLinear" in said
    assert "DEVICE {'cuda:0'}" in said
    assert_same_bits(model, tmp_path / "on-gpu")
    assert "CUDA 0 " in _run(_EXPORT, tmp_path / "megatron", tmp_path / "back")
    assert_same_bits(model, tmp_path / "back")


def test_one_gpu_converts_with_transformer_engines_layers(tmp_path: Path) -> None:
    for kind in KINDS:
        make(kind, tmp_path / kind / "hf")
    (ended,) = launch(_HERE / "ranks_worker.py", 1, "together", ";".join(f"{k}:" for k in KINDS), str(tmp_path))
    facts = _facts(ended)
    assert [one["case"] for one in facts] == [f"{kind}:" for kind in KINDS]
    assert not any(one["up"] for one in facts)
    for kind in KINDS:
        checkpoint = tmp_path / kind / "megatron-"
        assert what_is_missing(checkpoint) is None
        _run(_EXPORT, checkpoint, tmp_path / kind / "back")
        assert_same_bits(tmp_path / kind / "hf", tmp_path / kind / "back")


@pytest.mark.multigpu
def test_two_gpus_convert_their_shares_together(tmp_path: Path) -> None:
    sizes = {
        "dense": "tensor_model_parallel_size=2",
        "tied": "pipeline_model_parallel_size=2",
        "moe": "expert_model_parallel_size=2",
    }
    for kind in sizes:
        make(kind, tmp_path / kind / "hf")
    cases = ";".join(f"{kind}:{size}" for kind, size in sizes.items())
    first, second = map(_facts, launch(_HERE / "ranks_worker.py", 2, "together", cases, str(tmp_path), timeout=300))
    assert len(first) == len(second) == 3
    for kind, size in sizes.items():
        checkpoint = tmp_path / kind / f"megatron-{size}"
        assert f"\n  {size.split('=')[0]}: 1\n" in (checkpoint / "iter_0000000" / "run_config.yaml").read_text()
        _run(_EXPORT, checkpoint, tmp_path / kind / "back")
        assert_same_bits(tmp_path / kind / "hf", tmp_path / kind / "back")
        _run("load_worker.py", checkpoint, tmp_path / kind / "hf", tmp_path / kind / "on-gpu")
        assert_same_bits(tmp_path / kind / "hf", tmp_path / kind / "on-gpu")
