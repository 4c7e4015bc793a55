"""Every rule about where a checkpoint is and whether it counts as there."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megasetup.checkpoint.marks import what_is_missing, write_mark
from megasetup.checkpoint.paths import (
    cache_folder_name,
    canonicalize_hf_config_overrides,
    get_checkpoint_dir,
    get_hf_config_overrides_hash,
    resolve_iter_dir_from_root,
    validate_model_paths,
)


@pytest.fixture(autouse=True)
def checkpoint_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No variable of the machine reaches a test; caches are in a folder of the test's own."""
    for name in ("NRL_MEGATRON_CHECKPOINT_DIR", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "caches"
    monkeypatch.setenv("MEGASETUP_CHECKPOINT_DIR", str(folder))
    return folder


def _whole(root: Path) -> Path:
    """What Bridge leaves when it has saved a checkpoint, in names and order (contents stand in for tensors)."""
    iteration = root / "iter_0000000"
    iteration.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"):
        (iteration / name).write_text("x")
    (iteration / "run_config.yaml").write_text("checkpoint:\n  save: x\nmodel:\n  num_layers: 2\ntrain: null\n")
    (root / "latest_checkpointed_iteration.txt").write_text("0")
    return root


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({}, "{}"),
        ({"b": 1, "a": {"d": [1, 2.5], "c": None}}, '{"a":{"c":null,"d":[1,2.5]},"b":1}'),
        ({"name": "Zoë"}, '{"name":"Zo\\u00eb"}'),
        ({"flag": True}, '{"flag":true}'),
    ],
)
def test_canonical_text(overrides: dict[str, Any], text: str) -> None:
    assert canonicalize_hf_config_overrides(overrides) == text
    assert get_hf_config_overrides_hash(overrides) == hashlib.sha256(text.encode()).hexdigest()[:12]


def test_equal_overrides_have_one_hash_and_others_another() -> None:
    first = get_hf_config_overrides_hash({"a": 1, "b": {"x": 1, "y": 2}})
    assert first == get_hf_config_overrides_hash({"b": {"y": 2, "x": 1}, "a": 1})
    assert first != get_hf_config_overrides_hash({"a": 1, "b": {"x": 1, "y": 3}})
    assert get_hf_config_overrides_hash({"max_position_embeddings": 4096}) == "d6b3c160fb7b"


def test_overrides_that_json_cannot_hold() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        get_hf_config_overrides_hash({"dtype": object()})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NRL_MEGATRON_CHECKPOINT_DIR": "/nrl", "MEGASETUP_CHECKPOINT_DIR": "/own", "HF_HOME": "/hf"}, "/nrl"),
        ({"NRL_MEGATRON_CHECKPOINT_DIR": " ", "MEGASETUP_CHECKPOINT_DIR": "/own"}, "/own"),
        ({"MEGASETUP_CHECKPOINT_DIR": "", "HF_HOME": "/hf"}, "/hf/nemo_rl"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/huggingface/nemo_rl"),
        ({"HOME": "/home/someone", "HF_HOME": ""}, "/home/someone/.cache/huggingface/nemo_rl"),
    ],
)
def test_checkpoint_folder(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGASETUP_CHECKPOINT_DIR")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert get_checkpoint_dir() == expected


def test_cache_folder_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert cache_folder_name("Qwen/Qwen3-8B", {}) == "Qwen/Qwen3-8B"
    local = tmp_path / "models" / "mine"
    local.mkdir(parents=True)
    assert cache_folder_name(str(local)) == "model_" + str(local).replace("/", "_")
    monkeypatch.chdir(local.parent)
    for relative in ("mine", "./mine", "../models/mine"):
        assert cache_folder_name(relative) == cache_folder_name(str(local))
    overrides = {"rope_scaling": {"factor": 4}}
    assert cache_folder_name("a/b", overrides) == f"a/b__hfovr_{get_hf_config_overrides_hash(overrides)}"


@pytest.mark.parametrize(
    ("content", "folder"),
    [("250", "iter_0000250"), ("0\n", "iter_0000000"), ("10000000", "iter_10000000"), ("release", "release")],
)
def test_the_file_decides_the_iteration(content: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / "iter_0000999").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    assert resolve_iter_dir_from_root(str(tmp_path), "none") == str(tmp_path / folder)


@pytest.mark.parametrize("content", ["latest", "-1", "1.5", "", "0x10"])
def test_a_file_that_names_no_iteration(content: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    with pytest.raises(ValueError, match=r"latest_checkpointed_iteration\.txt holds ") as error:
        resolve_iter_dir_from_root(str(tmp_path), "none")
    assert repr(content) in str(error.value)


def test_without_the_file_the_highest_number_decides(tmp_path: Path) -> None:
    for name in ("iter_0999999", "iter_10000000", "iter_0000007", "iter_x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_99999999").write_text("a file is no iteration")
    assert resolve_iter_dir_from_root(str(tmp_path), "none") == str(tmp_path / "iter_10000000")


@pytest.mark.parametrize("exists", [True, False])
def test_no_iteration(exists: bool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^this is the message$"):
        resolve_iter_dir_from_root(str(tmp_path if exists else tmp_path / "no"), "this is the message")


def test_a_model_that_was_not_converted(checkpoint_dir: Path) -> None:
    assert validate_model_paths({"model_name": "Qwen/Qwen3-8B"}) == (
        "Qwen/Qwen3-8B",
        f"{checkpoint_dir}/Qwen/Qwen3-8B",
        False,
    )


def test_a_converted_model_and_its_overrides(checkpoint_dir: Path) -> None:
    _whole(checkpoint_dir / "Qwen/Qwen3-8B")
    config: dict[str, Any] = {"model_name": "Qwen/Qwen3-8B", "hf_config_overrides": {}, "pretrained_checkpoint": None}
    assert validate_model_paths(config) == ("Qwen/Qwen3-8B", f"{checkpoint_dir}/Qwen/Qwen3-8B", True)
    config["hf_config_overrides"] = {"x": 1}
    expected = f"{checkpoint_dir}/Qwen/Qwen3-8B__hfovr_{get_hf_config_overrides_hash({'x': 1})}"
    assert validate_model_paths(config) == ("Qwen/Qwen3-8B", expected, False)


@pytest.mark.parametrize("config", [{}, {"model_name": None}, {"model_name": ""}])
def test_a_config_without_a_model(config: dict[str, Any]) -> None:
    with pytest.raises(KeyError, match=r"policy\.model_name is"):
        validate_model_paths(config)


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("iter_0000000/.metadata", ".metadata is missing or empty"),
        ("iter_0000000/metadata.json", "metadata.json is missing or empty"),
        ("iter_0000000/run_config.yaml", "run_config.yaml is missing or empty"),
    ],
)
def test_a_half_written_cache_of_another_program(
    gone: str, said: str, checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = _whole(checkpoint_dir / "a")
    (root / gone).unlink()
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        assert validate_model_paths({"model_name": "a"})[2] is False
    assert said in caplog.text
    assert "will be made again" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "checkpoint:\n  save: x\n", "model:\n  num_layers: 2\n", "model:\n  a: 1\ntrain: nul"]
)
def test_a_run_config_that_breaks_off(text: str, checkpoint_dir: Path) -> None:
    root = _whole(checkpoint_dir / "a")
    (root / "iter_0000000/run_config.yaml").write_text(text)
    assert what_is_missing(root) is not None


