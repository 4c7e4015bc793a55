"""The whole flow on one GPU with the real Transformer Engine: import, set up, train, resume, reference, inference.

All cases run in one process, one setup after another, as the tests of a trainer do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flow import check_training, make_models, run_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DENSE = [
    "dense",
    "dense_partial",
    "dense_overlap",
    "dense_aware",
    "dense_aware_partial",
    "dense_stock",
    "dense_aware_stock",
    "dense_on_gpu",
    "value_model",
]
MOE = ["moe", "moe_aware", "moe_frozen"]
RESUMES = ["resume", "resume_partial", "resume_aware", "resume_other_fraction", "resume_weights_only"]
OTHERS = ["lora", "reference", "inference"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flow")


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict[str, Any]:
    facts = make_models(folder)
    assert all(found["taught"] < 0.02 for found in facts.values())
    return facts


@pytest.fixture(scope="module")
def results(folder: Path, facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = run_cases(folder, 1, [*DENSE, *MOE, *OTHERS, *RESUMES])
    return {name: ranks[0] for name, ranks in found.items()}


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_training_keeps_the_model(results: dict[str, dict[str, Any]], facts: dict[str, Any], name: str) -> None:
    result = results[name]
    check_training(result, facts["moe" if name in MOE else "dense"])
    assert result["exact"]
    assert result["synced"]
    assert result["stages"] == ["config", "parallel state", "model", "optimizer", "load", "sync masters", "audit"]


@pytest.mark.parametrize(
    ("name", "levels"),
    [("dense", [1, 2]), ("dense_partial", [1, 2]), ("dense_aware", [2, 3]), ("dense_aware_partial", [2, 3])],
)
def test_every_level_was_audited(results: dict[str, dict[str, Any]], name: str, levels: list[int]) -> None:
    assert results[name]["levels"] == levels


def test_overlap_asks_for_the_hook_to_be_disabled(results: dict[str, dict[str, Any]]) -> None:
    assert results["dense_overlap"]["disable_hook"] is True


def test_frozen_routers_stay(results: dict[str, dict[str, Any]]) -> None:
    result = results["moe_frozen"]
    assert result["routers"] == 2
    assert result["unchanged"]
    assert result["frozen"]
    assert result["wrapper"]


def test_lora(results: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    result = results["lora"]
    check_training(result, facts["dense"])
    assert result["trained"]
    assert all("adapter" in name for name in result["trained"])


@pytest.mark.parametrize("name", ["resume", "resume_partial", "resume_aware"])
def test_a_resume_loses_no_bit(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    assert "failed" not in result, result["failed"]
    assert result["evaluated"][0] == result["evaluated"][1]
    assert result["bits"], result["copies"]
    assert result["losses"] == result["expected"]
    assert result["step"] == 2
    assert result["ensured"]
    assert not result["synced"]
    assert result["weights"].endswith("with optimizer state")


def test_a_resume_with_another_offload_fraction(results: dict[str, dict[str, Any]]) -> None:
    result = results["resume_other_fraction"]
    assert "failed" not in result, result["failed"]
    assert result["evaluated"][0] == result["evaluated"][1]
    assert result["losses"] == pytest.approx(result["expected"], rel=1e-3)


def test_a_checkpoint_of_weights_alone(results: dict[str, dict[str, Any]]) -> None:
    result = results["resume_weights_only"]
    assert "failed" not in result, result["failed"]
    assert result["evaluated"][0] == result["evaluated"][1]
    assert result["synced"]
    assert "with optimizer state" not in result["weights"]
    assert result["losses"] == pytest.approx(result["expected"], rel=0.05)  # (the moments begin anew)


@pytest.mark.parametrize("name", ["dense", "lora"])
def test_the_reference_is_the_policy_before_training(results: dict[str, dict[str, Any]], name: str) -> None:
    assert "failed" not in results["reference"], results["reference"]["failed"]
    result = results["reference"][name]
    assert result["same_names"]
    assert result["on_cpu"]
    assert result["equal"]
    assert result["tensors"] > 10
    assert result["adapters_add_nothing"]
    assert all(loss < 0.1 for loss in result["losses"])


def test_generation_in_the_training_layout_needs_no_second_model(results: dict[str, dict[str, Any]]) -> None:
    assert results["inference"] == {"plan": None}
