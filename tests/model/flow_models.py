"""Small real models on disk, as Hugging Face saves them, and the batch that they are taught.

python flow_models.py FOLDER makes FOLDER/dense and FOLDER/moe on the GPU, teaches each one batch, and writes what
Hugging Face computes with the saved BF16 weights to FOLDER/facts.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

VOCABULARY, SEQUENCES, LENGTH = 2048, 4, 64
TAUGHT, UNKNOWN = 0, 1  # seeds of the batch that is taught, and of one that is not


def batch(seed: int, device: str = "cuda") -> torch.Tensor:
    """Random tokens of shape [SEQUENCES, LENGTH + 1], int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator).to(device)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words w0, w1 ..., as many as the models have."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2").save_pretrained(
        folder
    )


def make(kind: str) -> Any:
    """A Qwen3 ("dense") or a Qwen3 with four experts ("moe"), two layers, FP32, random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**common))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0
        )
    )


def error_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def teach(model: Any) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    tokens = batch(TAUGHT)
    loss = float("inf")
    for _ in range(3000):
        error = error_of(model, tokens)
        loss = error.item()
        if loss < 0.02:
            break
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return loss


def main() -> None:
    folder = Path(sys.argv[1])
    facts: dict[str, Any] = {}
    for kind in ("dense", "moe"):
        model = make(kind).cuda()
        taught = teach(model)
        model = model.bfloat16().eval()
        model.save_pretrained(folder / kind)
        write_tokenizer(folder / kind)
        with torch.no_grad():
            known, unknown = error_of(model, batch(TAUGHT)).item(), error_of(model, batch(UNKNOWN)).item()
        facts[kind] = {"taught": taught, "known": known, "unknown": unknown}
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
