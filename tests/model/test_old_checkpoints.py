"""Checkpoints that another version of Megatron-Bridge saved, or that hold the model alone, when they are loaded.

Resumes of optimizer state, from a checkpoint of another offload fraction and from one of the model alone, need CUDA:
test_setup_gpu.py has them.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flow import path
from flow_models import make, write_tokenizer
from launch import bare_environment

for _module in ("megatron.core", "transformers"):
    pytest.importorskip(_module)
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)

WORKER = Path(__file__).with_name("old_checkpoint_worker.py")
NORM = "decoder.final_layernorm.weight"
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.is_available(), reason="gloo is for machines without a GPU"),
]


def run_config(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = checkpoint / "iter_0000000" / "run_config.yaml"
    found = yaml.safe_load(file.read_text())
    change(found)
    file.write_text(yaml.safe_dump(found))


def rename_a_tensor(checkpoint: Path) -> None:
    """The final norm under another name, as before a version that renamed it."""
    file = checkpoint / "iter_0000000" / ".metadata"
    index = pickle.loads(file.read_bytes())
    other = NORM.replace("layernorm", "norm")
    index.state_dict_metadata[other] = index.state_dict_metadata.pop(NORM)
    for held in [one for one in index.storage_data if one.fqn == NORM]:
        index.storage_data[type(held)(other, held.offset, held.index)] = index.storage_data.pop(held)
    file.write_bytes(pickle.dumps(index))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], str, Path]:
    """What came of each checkpoint, everything that was printed, and the Hugging Face folder."""
    folder = tmp_path_factory.mktemp("old")
    model = folder / "hf"
    make("dense").bfloat16().save_pretrained(model)
    write_tokenizer(model)
    from megasetup.checkpoint.importing import import_model_from_hf

    import_model_from_hf(str(model), folder / "plain")
    for name in ("field", "tensor", "whole"):
        shutil.copytree(folder / "plain", folder / name)
        (folder / name / "megasetup_import.json").unlink()  # (it lists sizes, and Bridge's own checkpoints have none)
    run_config(folder / "field", lambda config: config["model"].update(a_field_of_another_bridge=7))
    run_config(folder / "whole", lambda config: config["checkpoint"].update(save_optim=True))
    rename_a_tensor(folder / "tensor")
    names = ("plain", "field", "whole", "tensor")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(model), *(str(folder / name) for name in names)],
        env=bare_environment() | {"PYTHONPATH": path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(zip(names, map(json.loads, lines), strict=True)), done.stdout, model


Results = tuple[dict[str, dict[str, Any]], str, Path]


def test_a_provider_field_that_this_bridge_does_not_have_is_named_and_dropped(results: Results) -> None:
    found, said, model = results
    assert "a_field_of_another_bridge" in said
    assert found["field"]["sums"] == found["plain"]["sums"]
    from safetensors.torch import load_file

    expected = load_file(model / "model.safetensors")
    assert found["plain"]["sums"][NORM] == expected["model.norm.weight"].double().abs().sum().item()
    down = expected["model.layers.1.mlp.down_proj.weight"].double().abs().sum().item()
    assert found["plain"]["sums"]["decoder.layers.1.mlp.linear_fc2.weight"] == down


def test_a_tensor_under_another_name_ends_the_load_and_says_what_to_do(results: Results) -> None:
    failed = results[0]["tensor"]
    notes = "\n".join(failed["notes"])
    assert failed["error"].startswith("RuntimeError: the checkpoint could not be read: rank 0: KeyError: ")
    assert f"{NORM} from model not in state dict" in failed["error"]
    assert "in stage 'load'" in notes
    assert "a checkpoint of an older Megatron-Bridge must be converted anew" in notes


def test_a_checkpoint_of_the_model_alone_is_known_by_its_config(results: Results) -> None:
    found = results[0]
    assert found["plain"]["saved_optimizer"] is False
    assert found["whole"]["saved_optimizer"] is True
    assert found["plain"]["restored"] is False
    assert found["plain"]["weights"].startswith("pretrained, ")
