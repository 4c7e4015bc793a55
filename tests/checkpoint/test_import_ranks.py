"""Two ranks over gloo: together with the config's sizes, and on machines that share no folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import assert_same_bits, make
from launch import Ended, launch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from megasetup.checkpoint.exporting import export_model_to_hf
from megasetup.checkpoint.marks import what_is_missing

_WORKER = Path(__file__).with_name("ranks_worker.py")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo is for machines without a GPU")


def _facts(ended: Ended) -> list[dict[str, Any]]:
    assert ended.status == 0, ended.output
    return [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]


@pytest.mark.timeout(600)
def test_ranks_convert_their_shares_together(tmp_path: Path) -> None:
    for kind in ("dense", "tied", "moe"):
        make(kind, tmp_path / kind / "hf")
    sizes = {
        "dense": "tensor_model_parallel_size=2",
        "tied": "pipeline_model_parallel_size=2",
        "moe": "expert_model_parallel_size=2",
    }
    cases = [f"{kind}:{size}" for kind, size in sizes.items()]
    first, second = map(_facts, launch(_WORKER, 2, "together", ";".join(cases), str(tmp_path), timeout=500))
    assert [facts["case"] for facts in first] == [facts["case"] for facts in second] == cases
    whole = {kind: _elements(tmp_path / kind / "hf") for kind in sizes}
    for kind, one, other in zip(sizes, first, second, strict=True):
        assert not one["up"]
        assert not other["up"]
        # Each rank holds a share: more than half of the model in none but what all ranks keep.
        assert len(one["parameters"]) == len(other["parameters"]) == 1
        assert one["parameters"][0] < 0.8 * whole[kind]
        assert one["parameters"][0] + other["parameters"][0] >= whole[kind]
    for kind, size in sizes.items():
        checkpoint = tmp_path / kind / f"megatron-{size}"
        assert what_is_missing(checkpoint) is None
        saved = (checkpoint / "iter_0000000" / "run_config.yaml").read_text()
        assert f"\n  {size.split('=')[0]}: 1\n" in saved
        export_model_to_hf(checkpoint, tmp_path / kind / "back")
        assert_same_bits(tmp_path / kind / "hf", tmp_path / kind / "back")


def _elements(model: Path) -> int:
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())


@pytest.mark.timeout(600)
def test_machines_without_a_shared_folder_convert_each_for_itself(tmp_path: Path) -> None:
    make("dense", tmp_path / "hf")
    ended = launch(_WORKER, 2, "apart", str(tmp_path), timeout=500, environment={"LOCAL_RANK": "0"})
    for rank, one in enumerate(ended):
        assert one.status == 0, one.output
        assert "ANSWER converted" in one.output
        assert "not all machines of this process group share" in one.output
        export_model_to_hf(tmp_path / f"machine-{rank}" / "megatron", tmp_path / f"back-{rank}")
        assert_same_bits(tmp_path / "hf", tmp_path / f"back-{rank}")


@pytest.mark.timeout(600)
def test_a_rank_that_does_not_see_the_result_is_named_on_every_rank(tmp_path: Path) -> None:
    """As launched, the second rank is not the first of its machine, so nobody converts into the folder it sees."""
    make("dense", tmp_path / "hf")
    for one in launch(_WORKER, 2, "apart", str(tmp_path), timeout=500):
        assert one.status == 0, one.output
        answer = next(line for line in one.output.splitlines() if line.startswith("ANSWER"))
        assert "1 of 2 ranks do not see all of it (rank 1 on " in answer
        assert "it has no iter_0000000" in answer
        assert "HF_HOME, or MEGASETUP_CHECKPOINT_DIR, on storage that all machines share" in answer
