"""Small real Hugging Face models on disk, and their tensors bit by bit.

Every weight is random, norms included, so that none can pass for another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

KINDS = ("dense", "tied", "moe")
VOCABULARY = 320


def make(kind: str, folder: Path, *, layers: int = 2) -> Path:
    """A Qwen3 ("dense"; "tied" with one table for embedding and output) or a Qwen3 with four experts ("moe"), BF16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": kind == "tied",
    }
    if kind == "moe":
        config = Qwen3MoeConfig(**common, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
        model: Any = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    generator = torch.Generator().manual_seed(sum(kind.encode()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    logging.disable_progress_bar()
    model.bfloat16().save_pretrained(folder)
    return folder


def bits(folder: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Every tensor of the safetensors files in a folder: its dtype and its bytes, with its shape kept."""
    from safetensors.torch import load_file

    found: dict[str, tuple[str, torch.Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = (str(tensor.dtype), tensor.view(torch.int16) if tensor.element_size() == 2 else tensor)
    return found


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = bits(one), bits(other)
    assert first.keys() == second.keys()
    assert len(first) > 20
    for name, (dtype, tensor) in first.items():
        assert second[name][0] == dtype, name
        assert torch.equal(second[name][1], tensor), name
