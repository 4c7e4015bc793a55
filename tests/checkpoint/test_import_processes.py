"""Conversions that are killed, and conversions that start together: real processes, real signals."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hf_models import assert_same_bits, make
from launch import bare_environment

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from megasetup.checkpoint.exporting import export_model_to_hf
from megasetup.checkpoint.marks import MARK, what_is_missing

_WORKER = Path(__file__).with_name("import_worker.py")


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(_WORKER), *arguments],
        env=bare_environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(600)
def test_a_killed_conversion_leaves_nothing_that_counts_and_the_next_succeeds(tmp_path: Path) -> None:
    model = make("moe", tmp_path / "hf")
    target = tmp_path / "cache" / "megatron"
    with _start("killed", str(model), str(target)) as process:
        output = process.communicate(timeout=550)[0]
    assert process.returncode == 0, output
    found = {facts["moment"]: facts for facts in map(json.loads, (x for x in output.splitlines() if x[:1] == "{"))}
    assert list(found) == [
        "weights are loaded",
        "tensors are written",
        "config is written",
        "before it is marked",
        "before it is moved",
        "between the renames",
    ]
    for moment, facts in found.items():
        assert facts["status"] == -9, (moment, output)
        assert facts["missing"] == "it has no iter_0000000", moment
        assert facts["left"] == (2 if moment == "between the renames" else 1), moment
        assert (facts["again"], facts["missing_after"], facts["left_after"]) == (0, None, []), (moment, output)
    export_model_to_hf(target, tmp_path / "back")
    assert_same_bits(model, tmp_path / "back")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("force", [False, True])
def test_four_that_start_together_convert_once(force: bool, tmp_path: Path) -> None:
    model = make("dense", tmp_path / "hf")
    target = tmp_path / "cache" / "megatron"
    target.parent.mkdir()
    processes = [_start("together", str(model), str(target), *(["force"] if force else [])) for _ in range(4)]
    try:
        deadline = time.monotonic() + 300
        while len(list(target.parent.glob("ready-*"))) < 4:
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in processes), [p.communicate()[0] for p in processes]
            time.sleep(0.05)
        (target.parent / "go").touch()
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * 4, outputs
    answers = sorted(line for output in outputs for line in output.splitlines() if line.startswith("ANSWER"))
    assert answers == ["ANSWER False"] * 3 + ["ANSWER True"], outputs
    assert what_is_missing(target) is None
    assert (target / MARK).is_file()
    assert not list(target.parent.glob("*importing*"))
