"""A small Hugging Face model on disk, made on the spot so that the demo needs no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megasetup.cli.errors import CommandError

try:
    from safetensors import safe_open
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging
except ImportError as error:
    raise CommandError("the demo needs transformers and safetensors: pip install 'megasetup[demo]'") from error


def config() -> Qwen3Config:
    """A Qwen3 of about 28 M parameters."""
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def build(seed: int) -> Any:
    """The model in BF16 with random weights drawn from `seed`, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config()).to(torch.bfloat16)


def save(folder: Path, seed: int) -> None:
    """Write such a model as Hugging Face does: config.json and model.safetensors."""
    logging.disable_progress_bar()
    build(seed).save_pretrained(folder)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files, on the CPU."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                tensors[name] = opened.get_tensor(name)
    return tensors
