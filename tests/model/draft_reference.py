"""An Eagle-3 draft of one layer in plain torch, from its files' tensors: what the real one must compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, weight.shape, weight, eps=1e-5)


def rotated(states: torch.Tensor, theta: float) -> torch.Tensor:
    """[batch, heads, sequence, head size] with Llama's rotary embedding."""
    size, length = states.shape[-1], states.shape[-2]
    angles = torch.outer(torch.arange(length).float(), theta ** -(torch.arange(0, size, 2).float() / size))
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat((-second, first), -1) * sin


def eagle_3(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], hidden: torch.Tensor, embeddings: torch.Tensor
) -> torch.Tensor:
    """The logits of an Eagle-3 draft of one layer in plain torch, batch first."""
    part = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
    hidden = hidden @ part["fc.weight"].T
    read = torch.cat((norm(embeddings, part["input_layernorm.weight"]), norm(hidden, part["hidden_norm.weight"])), -1)

    def heads(name: str) -> torch.Tensor:
        return (read @ part[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, config["head_dim"])).transpose(1, 2)

    attention = F.scaled_dot_product_attention(
        rotated(heads("q"), config["rope_theta"]),
        rotated(heads("k"), config["rope_theta"]),
        heads("v"),
        is_causal=True,
        enable_gqa=True,
    )
    hidden = hidden + attention.transpose(1, 2).flatten(2) @ part["self_attn.o_proj.weight"].T
    read = norm(hidden, part["post_attention_layernorm.weight"])
    inner = F.silu(read @ part["mlp.gate_proj.weight"].T) * (read @ part["mlp.up_proj.weight"].T)
    hidden = hidden + inner @ part["mlp.down_proj.weight"].T
    return norm(hidden, part["norm.weight"]) @ part["lm_head.weight"].T
