"""A trainer's file for a small dense or MoE model, written by the test that uses it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

_DENSE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "vocab_size": 256,
    "dtype": "bfloat16",
}
_MOE = {
    **_DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}

# The dense model's parameters: an embedding, two layers (query-key-value with bias, projection, gated MLP, two norms)
# and a norm.
DENSE_PARAMETERS = 256 * 64 + 2 * (64 * 128 + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64

_POLICY: dict[str, Any] = {
    "precision": "bfloat16",
    "train_global_batch_size": 8,
    "train_micro_batch_size": 1,
    "megatron_cfg": {
        "enabled": True,
        "train_iters": 10,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "pipeline_dtype": "bfloat16",
        "optimizer": {
            "optimizer": "adam",
            "lr": 1e-05,
            "min_lr": 1e-06,
            "weight_decay": 0.01,
            "bf16": True,
            "fp16": False,
            "params_dtype": "bfloat16",
            "use_distributed_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
        },
        "scheduler": {"lr_decay_style": "constant"},
        "distributed_data_parallel_config": {"grad_reduce_in_fp32": True, "overlap_grad_reduce": False},
    },
}


def write_config(folder: Path, *, moe: bool = False, **changes: Any) -> Path:
    """A config file and the model folder that it names.

    Args:
        folder: where both go.
        moe: an MoE model.
        changes: values by the path of a key below `policy`, with double underscores for dots.
    """
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(_MOE if moe else _DENSE))
    policy = copy.deepcopy(_POLICY)
    policy["model_name"] = str(model)
    for path, value in changes.items():
        *inner, last = path.split("__")
        section = policy
        for name in inner:
            section = section.setdefault(name, {})
        section[last] = value
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"policy": policy, "cluster": {"num_nodes": 1}}))
    return file


def write_checkpoint(root: Path, model: Path) -> Path:
    """A converted checkpoint as far as it is looked at before it is loaded: Bridge's run_config.yaml, and whole."""
    from megasetup.checkpoint.marks import write_mark
    from megasetup.compat.bridge import import_bridge
    from megasetup.config.provider import provider_from_hf

    iteration = root / "iter_0000000"
    iteration.mkdir(parents=True)
    config = import_bridge("megatron.bridge.training.config")
    provider = provider_from_hf({}, str(model))
    provider.finalize()
    container = config.ConfigContainer(
        model=provider,
        train=config.TrainingConfig(train_iters=1, micro_batch_size=1, global_batch_size=1),
        optimizer=config.OptimizerConfig(),
        scheduler=config.SchedulerConfig(),
        dataset=None,
        logger=config.LoggerConfig(),
        tokenizer=config.TokenizerConfig(),
        checkpoint=config.CheckpointConfig(),
    )
    container.to_yaml(str(iteration / "run_config.yaml"))
    (root / "latest_checkpointed_iteration.txt").write_text("0")
    write_mark(root, {})
    return root
