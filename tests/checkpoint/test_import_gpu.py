"""Import on GPUs with Transformer Engine, and what the CPU made loaded there: every tensor bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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

# Each does all of its pairs of folders, whichever fail, and says which did.
_EACH = """
import sys, traceback, torch
from itertools import batched
{importing} as work
failed = []
for source, target in batched(sys.argv[1:], 2):
    try:
        work(source, target)
    except Exception:
        traceback.print_exc()
        failed.append(source)
print("CUDA", torch.cuda.max_memory_allocated(), torch.cuda.is_initialized())
sys.exit(f"FAILED {{failed}}" if failed else 0)
"""
_ALONE = _EACH.format(importing="from megasetup.checkpoint.importing import import_model_from_hf")
_EXPORT = _EACH.format(importing="from megasetup.checkpoint.exporting import export_model_to_hf")
_TIMEOUT = 180  # seconds; a test runs up to three processes within its own limit


def _run(*command: object) -> str:
    """All that a process says, on standard output and error; a failure shows it."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=bare_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"still running after {_TIMEOUT} s\n--- stdout\n{out}\n--- stderr\n{err}")
    said = f"status {process.returncode}\n--- stdout\n{out}\n--- stderr\n{err}"
    assert process.returncode == 0, said
    return said


def _facts(ended: Ended) -> list[dict[str, Any]]:
    assert ended.status == 0, ended.output
    return [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]


def _check(folder: Path, checkpoints: dict[str, Path]) -> str:
    """Every checkpoint, loaded by Bridge on the GPU and exported by us on the CPU, is the model. Gives the outputs."""
    loads: Sequence[Path] = [
        path
        for kind, checkpoint in checkpoints.items()
        for path in (checkpoint, folder / kind / "hf", folder / kind / "gpu")
    ]
    exports = [path for kind, checkpoint in checkpoints.items() for path in (checkpoint, folder / kind / "back")]
    said = _run(_HERE / "load_worker.py", *loads)
    assert said.count("DEVICE {'cuda:0'}") == len(checkpoints), said
    said += _run("-c", _EXPORT, *exports)
    for kind in checkpoints:
        assert_same_bits(folder / kind / "hf", folder / kind / "gpu")
        assert_same_bits(folder / kind / "hf", folder / kind / "back")
    return said


def test_an_installed_transformer_engine_is_used() -> None:
    assert ensure_importable() is False


def test_what_a_process_alone_made_loads_into_transformer_engines_layers(tmp_path: Path) -> None:
    """The process converts on the CPU, with Megatron's local layers, and puts nothing on the GPU."""
    for kind in KINDS:
        make(kind, tmp_path / kind / "hf")
    pairs = [path for kind in KINDS for path in (tmp_path / kind / "hf", tmp_path / kind / "megatron")]
    converted = _run("-c", _ALONE, *pairs)
    assert "CUDA 0 " in converted, converted
    said = _check(tmp_path, {kind: tmp_path / kind / "megatron" for kind in KINDS})
    assert said.count("'TELayerNormColumnParallelLinear'") == len(KINDS), said
    assert "CUDA 0 " in said, said


def test_one_gpu_converts_with_transformer_engines_layers(tmp_path: Path) -> None:
    for kind in KINDS:
        make(kind, tmp_path / kind / "hf")
    cases = [f"{kind}:" for kind in KINDS]
    (ended,) = launch(_HERE / "ranks_worker.py", 1, "together", ";".join(cases), str(tmp_path), timeout=_TIMEOUT)
    facts = _facts(ended)
    assert [one["case"] for one in facts] == cases, ended.output
    assert not any(one["up"] for one in facts)
    checkpoints = {kind: tmp_path / kind / "megatron-" for kind in KINDS}
    assert [what_is_missing(checkpoint) for checkpoint in checkpoints.values()] == [None] * len(KINDS)
    _check(tmp_path, checkpoints)


@pytest.mark.multigpu
def test_two_gpus_convert_their_shares_together(tmp_path: Path) -> None:
    sizes = {
        "dense": "tensor_model_parallel_size=2",
        "tied": "pipeline_model_parallel_size=2",
        "moe": "expert_model_parallel_size=2",
    }
    for kind in sizes:
        make(kind, tmp_path / kind / "hf")
    cases = [f"{kind}:{size}" for kind, size in sizes.items()]
    ended = launch(_HERE / "ranks_worker.py", 2, "together", ";".join(cases), str(tmp_path), timeout=_TIMEOUT)
    for one in ended:
        assert [facts["case"] for facts in _facts(one)] == cases
    checkpoints = {kind: tmp_path / kind / f"megatron-{size}" for kind, size in sizes.items()}
    for kind, checkpoint in checkpoints.items():
        saved = (checkpoint / "iter_0000000" / "run_config.yaml").read_text()
        assert f"\n  {sizes[kind].split('=')[0]}: 1\n" in saved
    _check(tmp_path, checkpoints)
