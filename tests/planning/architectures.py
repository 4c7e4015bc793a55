"""Hugging Face configurations of real and of small models, written where a test wants them, and their providers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from megasetup.compat.bridge import import_bridge

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "dtype": "bfloat16",
}

QWEN2_5_1_5B = {
    **_QWEN2,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN2_5_7B = {
    **_QWEN2,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_235B = {
    **_QWEN3_MOE,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
SMALL = {
    **_QWEN2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 250,
}
SMALL_MOE = {
    **_QWEN3_MOE,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
SMALL_MLA = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "aux_loss_alpha": 0.001,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "vocab_size": 256,
    "dtype": "bfloat16",
}
SMALL_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "rms_norm_eps": 1e-06,
    "sliding_window": 32,
    "tie_word_embeddings": False,
    "vocab_size": 256,
    "dtype": "bfloat16",
}


def write(folder: Path, settings: dict[str, Any]) -> Path:
    """A model folder that holds a configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def provider_of(folder: Path, **fields: Any) -> Any:
    """Bridge's provider for a model folder, in BF16, with some fields set; not finalized."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = import_bridge()
        from transformers import AutoConfig

        hf = AutoConfig.from_pretrained(folder)
        provider = bridge.AutoBridge.from_hf_config(hf).to_megatron_provider(load_weights=False)
    provider.bf16, provider.params_dtype, provider.pipeline_dtype = True, torch.bfloat16, torch.bfloat16
    for name, value in fields.items():
        setattr(provider, name, value)
    return provider


def configs(fraction: float | None = 1.0, *, aware: bool = False, **ddp: Any) -> tuple[Any, Any]:
    """Megatron's own optimizer and DDP configurations."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    offload = {} if fraction is None else {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    optimizer = OptimizerConfig(
        optimizer="adam",
        lr=1e-5,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=aware,
        **offload,
    )
    return optimizer, DistributedDataParallelConfig(
        **{"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **ddp}
    )
