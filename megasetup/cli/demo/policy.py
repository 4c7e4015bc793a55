"""The demo's configs: what a trainer's YAML file would say to fine-tune the models with the optimizer on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megasetup.cli.demo.model import LENGTH, SEQUENCES
from megasetup.compat import transformer_engine


def write(model: Path, file: Path, *, fast: bool = True) -> dict[str, Any]:
    """Write the config of a model to a YAML file, and return its policy.

    Args:
        model: the Hugging Face folder.
        file: the YAML file.
        fast: whether our optimizer steps the copies on the CPU; else Megatron's own does.
    """
    policy = _policy(str(model.resolve()))
    if not fast:
        policy["megatron_cfg"]["fast_hybrid_optimizer"] = False
    file.write_text(yaml.safe_dump({"policy": policy}, sort_keys=False))
    return policy


def _policy(model: str) -> dict[str, Any]:
    megatron: dict[str, Any] = {
        "enabled": True,
        "train_iters": 10,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "pipeline_dtype": "bfloat16",
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "gradient_accumulation_fusion": False,
        "optimizer": {
            "optimizer": "adam",
            "lr": 1.0e-5,
            "min_lr": 1.0e-5,
            "weight_decay": 0.0,
            "bf16": True,
            "fp16": False,
            "params_dtype": "float32",
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_eps": 1e-8,
            "use_distributed_optimizer": True,
            "use_precision_aware_optimizer": False,
            "clip_grad": 1.0,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
        },
        "scheduler": {
            "start_weight_decay": 0.0,
            "end_weight_decay": 0.0,
            "weight_decay_incr_style": "constant",
            "lr_decay_style": "constant",
            "lr_decay_iters": 10,
            "lr_warmup_iters": 0,
            "lr_warmup_init": 1.0e-5,
        },
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        },
    }
    if not transformer_engine.is_installed():
        # `make demo` does not install it: it takes nvcc.
        megatron |= {"transformer_impl": "local", "moe_permute_fusion": False}
    return {
        "model_name": model,
        "tokenizer": {"name": model},
        "precision": "bfloat16",
        "train_global_batch_size": SEQUENCES,
        "train_micro_batch_size": SEQUENCES // 2,
        "max_total_sequence_length": LENGTH,
        "megatron_cfg": megatron,
    }