def test_a_run_config_in_an_order_of_its_own(checkpoint_dir: Path) -> None:
    root = _whole(checkpoint_dir / "a")
    (root / "iter_0000000/run_config.yaml").write_text("train: null\nmodel:\n  num_layers: 2\n")
    assert what_is_missing(root) is None


def test_a_cache_without_tensors_or_with_an_empty_file(checkpoint_dir: Path) -> None:
    root = _whole(checkpoint_dir / "a")
    (root / "iter_0000000/__1_0.distcp").write_text("")
    assert what_is_missing(root) == "iter_0000000/__1_0.distcp is empty"
    for shard in (root / "iter_0000000").glob("*.distcp"):
        shard.unlink()
    assert what_is_missing(root) == "iter_0000000 has no tensors (*.distcp)"


def test_a_mark_tells_a_copy_that_broke_off(tmp_path: Path) -> None:
    root = _whole(tmp_path / "a")
    write_mark(root, {"source": "a"})
    assert what_is_missing(root) is None
    assert json.loads((root / "megasetup_import.json").read_text())["source"] == "a"
    shard = root / "iter_0000000/__1_0.distcp"
    shard.write_text("xx")
    assert what_is_missing(root) == "iter_0000000/__1_0.distcp is 2 bytes long and should have 1 bytes"
    shard.unlink()
    assert what_is_missing(root) == "iter_0000000/__1_0.distcp is missing and should have 1 bytes"
    (root / "megasetup_import.json").write_text("{")
    assert what_is_missing(root) == "megasetup_import.json cannot be read"


def _given(path: Path, kind: str) -> dict[str, Any]:
    return {"model_name": "a/b", "pretrained_checkpoint": {"path": str(path), "format": kind}}


@pytest.mark.parametrize(("kind", "proof"), [("megatron_bridge", "run_config.yaml"), ("megatron_lm", "metadata.json")])
def test_given_checkpoints(kind: str, proof: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"policy\.pretrained_checkpoint\.path is"):
        validate_model_paths(_given(tmp_path / "no", kind))
    with pytest.raises(FileNotFoundError, match=f"neither {proof} nor an iteration"):
        validate_model_paths(_given(tmp_path, kind))

    iteration = tmp_path / "iter_0000012"
    iteration.mkdir()
    with pytest.raises(FileNotFoundError, match=f"iter_0000012 holds no {proof}"):
        validate_model_paths(_given(tmp_path, kind))
    (iteration / proof).write_text("x")
    assert validate_model_paths(_given(tmp_path, kind)) == ("a/b", str(iteration), True)
    assert validate_model_paths(_given(iteration, kind)) == ("a/b", str(iteration), True)

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(FileNotFoundError, match=f"iter_0000003 holds no {proof}"):
        validate_model_paths(_given(tmp_path, kind))


def test_a_megatron_lm_checkpoint_must_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_text("x")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        validate_model_paths(_given(file, "megatron_lm"))


@pytest.mark.parametrize(
    ("pretrained", "kind", "said"),
    [
        ({"path": "/x", "format": "nemo"}, ValueError, "policy.pretrained_checkpoint.format is 'nemo'"),
        ({"path": "/x"}, ValueError, "policy.pretrained_checkpoint.format is missing"),
        ({"format": "megatron_lm"}, KeyError, "policy.pretrained_checkpoint.path is missing"),
    ],
)
def test_given_checkpoints_that_are_not_described(pretrained: dict[str, str], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as error:
        validate_model_paths({"model_name": "a/b", "pretrained_checkpoint": pretrained})
    assert said in str(error.value)
