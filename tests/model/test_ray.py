"""Inside Ray actors, off the main thread and without a GPU: import, config, reference model and the engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flow import path
from flow_models import make, write_tokenizer
from launch import bare_environment

pytest.importorskip("megatron.core")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)
if importlib.util.find_spec("ray") is None:
    pytest.skip("needs ray (requirements/ray.txt; `make test` installs it)", allow_module_level=True)


@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo is for machines without a GPU")
def test_two_actors_set_up_off_the_main_thread(tmp_path: Path) -> None:
    model = tmp_path / "dense"
    make("dense").bfloat16().save_pretrained(model)
    write_tokenizer(model)
    environment = bare_environment() | {
        "PYTHONPATH": path(),
        "OMP_NUM_THREADS": "1",
        # Nothing of Ray's outside the test's folder, and nothing sent anywhere.
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(Path(__file__).with_name("ray_worker.py")), str(model), str(tmp_path / "converted")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = json.loads(line.removeprefix("RESULT "))

    from safetensors.torch import load_file

    expected = load_file(model / "model.safetensors")
    for rank, result in enumerate(results):
        assert result["main_thread"] is False
        assert result["rank"] == rank
        assert result["existed"] is False
        assert result["dtype"] == "torch.bfloat16"
        assert result["handled"]
        # Each holds its half of what Hugging Face saved.
        half = expected["model.embed_tokens.weight"].chunk(2)[rank].double().abs().sum().item()
        assert result["sums"]["embedding.word_embeddings.weight"] == half
        engine = result["engine"]
        assert engine["copies"] == len(result["sums"]) > 10
        assert engine["stale"] == 2 * engine["copies"]
        assert engine["states"] == ["exact"]
        assert engine["equal"]
        assert engine["named"] == [[engine["broken"], 2, 3]]
