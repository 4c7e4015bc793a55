"""The flow on two GPUs: data, tensor, pipeline and expert parallel, and an inference model in another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flow import check_training, make_models, run_cases

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(900)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
}
CASES = {
    "data": ["dense", "dense_overlap", "dense_aware", "moe", "resume", "lora"],
    "tensor": ["dense", "moe", "dense_aware", "resume", "reference", "lora"],
    "sequence": ["dense"],
    "pipeline": ["dense", "resume"],
    "expert": ["moe", "moe_aware", "moe_frozen"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flow")


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict[str, Any]:
    return make_models(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(folder: Path, facts: dict[str, Any], layout: str) -> None:
    found = run_cases(folder, 2, CASES[layout], FLOW_PARALLEL=json.dumps(LAYOUTS[layout]))
    for name, ranks in found.items():
        for result in ranks:
            assert "failed" not in result, f"{name}: {result['failed']}"
            if name == "resume":
                assert result["bits"]
                assert result["losses"] == result["expected"]
            elif name == "reference":
                assert result["dense"]["equal"]
                assert result["lora"]["equal"]
            else:
                check_training(result, facts["moe" if name.startswith("moe") else "dense"])
                assert name == "lora" or result["exact"]
        if "losses" in ranks[0]:
            assert ranks[0]["losses"] == ranks[1]["losses"]


@pytest.mark.parametrize(("training", "inference"), [(1, 2), (2, 1)])
def test_an_inference_model_in_another_layout(
    folder: Path, facts: dict[str, Any], training: int, inference: int
) -> None:
    found = run_cases(
        folder,
        2,
        ["inference"],
        FLOW_PARALLEL=json.dumps({"tensor_model_parallel_size": training}),
        FLOW_INFERENCE=json.dumps({"tensor_model_parallel_size": inference}),
    )
    for result in found["inference"]:
        assert "failed" not in result, result["failed"]
        assert result["size"] == [2048, 2048]
        assert result["largest"] > 1.0
        assert result["same_addresses"]
        assert not result["grad"]
        assert not result["training"]
        # Sums over two halves round otherwise than sums over a whole.
        assert result["difference"] < 0.05 * result["largest"]
