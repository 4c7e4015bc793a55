"""A draft's files: which are read, what is refused, how tensors are cut and joined, what a config may say."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megasetup.config.errors import ConfigError
from megasetup.model.draft.architecture import DraftArchitecture, architecture_of
from megasetup.model.draft.files import DraftWeightsError, find_draft, read_weights
from megasetup.model.draft.layout import pieces_of

POLICY = {"draft": {"enabled": True}}
ARCHITECTURE = DraftArchitecture(
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=3,
    num_layers=2,
    vocab_size=30,
    draft_vocab_size=20,
    layernorm_epsilon=1e-6,
    init_method_std=0.02,
    rotary_base=10_000.0,
    rope_factor=None,
    aux_layers=(1, 2),
)


def provider(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 2,
        "num_layers": 12,
        "vocab_size": 30,
        "layernorm_epsilon": 1e-6,
        "init_method_std": 0.01,
        "rotary_base": 1_000_000,
        "tensor_model_parallel_size": 1,
    }
    return SimpleNamespace(**(fields | changes))


def config(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "vocab_size": 30,
        **changes,
    }


def folder_of(tmp_path: Path, found: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(found))
    return tmp_path


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4), "c": torch.tensor([True])}


def check_read(folder: Path) -> None:
    found = read_weights(folder)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "draft.safetensors", "draft.pt"])
def test_one_file(tmp_path: Path, name: str) -> None:
    if name.endswith(".safetensors"):
        save_file(tensors(), tmp_path / name)
    else:
        torch.save(tensors(), tmp_path / name)
    check_read(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_several_files_with_an_index(tmp_path: Path, name: str) -> None:
    places = {}
    for number, (key, tensor) in enumerate(tensors().items()):
        file = f"part-{number}{Path(name).suffix}"
        places[key] = file
        (save_file if name.endswith(".safetensors") else torch.save)({key: tensor}, tmp_path / file)
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    check_read(tmp_path)
    (tmp_path / places["b"]).unlink()
    with pytest.raises(DraftWeightsError, match=rf"index\.json names {places['b']}, which .* does not hold"):
        read_weights(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert read_weights(folder_of(tmp_path, config())) == {}


def test_several_files_and_no_index(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        save_file(tensors(), tmp_path / name)
    with pytest.raises(DraftWeightsError, match=r"one\.safetensors, two\.safetensors and no index"):
        read_weights(tmp_path)


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd"])
def test_an_index_stays_in_its_folder(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    save_file(tensors(), tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(DraftWeightsError, match=r"does not hold"):
        read_weights(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weights": {}}', '{"weight_map": [1]}'])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DraftWeightsError, match="is no index of weights"):
        read_weights(tmp_path)


def test_an_index_that_names_more_than_there_is(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "zz": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DraftWeightsError, match=r"names zz, which its files do not hold"):
        read_weights(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not that")
    with pytest.raises(DraftWeightsError, match=r"model\.safetensors cannot be read"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"a": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DraftWeightsError, match="must hold tensors by name"):
        read_weights(tmp_path)


class _Runs:
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (Path("/tmp/ran"),))


def test_nothing_in_a_torch_file_runs(tmp_path: Path) -> None:
    torch.save({"a": _Runs()}, tmp_path / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(DraftWeightsError, match="cannot be read"):
        read_weights(tmp_path)


def test_where_a_draft_is(tmp_path: Path) -> None:
    assert find_draft(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"policy\.draft\.model_name is '/no/such/folder'"):
        find_draft("/no/such/folder")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("own_tokens", [True, False])
def test_what_is_cut_is_joined_again(world: int, own_tokens: bool) -> None:
    shape = ARCHITECTURE if own_tokens else replace(ARCHITECTURE, draft_vocab_size=30)
    rows = 20 if own_tokens else 32
    names = set()
    for piece in pieces_of(shape, rows):
        disk = {name: torch.randn(size) for name, size in piece.shapes.items()}
        parts = [piece.cut(disk, rank, world) for rank in range(world)]
        assert len({part.shape for part in parts}) == 1
        joined = piece.join(parts)
        assert joined.keys() == disk.keys()
        for name, tensor in disk.items():
            assert torch.equal(joined[name], tensor)
        names |= disk.keys()
    assert ("d2t" in names) == own_tokens
    assert len(names) == (23 if own_tokens else 22)


def test_query_key_and_value_stand_group_by_group() -> None:
    (piece,) = (
        piece
        for piece in pieces_of(ARCHITECTURE, 20)
        if piece.parameter.endswith("layers.1.self_attention.linear_qkv.weight")
    )
    query, key, value = (torch.randn(size) for size in piece.shapes.values())
    fused = piece.cut(dict(zip(piece.shapes, (query, key, value), strict=True)), 1, 2)
    # The second group: its two heads of three rows, its key, its value.
    assert torch.equal(fused, torch.cat((query[6:12], key[3:6], value[3:6])))


def test_gate_stands_above_up_on_each_rank() -> None:
    (piece,) = (piece for piece in pieces_of(replace(ARCHITECTURE, num_layers=1), 20) if "fc1" in piece.parameter)
    gate, up = (torch.randn(size) for size in piece.shapes.values())
    cut = piece.cut(dict(zip(piece.shapes, (gate, up), strict=True)), 0, 2)
    assert torch.equal(cut, torch.cat((gate[:6], up[:6])))


def test_the_policys_own_sizes() -> None:
    found = architecture_of(POLICY, provider(), None)
    assert found == DraftArchitecture(
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=2,
        num_layers=1,
        vocab_size=30,
        draft_vocab_size=30,
        layernorm_epsilon=1e-6,
        init_method_std=0.01,
        rotary_base=1_000_000.0,
        rope_factor=None,
        aux_layers=(1, 5, 8),
    )


def test_a_drafts_config(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 500_000.0, "low_freq_factor": 1.0}
    found = architecture_of(
        {"draft": {"enabled": True, "num_layers": 3}},
        provider(),
        folder_of(
            tmp_path,
            config(
                num_key_value_heads=1,
                head_dim=5,
                draft_vocab_size=20,
                rope_parameters=rope,
                eagle_config={"eagle_aux_hidden_state_layer_ids": [7, 2]},
            ),
        ),
    )
    assert (found.num_query_groups, found.kv_channels, found.num_layers) == (1, 5, 3)
    assert (found.vocab_size, found.draft_vocab_size, found.ffn_hidden_size) == (30, 20, 12)
    assert (found.rotary_base, found.rope_factor) == (500_000.0, 32.0)
    assert found.aux_layers == (2, 7)


@pytest.mark.parametrize(
    ("changes", "policy", "said"),
    [
        ({"hidden_size": 16}, {}, "hidden_size is 16: must be 8, the policy's"),
        ({"vocab_size": 31}, {}, "vocab_size is 31: must be 30, the policy's"),
        ({"draft_vocab_size": 40}, {}, "draft_vocab_size is 40: must be at most vocab_size, 30"),
        ({"num_key_value_heads": 2}, {"tensor_model_parallel_size": 4}, "num_key_value_heads is 2: must be a multiple"),
        ({"num_key_value_heads": 3}, {}, "num_attention_heads is 4: must be a multiple of num_key_value_heads, 3"),
        ({"intermediate_size": None}, {}, "intermediate_size is None: must be a whole number"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads is 0: must be a whole number above 0"),
        ({"draft_vocab_size": "20"}, {}, "draft_vocab_size is '20': must be a whole number above 0"),
        ({"num_hidden_layers": True}, {}, "num_hidden_layers is True: must be a whole number above 0"),
        ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu': must be 'silu'"),
        ({"attention_bias": True}, {}, "attention_bias is True: must be False"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, {}, "rope_scaling is .* must be of type default or llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 2}}, {}, "rope_scaling is .* must have"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [12]}}, {}, r"policy.draft.model_name is \[12\]"),
    ],
)
def test_what_is_no_draft_of_this_policy(
    tmp_path: Path, changes: dict[str, Any], policy: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        architecture_of(POLICY, provider(**policy), folder_of(tmp_path, config(**changes)))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.draft\.model_name is .*: must be a model with a config\.json"):
        architecture_of(POLICY, provider(), tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        ConfigError, match=r"policy\.draft\.model_name is '.*config\.json': must be a model whose config"
    ):
        architecture_of(POLICY, provider(), tmp_path)
