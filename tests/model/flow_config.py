"""A policy config for the small models, as a trainer's YAML file would give it."""

from __future__ import annotations

from typing import Any


def policy_config(
    model: str,
    *,
    precision_aware: bool = False,
    fraction: float | None = 1.0,
    overlap: bool = False,
    **megatron: Any,
) -> dict[str, Any]:
    """The config.

    Args:
        model: the Hugging Face folder.
        precision_aware: whether the optimizer is.
        fraction: the part of the weights that is offloaded; None for no offload.
        overlap: whether gradients and parameters travel while others compute.
        megatron: more keys of megatron_cfg.
    """
    offload = {} if fraction is None else {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    return {
        "model_name": model,
        "tokenizer": {"name": model},
        "precision": "bfloat16",
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 64,
        "megatron_cfg": {
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
                "params_dtype": "bfloat16" if precision_aware else "float32",
                "adam_beta1": 0.9,
                "adam_beta2": 0.999,
                "adam_eps": 1e-8,
                "use_distributed_optimizer": True,
                "use_precision_aware_optimizer": precision_aware,
                "clip_grad": 1.0,
                **offload,
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
                "overlap_grad_reduce": overlap,
                "overlap_param_gather": overlap,
            },
            **megatron,
        },
    }
