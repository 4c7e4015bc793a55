"""A small policy and its draft where no Transformer Engine is installed, and a draft's files.

ModelOpt builds its module of Transformer Engine's norms, linear layer and attention. `plain_layers` puts Megatron's own
in their place: WrappedTorchNorm, post_training.modelopt's Linear and DotProductAttention. All else is ModelOpt's and
Megatron's own code. The states of CUDA's random numbers, which nothing here draws from, are not switched.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.post_training.modelopt.gpt.model_specs as specs
    import modelopt.torch.speculative.plugins.megatron_eagle as eagle
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

VOCABULARY, WIDTH, INNER, HEADS, GROUPS, HEAD, LAYERS, LENGTH = 120, 32, 48, 4, 2, 8, 10, 12
PADDED = 128


class SharedLinear(Linear):
    """Knows, as Transformer Engine's does, over which ranks it is repeated, for checkpoints."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()


class PlainAttention(DotProductAttention):
    """Told with each call, as Transformer Engine's is, what kind of mask it has: none at all for causal attention."""

    def forward(self, query: Any, key: Any, value: Any, mask: Any, attn_mask_type: Any = None, **others: Any) -> Any:
        self.scale_mask_softmax.attn_mask_type = attn_mask_type
        return super().forward(query, key, value, mask, attn_mask_type, **others)


def plain_norm(_: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
    """Torch's own norm, marked as Transformer Engine's is where each rank sees a part of every sequence."""
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def plain_layers() -> None:
    """In this process from now on."""
    places: list[tuple[Any, str, Any]] = [
        (specs, "Norm", WrappedTorchNorm),
        (specs, "TEDotProductAttention", PlainAttention),
        (eagle, "TENorm", WrappedTorchNorm),
        (eagle, "TELinear", SharedLinear),
    ]
    for module, name, plain in places:
        mock.patch.object(module, name, plain).start()
    mock.patch.object(WrappedTorchNorm, "__new__", plain_norm).start()  # (it refuses sequence parallelism)
    mock.patch.object(CudaRNGStatesTracker, "fork", contextlib.nullcontext).start()


def make_policy(*, tensor: int = 1, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A GPTModel on the CPU, and its config, which stands for the provider: it has the policy's vocab_size too."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        ffn_hidden_size=INNER,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD,
        tensor_model_parallel_size=tensor,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    config.vocab_size = VOCABULARY
    torch.manual_seed(1)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )


def draft_config(**changes: Any) -> dict[str, Any]:
    """What stands in the config.json of a draft of the policy."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": 50,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0,
        **changes,
    }


def draft_weights(
    config: dict[str, Any], aux: int = 3, dtype: torch.dtype = torch.float32, scale: float = 0.2
) -> dict[str, torch.Tensor]:
    """Random weights of such a draft, under the names of an Eagle-3 draft's files."""
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    several = config["num_hidden_layers"] > 1
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, aux * width), "norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        prefix, read = (f"layers.{layer}." if several else "midlayer."), 2 * width if layer == 0 else width
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (queries, read),
            f"{prefix}self_attn.k_proj.weight": (keys, read),
            f"{prefix}self_attn.v_proj.weight": (keys, read),
            f"{prefix}self_attn.o_proj.weight": (width, queries),
            f"{prefix}mlp.gate_proj.weight": (inner, width),
            f"{prefix}mlp.up_proj.weight": (inner, width),
            f"{prefix}mlp.down_proj.weight": (width, inner),
            f"{prefix}input_layernorm.weight": (width,),
            f"{prefix}post_attention_layernorm.weight": (width,),
        }
        if layer == 0:
            shapes[f"{prefix}hidden_norm.weight"] = (width,)
    shapes["lm_head.weight"] = (vocabulary, width)
    generator = torch.Generator().manual_seed(2)
    tensors = {
        name: ((len(shape) == 1) + scale * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }
    if vocabulary != config["vocab_size"]:
        tokens = torch.randperm(config["vocab_size"], generator=generator)[:vocabulary].sort().values
        tensors["d2t"] = tokens - torch.arange(vocabulary)
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).scatter_(0, tokens, True)
    return tensors


def write_draft(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None) -> Path:
    """A folder with config.json and, if there are any, the tensors in model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder
