"""The named shape sets have the sizes that they are quoted with."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megasetup.cli import shapes


@pytest.mark.parametrize(
    ("name", "tensors", "billions"),
    [("qwen2.5-7b", 199, 7.62), ("qwen3-30b-a3b-quarter", 3411, 8.32), ("llama-3.1-8b", 195, 8.03)],
)
def test_sizes_of_real_models(name, tensors, billions):
    found = shapes.named(name)
    assert len(found.tensors) == tensors
    assert round(found.parameters / 1e9, 2) == billions


def test_qwen_7b_has_exactly_the_published_parameter_count():
    # Qwen2.5-7B: 7,615,616,512 parameters in its safetensors index.
    assert shapes.named("qwen2.5-7b").parameters == 7_615_616_512


def test_llama_8b_has_exactly_the_published_parameter_count():
    assert shapes.named("llama-3.1-8b").parameters == 8_030_261_248


@pytest.mark.parametrize("name", shapes.NAMES)
def test_names_are_unique(name):
    names = [tensor for tensor, _ in shapes.named(name).tensors]
    assert len(set(names)) == len(names)


def test_scale_keeps_that_share_of_the_layers():
    whole, half = shapes.named("qwen2.5-7b"), shapes.named("qwen2.5-7b", 0.5)
    assert len(half.tensors) == 3 + 14 * 7
    assert half.name == "qwen2.5-7b x0.5"
    assert whole.parameters - half.parameters == 14 * sum(
        count for (name, _), count in zip(whole.tensors, whole.counts, strict=True) if ".layers.0." in name
    )


@pytest.mark.parametrize("scale", [0, -1, 1.5])
def test_scale_out_of_range(scale):
    with pytest.raises(ValueError, match=f"scale is {scale}"):
        shapes.named("tiny", scale)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'huge'.*qwen2\.5-7b.*tiny"):
        shapes.named("huge")


def test_safetensors_folder(tmp_path):
    save_file({"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7)}, tmp_path / "x-00001.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.int64)}, tmp_path / "x-00002.safetensors", metadata={"format": "pt"})
    found = shapes.of_safetensors(tmp_path)
    assert dict(found.tensors) == {"a": (3, 5), "b": (7,)}
    assert found.parameters == 22


def test_folder_without_safetensors(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no"):
        shapes.of_safetensors(tmp_path)


def test_file_that_is_not_safetensors(tmp_path):
    (tmp_path / "x.safetensors").write_text("this is not the file that its name says")
    with pytest.raises(ValueError, match="not a safetensors file"):
        shapes.of_safetensors(tmp_path)


def test_header_that_is_not_json(tmp_path):
    (tmp_path / "x.safetensors").write_bytes((4).to_bytes(8, "little") + b"nope")
    with pytest.raises(ValueError, match="not JSON"):
        shapes.of_safetensors(tmp_path)


def test_folder_of_integers_alone(tmp_path):
    header = json.dumps({"ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="no floating-point tensor"):
        shapes.of_safetensors(tmp_path)
