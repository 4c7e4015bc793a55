"""Small real Hugging Face models on disk, and their tensors bit by bit.

Every weight is random, norms included, so that none can pass for another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

KINDS = ("dense", "tied", "moe", "mixed", "latent")
OTHERS = ("Llama", "Qwen2", "Mistral", "GptOss")
VOCABULARY = 320


def make(kind: str, folder: Path, *, layers: int = 2) -> Path:
    """A small model, BF16 but for the bias of experts, which is FP32.

    Args:
        kind: "dense", a Qwen3; "tied", with one table for embedding and output; "moe", a Qwen3 with four experts;
            "mixed", a GLM-4 with one dense layer, then shared and other experts and a bias, and a layer that predicts
            a second token; "latent", a DeepSeek-V3; or the architecture of one of OTHERS.
        folder: where to save it, with a tokenizer.
        layers: how many.
    """
    import transformers
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
    experts: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
    routed: dict[str, Any] = {**experts, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "dense": ("Qwen3", {}),
        "tied": ("Qwen3", {}),
        "moe": ("Qwen3Moe", {**experts, "num_experts": 4}),
        "mixed": ("Glm4Moe", {**routed, "num_nextn_predict_layers": 1}),
        "latent": ("DeepseekV3", routed | _LATENT | {"num_nextn_predict_layers": 0}),
        "GptOss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN}),
    }
    architecture, more = kinds.get(kind, (kind, {}))
    config = getattr(transformers, f"{architecture}Config")(**common | more)
    model: Any = getattr(transformers, f"{architecture}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(sum(kind.encode()))
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases.values()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    kept = {name: bias.clone() for name, bias in biases.items()}
    model.bfloat16()
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.data = kept[name]
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if kind == "mixed":
        _add_second_token(folder, layers, common["hidden_size"], generator)
    _write_tokenizer(folder)
    return folder


def _add_second_token(folder: Path, layers: int, hidden: int, generator: torch.Generator) -> None:
    """Add the tensors of a layer that predicts a second token, which Hugging Face's model leaves out."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    shapes = {new + name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    for name, tensor in shapes.items():
        tensors[name] = (torch.randn(tensor.shape, generator=generator) * 0.1).to(tensor.dtype)
    own = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)}
    for part, shape in own.items():
        tensors[f"{new}{part}.weight"] = (torch.randn(shape, generator=generator) * 0.1).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
}


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def bits(folder: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Every tensor of the safetensors files in a folder: its dtype and its bytes, with its shape kept."""
    from safetensors.torch import load_file

    found: dict[str, tuple[str, torch.Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = (str(tensor.dtype), tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]))
    return found


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = bits(one), bits(other)
    assert first.keys() == second.keys()
    assert len(first) > 20
    for name, (dtype, tensor) in first.items():
        assert second[name][0] == dtype, name
        assert torch.equal(second[name][1], tensor), name
