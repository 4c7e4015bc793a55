"""The whole flow without a GPU and without Transformer Engine: import, set up, train, save, resume.

Megatron and Bridge are real and so is the training; the CPU stands in for the GPU (cpu_as_gpu.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from flow import path, result_of
from flow_models import make, write_tokenizer
from launch import launch

from megasetup.compat.transformer_engine import is_installed

for _module in ("megatron.core", "transformers"):
    pytest.importorskip(_module)
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)
HERE = Path(__file__).resolve().parent
CASES = (
    "dense_weights",
    "moe_weights",
    "resume",
    "resume_moe",
    "moe_of_the_other_layers",
    "resume_offloaded",
    "state_of_the_other_layers",
    "callers_wishes",
)
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_setup_gpu.py runs the whole flow"),
    pytest.mark.skipif(is_installed(), reason="it is about machines without Transformer Engine"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("flow")
    for kind in ("dense", "moe"):
        make(kind).bfloat16().save_pretrained(folder / kind)
        write_tokenizer(folder / kind)
    environment = {
        "MEGASETUP_CHECKPOINT_DIR": str(folder / "converted"),
        "PYTHONPATH": path(),
        "FLOW_PARALLEL": '{"transformer_impl": "local", "fraction": null}',
    }
    worker = HERE / "flow_on_cpu_worker.py"
    (rank,) = launch(worker, 1, str(folder), *CASES, timeout=350, environment=environment)
    return {name: result_of(name, rank) for name in CASES}


def get(results: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    result = results[name]
    assert "failed" not in result, result["failed"]
    return result


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_local_layers_load_what_was_converted_for_transformer_engine(
    results: dict[str, dict[str, Any]], kind: str
) -> None:
    result = get(results, f"{kind}_weights")
    assert result["names"]
    assert result["different"] == []
    assert result["tensors"] > 20
    # Two implementations round BF16 at different places: 8 bits, two layers. A router may choose another expert then.
    assert result["difference"] < 0.01 * result["spread"]
    assert result["worst"] < (0.05 if kind == "dense" else 1.0) * result["spread"]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_bytes_of_a_load_are_those_of_the_files(results: dict[str, dict[str, Any]], kind: str) -> None:
    result = get(results, f"{kind}_weights")
    assert 2 * result["parameters"] < result["read"] <= result["on_disk"]
    assert result["read"] > 0.99 * result["on_disk"]


@pytest.mark.parametrize("name", ["resume", "resume_moe", "resume_offloaded"])
def test_a_resume_with_torchs_adam_goes_on_as_if_it_had_not_stopped(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    result = get(results, name)
    assert result["weights"].endswith("with optimizer state")
    assert result["evaluated"][0] == result["evaluated"][1]
    assert result["bits"], result["copies"]
    assert result["losses"] == result["expected"]
    assert len(set(result["losses"])) == 3
    assert result["ensured"]
    assert result["step"] == 2
    # Weights in BF16, masters and two moments in FP32. Random states are in the files, and not read.
    assert (2 + 3 * 4) * result["parameters"] < result["read"] < result["on_disk"]
    assert result["read"] > 0.99 * result["on_disk"]


def test_a_checkpoint_of_local_layers_is_found_under_the_other_names(results: dict[str, dict[str, Any]]) -> None:
    result = get(results, "moe_of_the_other_layers")
    assert result["extra_states"] > 0
    assert len(result["equal"]) > 20
    assert all(result["equal"])
    assert result["losses"][0] == result["losses"][1]


def test_optimizer_state_in_the_order_of_other_layers_is_refused(results: dict[str, dict[str, Any]]) -> None:
    result = get(results, "state_of_the_other_layers")
    assert (
        "in the order of the parameters of 'transformer_engine' layers, and the model has 'local'" in result["refused"]
    )
    assert result["weights"].endswith("saved/other")


def test_the_callers_functions_are_called_in_their_places(results: dict[str, dict[str, Any]]) -> None:
    result = get(results, "callers_wishes")
    assert result["events"] == ["embedding ranks", "pre-wrap GPTModel", "pre-load DistributedDataParallel"]
    assert not result["loaded_before"]
    assert result["wrapped"]
    assert result["mapping"] is True
    assert result["losses"][1] < result["losses"][0]


def test_the_gathering_of_parameters_is_handed_out_where_it_overlaps_and_is_aligned(
    results: dict[str, dict[str, Any]],
) -> None:
    result = get(results, "callers_wishes")
    assert result["param_sync"]
    assert result["settings"]
    assert result["bare"][2] is None


def test_without_weights_and_optimizer(results: dict[str, dict[str, Any]]) -> None:
    result = get(results, "callers_wishes")
    assert result["bare"][:2] == [None, None]
    assert not result["bare_loaded"]
    assert result["bare_report"] == ["as initialised", ["config", "parallel state", "model"]]
