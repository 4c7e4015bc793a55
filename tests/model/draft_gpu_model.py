"""A draft of the small dense policy of flow_models: python draft_gpu_model.py FOLDER writes FOLDER/draft."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from draft_parts import draft_weights, write_draft
from flow_models import VOCABULARY, make, write_tokenizer

WIDTH, OWN_TOKENS, AUX = 256, 1024, (0, 1)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": OWN_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}


def weights() -> dict[str, torch.Tensor]:
    return draft_weights(CONFIG, aux=len(AUX), dtype=torch.bfloat16, scale=0.05)


def write_models(folder: Path) -> None:
    """The policy, which is not taught, and the draft."""
    make("dense").bfloat16().save_pretrained(folder / "dense")
    write_tokenizer(folder / "dense")
    write_draft(folder / "draft", CONFIG, weights())


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
