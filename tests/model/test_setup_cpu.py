"""The flow as far as it goes without a GPU: import, config, reference model and finalisation on real gloo ranks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flow import path
from flow_models import make, write_tokenizer
from launch import Ended, launch

for _module in ("megatron.core", "transformers"):
    pytest.importorskip(_module)
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)

WORKER = Path(__file__).with_name("flow_cpu_worker.py")
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_setup_gpu.py runs the whole flow"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "dense"
    make("dense").bfloat16().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def hugging_face(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def result_of(ended: Ended) -> dict[str, Any]:
    assert ended.status == 0, ended.output
    (line,) = [line for line in ended.output.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def run(model: Path, tmp_path: Path, world: int) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    environment = {"MEGASETUP_CHECKPOINT_DIR": str(tmp_path / "converted"), "PYTHONPATH": path()}
    ended = launch(WORKER, world, str(model), str(tmp_path), timeout=300, environment=environment)
    results = [result_of(one) for one in ended]
    return results, [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]


def check(result: dict[str, Any]) -> None:
    assert result["existed"] is False
    assert result["optional"] == []
    assert result["vocabulary"] == 2048
    assert result["padded"] == 2048
    assert result["bridge"] == "AutoBridge"
    assert result["disable"] is False
    assert result["dp_size"] == 1
    error, *notes = result["draft"]
    assert "policy.draft.enabled is True: must be false" in error
    assert any("in stage 'config'" in note for note in [error, *notes])
    error, *notes = result["no_gpu"]
    assert "training needs a GPU" in error
    assert any("in stage 'config'" in note for note in [error, *notes])
    assert "tensor_model_parallel_size" in result["other_sizes"]
    assert "wanted 4" in result["other_sizes"]


def test_one_rank(model: Path, tmp_path: Path) -> None:
    (result,), (found,) = run(model, tmp_path, 1)
    check(result)
    expected = hugging_face(model)
    assert torch.equal(found["embedding.word_embeddings.weight"], expected["model.embed_tokens.weight"])
    assert torch.equal(found["output_layer.weight"], expected["lm_head.weight"])
    assert torch.equal(
        found["decoder.layers.1.mlp.linear_fc1.weight"],
        torch.cat([expected[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]),
    )
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert sum(value.numel() for value in found.values()) == sum(value.numel() for value in expected.values())


def test_two_tensor_parallel_ranks(model: Path, tmp_path: Path) -> None:
    results, found = run(model, tmp_path, 2)
    for result in results:
        check(result)
    expected = hugging_face(model)
    for name, whole, dimension in [
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight", 0),
        ("output_layer.weight", "lm_head.weight", 0),
        ("decoder.layers.0.mlp.linear_fc2.weight", "model.layers.0.mlp.down_proj.weight", 1),
    ]:
        parts = [shard[name] for shard in found]
        assert torch.equal(torch.cat(parts, dimension), expected[whole])
