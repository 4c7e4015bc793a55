"""The demo tells its story to the end: imported, checked, planned, and an audit that names what was broken."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import megasetup as package
from megasetup.cli.demo import shards
from megasetup.masters import SyncPlan, audit_plan


def needs_what_the_demo_needs():
    for name in ("megatron.core", "transformers"):
        pytest.importorskip(name)
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("needs megatron-bridge")


def check_story(data, printed):
    """Stale, exact, one named, repaired, and the one that was merely more precise kept."""
    broken = data["broken"]["name"]
    assert f"The audit names it: {broken}." in printed
    assert "Nothing is stale." in printed
    assert all(copy["state"] == "exact" for copy in data["audit_after_sync"]["copies"])
    (named,) = [copy for copy in data["audit_of_broken"]["copies"] if copy["state"] == "stale"]
    assert (named["name"], named["level"]) == (broken, data["broken"]["level"])
    assert (named["first_index"], named["rounded_differences"]) == (data["broken"]["index"], 1)
    assert [repair["name"] for repair in data["repairs"]] == [broken]
    kept = [copy for copy in data["audit_after_repair"]["copies"] if copy["state"] == "consistent"]
    assert [copy["name"] for copy in kept] == [data["trained"]["name"]]
    assert data["audit_after_repair"]["ok"]


def test_demo_without_a_gpu(megasetup, tmp_path):
    needs_what_the_demo_needs()
    done = megasetup("demo", "--out", "out", "--device", "cpu")
    data = json.loads((tmp_path / "out/demo.json").read_text())
    check_story(data, done.stdout)
    assert all(copy["state"] != "exact" for copy in data["audit_after_load"]["copies"])
    # The copies are those of the weights that the import wrote: Megatron's names, one rank of four.
    names = {copy["name"] for copy in data["audit_after_load"]["copies"]}
    assert "decoder.layers.7.mlp.linear_fc1.weight" in names
    held = sum(copy["elements"] for copy in data["audit_after_load"]["copies"] if copy["level"] == 1)
    assert held == pytest.approx(28e6 / 4, rel=0.05)

    assert "Refresh every FP32 copy of the weights, because no optimizer state is loaded." in done.stdout
    assert "35,677,696" in done.stdout  # parameters of the model with experts, which is planned
    for kind in ("dense", "moe"):
        policy = yaml.safe_load((tmp_path / f"out/{kind}.yaml").read_text())["policy"]
        assert Path(policy["model_name"]) == tmp_path / "out" / kind
        (converted,) = (tmp_path / "out/converted").glob(f"model_*_{kind}")
        assert (converted / "iter_0000000/run_config.yaml").is_file()
        assert f"{kind}: out/{kind}.yaml: nothing is wrong" in done.stdout.replace(f"{tmp_path}/", "")


def test_weights_of_a_checkpoint_are_hugging_faces(tmp_path):
    """Bit for bit, and layers one by one."""
    needs_what_the_demo_needs()
    from safetensors.torch import load_file

    sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
    from hf_models import make

    from megasetup.checkpoint.importing import import_model_from_hf
    from megasetup.cli.demo import imported

    make("dense", tmp_path / "hf")
    import_model_from_hf(str(tmp_path / "hf"), tmp_path / "megatron")
    found, expected = imported.weights_of(tmp_path / "megatron"), load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(found["embedding.word_embeddings.weight"], expected["model.embed_tokens.weight"])
    for layer in range(2):
        down = expected[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert torch.equal(found[f"decoder.layers.{layer}.mlp.linear_fc2.weight"], down)
    assert sum(weight.numel() for weight in found.values()) == sum(weight.numel() for weight in expected.values())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_hold_every_element_once(ranks):
    counts = {"a": 1, "b": 200, "c": 64, "d": 1000, "e": 3}
    held = {name: [0] * count for name, count in counts.items()}
    lengths = set()
    for rank in range(ranks):
        found, length = shards.pieces(counts, rank, ranks)
        lengths.add(length)
        for piece in found:
            assert piece.start % 64 == 0
            assert rank * length // ranks <= piece.start + piece.first
            assert piece.start + piece.last <= (rank + 1) * length // ranks
            for index in range(piece.first, piece.last):
                held[piece.name][index] += 1
    assert len(lengths) == 1
    assert lengths.pop() % ranks == 0
    assert all(set(times) == {1} for times in held.values())


def test_a_rank_holds_the_weights_values_and_other_copies():
    weights = {"a": torch.randn(30, 10).bfloat16(), "b": torch.randn(500).bfloat16()}
    held = shards.hold(weights, 1, 2)
    assert held
    for entry in held:
        part = weights[entry.name].view(-1)[entry.offset : entry.offset + entry.source.numel()]
        assert torch.equal(entry.source, part)
    plan = SyncPlan.from_copies(held)
    assert len(audit_plan(plan).stale) == 2 * len(held)
    repaired = shards.repair_stale(plan)
    assert len(repaired) == 2 * len(held)
    assert all(copy.state == "exact" for copy in audit_plan(plan).copies)


@pytest.mark.gpu
@pytest.mark.parametrize("transformer_engine", [True, False])
def test_demo_on_a_gpu(tmp_path, transformer_engine):
    needs_what_the_demo_needs()
    if transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    environment = {**os.environ, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    paths = [str(Path(package.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    way = (
        ["-m", "megasetup"] if transformer_engine else [str(Path(__file__).with_name("without_transformer_engine.py"))]
    )
    command = [sys.executable, *way, "demo", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "out/demo.json").read_text())
    check_story(data, done.stdout)
    assert set(data["losses"]) == ({"dense", "moe"} if transformer_engine else {"dense"})
    for ways in data["losses"].values():
        assert len(ways["with"]) == len(ways["without"]) == 4
        assert max(ways["with"]) < 0.1
        assert ways["without"][0] == pytest.approx(ways["with"][0], rel=0.05)
        assert min(ways["without"][1:]) > 1.0
    assert all(report["audit"]["ok"] for report in data["setup"].values())
    assert "sync masters" in done.stdout
    assert (tmp_path / "out/losses.png").stat().st_size > 10_000
    # Megatron's own reload does not reach the clones.
    assert data["audit_after_load"]["counts"]["2"]["stale"] > 0
