"""The named shape sets of the benchmarks: the weights of real models, as Megatron holds them on one rank.

Megatron fuses query, key and value into one tensor, gate and up into another, and keeps each layer norm as a tensor of
its own; so the tensor counts here are those that a sync really walks, not those of the Hugging Face checkpoint.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tensors = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Shapes:
    """Named tensors, in the model's order.

    Attributes:
        name: what the set is called on the command line.
        tensors: (name, shape) pairs.
    """

    name: str
    tensors: Tensors

    @property
    def counts(self) -> list[int]:
        """Elements of each tensor."""
        return [math.prod(shape) for _, shape in self.tensors]

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(self.counts)


@dataclass(frozen=True)
class _Decoder:
    """A decoder-only transformer with grouped-query attention and a gated MLP; experts replace the MLP when given."""

    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int
    vocabulary: int
    qkv_bias: bool = False
    qk_norm: int = 0
    experts: int = 0
    routed: int = 0
    tied: bool = False

    def tensors(self, layers: int) -> Tensors:
        found: list[tuple[str, tuple[int, ...]]] = [
            ("embedding.word_embeddings.weight", (self.vocabulary, self.hidden))
        ]
        for layer in range(layers):
            found += [(f"decoder.layers.{layer}.{name}", shape) for name, shape in self._layer()]
        found.append(("decoder.final_layernorm.weight", (self.hidden,)))
        if not self.tied:
            found.append(("output_layer.weight", (self.vocabulary, self.hidden)))
        return tuple(found)

    def _layer(self) -> Tensors:
        fused = self.query + 2 * self.key_value
        found: list[tuple[str, tuple[int, ...]]] = [
            ("self_attention.linear_proj.weight", (self.hidden, self.query)),
            ("self_attention.linear_qkv.layer_norm_weight", (self.hidden,)),
            ("self_attention.linear_qkv.weight", (fused, self.hidden)),
        ]
        if self.qkv_bias:
            found.append(("self_attention.linear_qkv.bias", (fused,)))
        if self.qk_norm:
            found.append(("self_attention.q_layernorm.weight", (self.qk_norm,)))
            found.append(("self_attention.k_layernorm.weight", (self.qk_norm,)))
        if not self.experts:
            return (
                *found,
                ("mlp.linear_fc1.layer_norm_weight", (self.hidden,)),
                ("mlp.linear_fc1.weight", (2 * self.mlp, self.hidden)),
                ("mlp.linear_fc2.weight", (self.hidden, self.mlp)),
            )
        found.append(("pre_mlp_layernorm.weight", (self.hidden,)))
        found.append(("mlp.router.weight", (self.routed, self.hidden)))
        for expert in range(self.experts):
            found.append((f"mlp.experts.linear_fc1.weight{expert}", (2 * self.mlp, self.hidden)))
        for expert in range(self.experts):
            found.append((f"mlp.experts.linear_fc2.weight{expert}", (self.hidden, self.mlp)))
        return tuple(found)


_MODELS = {
    "qwen2.5-7b": _Decoder(28, 3584, 3584, 512, 18944, 152064, qkv_bias=True),
    "qwen2.5-1.5b": _Decoder(28, 1536, 1536, 256, 8960, 151936, qkv_bias=True, tied=True),
    # What one of four expert-parallel ranks holds, with the vocabulary split in four as well: 32 of the 128 experts
    # that its router chooses from.
    "qwen3-30b-a3b-quarter": _Decoder(48, 2048, 4096, 512, 768, 151936 // 4, qk_norm=128, experts=32, routed=128),
    "llama-3.1-8b": _Decoder(32, 4096, 4096, 1024, 14336, 128256),
    "tiny": _Decoder(4, 256, 256, 64, 704, 2048, qk_norm=32, experts=4, routed=8),
}

NAMES = tuple(_MODELS)


def named(name: str, scale: float = 1.0) -> Shapes:
    """A named shape set.

    Args:
        name: one of NAMES.
        scale: keep this share of the layers (at least one layer stays).

    Raises:
        ValueError: the name is unknown, or scale is not above 0 and at most 1.
    """
    if name not in _MODELS:
        raise ValueError(f"shapes {name!r} are unknown: choose from {', '.join(NAMES)}, or give --safetensors DIR")
    if not 0 < scale <= 1:
        raise ValueError(f"scale is {scale}: it must be above 0 and at most 1")
    model = _MODELS[name]
    layers = max(1, round(model.layers * scale))
    return Shapes(name if layers == model.layers else f"{name} x{scale:g}", model.tensors(layers))


def of_safetensors(folder: Path) -> Shapes:
    """The floating-point tensors of every *.safetensors file in a folder; only the files' headers are read.

    Raises:
        FileNotFoundError: the folder holds no such file.
        ValueError: a file's header is not that of a safetensors file, or no file holds a floating-point tensor.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors file: give the folder of a Hugging Face checkpoint")
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__" and entry["dtype"] in ("BF16", "F16", "F32", "F64"):
                tensors.append((name, tuple(entry["shape"])))
    if not tensors:
        raise ValueError(f"{folder} holds no floating-point tensor in its {len(files)} *.safetensors files")
    return Shapes(folder.resolve().name, tuple(tensors))


def _header(file: Path) -> dict[str, dict[str, Any]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        # A header is at most 100 MB by the format; a larger length means another kind of file.
        if not 0 < length <= 100_000_000:
            raise ValueError(f"{file} is not a safetensors file: its header would be {length} bytes long")
        try:
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is not a safetensors file: its header is not JSON ({error})") from error
    return header
