"""Small Hugging Face models on disk, made on the spot so that the demo needs no download, and what they are taught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megasetup.cli.errors import CommandError

try:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging
except ImportError as error:
    raise CommandError("the demo needs transformers and safetensors: pip install 'megasetup[demo]'") from error

VOCABULARY, SEQUENCES, LENGTH = 4096, 4, 64
TAUGHT_BELOW = 0.02  # of the loss
_MOST_STEPS = 1000


def build(kind: str, seed: int = 0) -> Any:
    """A model in FP32 with random weights, on the CPU.

    Args:
        kind: "dense", a Qwen3 of about 28 M parameters; "moe", one of about 36 M with four experts a layer.
        seed: what the weights are drawn from.
    """
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "dense":
            return Qwen3ForCausalLM(Qwen3Config(**common))
        experts = {"moe_intermediate_size": 512, "num_experts": 4, "num_experts_per_tok": 2}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, router_aux_loss_coef=0.0))


def save(model: Any, folder: Path) -> None:
    """Write a model in BF16 as Hugging Face does, with a tokenizer of whole words w0, w1 and so on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    logging.disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2")
    tokenizer.save_pretrained(folder)


def batch(device: torch.device) -> torch.Tensor:
    """The one batch of the demo: random tokens of shape [SEQUENCES, LENGTH + 1], int64."""
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0)).to(device)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of each next token, as Hugging Face computes it."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def teach(model: Any, device: torch.device) -> tuple[int, float]:
    """Teach a model the batch, on its device.

    Returns:
        The steps that it took, and the loss after them.

    Raises:
        CommandError: it did not learn it.
    """
    tokens = batch(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    for step in range(_MOST_STEPS):
        loss = loss_of(model, tokens)
        found = loss.item()
        if found < TAUGHT_BELOW:
            return step, found
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    raise CommandError(f"the model did not learn its batch: the loss is {found:.3f} after {_MOST_STEPS} steps")
