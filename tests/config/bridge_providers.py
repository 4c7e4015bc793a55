"""Real Megatron-Bridge providers for tests of settings, made from small Hugging Face configs without any network."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megasetup.compat.bridge import import_bridge

pytest.importorskip("megatron.core")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron-bridge is not installed", allow_module_level=True)

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_QWEN3 = _COMMON | {"head_dim": 16, "rope_theta": 1e6}

HF_CONFIGS: dict[str, dict[str, Any]] = {
    "dense": _QWEN3 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "moe": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    },
    "vision": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "bfloat16",
        "text_config": _COMMON
        | {
            "model_type": "qwen2_5_vl_text",
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
        },
    },
}


def write_hf_folder(kind: str, folder: Path) -> str:
    """Write the config.json of a model and return the folder's name, which stands for a Hugging Face id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIGS[kind]))
    return str(folder)


@functools.cache
def _made(kind: str) -> Any:
    bridge = import_bridge()
    if kind == "omni":  # has a switch for each tower
        return import_bridge("megatron.bridge.models.nemotron_omni").NemotronOmniModelProvider(
            hidden_size=64, num_layers=2, num_attention_heads=4
        )
    with tempfile.TemporaryDirectory() as folder:
        name = write_hf_folder(kind, Path(folder))
        return bridge.AutoBridge.from_hf_pretrained(name).to_megatron_provider(load_weights=False)


def provider(kind: str = "dense") -> Any:
    """A provider of its own: "dense" (Qwen3), "moe" (Qwen3-MoE), "vision" (Qwen2.5-VL) or "omni" (Nemotron Omni)."""
    return copy.deepcopy(_made(kind))


def changes(model_cfg: Any, kind: str = "dense") -> dict[str, Any]:
    """The fields in which a provider differs from a fresh one of its kind."""
    fresh = vars(provider(kind))
    return {name: value for name, value in vars(model_cfg).items() if name not in fresh or value != fresh[name]}


def policy(**megatron_cfg: Any) -> dict[str, Any]:
    """A policy config with nothing but these settings of Megatron."""
    return {"megatron_cfg": megatron_cfg}
