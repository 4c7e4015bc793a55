"""`megasetup import` and `export` as a user runs them: answers, defaults, and errors as one message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

from hf_models import assert_same_bits, make

_CONFIG = """
policy:
  model_name: unused
  precision: bfloat16
  hf_config_overrides: {max_position_embeddings: 99}
  megatron_cfg: {tensor_model_parallel_size: 4, trust_remote_code: false}
"""


@pytest.mark.timeout(600)
def test_there_and_back(megasetup, tmp_path, monkeypatch):
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "cache"))
    model = make("dense", tmp_path / "hf")
    (tmp_path / "config.yaml").write_text(_CONFIG)

    done = megasetup("import", "hf", "--config", "config.yaml")
    (made,) = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    assert made.name.startswith(f"model_{str(model).replace('/', '_')}__hfovr_")
    assert done.stdout.startswith(f"{made}: hf, converted in ")
    assert len(done.stdout.splitlines()) == 1
    assert f"Writing {made}: done in" in done.stderr
    assert "Traceback" not in done.stderr

    back = megasetup("export", made, "--out", "back")
    assert back.stdout.startswith(f"back: iter_0000000 of {made}, written in ")
    assert_same_bits(model, tmp_path / "back")

    again = megasetup("export", made, "--out", "back", status=1)
    assert "Error: " in again.stderr
    assert "back exists and is not empty: choose another folder, or remove it" in again.stderr


def test_what_is_no_checkpoint(megasetup, tmp_path):
    done = megasetup("export", "nothing", "--out", "back", status=1)
    assert done.stderr.strip() == "Error: nothing is no folder of a checkpoint"
    assert not list(tmp_path.iterdir())


def test_a_config_that_does_not_exist(megasetup):
    done = megasetup("import", "hf", "--config", "no.yaml", status=1)
    assert "no.yaml" in done.stderr
    assert "Traceback" not in done.stderr
