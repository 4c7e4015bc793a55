"""megatron_cfg: the optimizer, its schedule, data parallelism.

The optimizer's section goes into Megatron's OptimizerConfig field by field, so every field of that class may stand
there, also one that a later Megatron adds.
"""

from typing import Annotated, Literal, TypedDict

from .key import Count, DtypeName, Fraction, Key, Size, open_section

_OPTIMIZER = "Megatron's"


@open_section
class OptimizerConfig(TypedDict, total=False):
    """The optimizer. Fields of Megatron's OptimizerConfig that are not listed are passed on."""

    optimizer: Annotated[
        str,
        Key(
            "adam, sgd, muon or another that Megatron knows; CPU offload needs adam or sgd.", "OptimizerConfig", "adam"
        ),
    ]
    lr: Annotated[float | None, Key("The learning rate at its highest.", "OptimizerConfig", _OPTIMIZER)]
    min_lr: Annotated[float | None, Key("The learning rate at its lowest.", "OptimizerConfig", _OPTIMIZER)]
    decoupled_lr: Annotated[
        float | None, Key("Another highest rate for embeddings and the output layer.", "OptimizerConfig", "lr")
    ]
    decoupled_min_lr: Annotated[float | None, Key("The lowest value of that rate.", "OptimizerConfig", "min_lr")]
    weight_decay: Annotated[float, Key("Weight decay.", "OptimizerConfig", "0.01")]
    decoupled_weight_decay: Annotated[
        bool, Key("AdamW's weight decay, not one added to the gradient.", "OptimizerConfig", "true")
    ]
    apply_wd_to_qk_layernorm: Annotated[
        bool, Key("Decays the norms of queries and keys too.", "OptimizerConfig", "false")
    ]
    clip_grad: Annotated[float, Key("The gradient's norm is cut to this; 0 leaves it.", "OptimizerConfig", "1.0")]
    bf16: Annotated[
        bool, Key("The model is in bfloat16; must agree with policy.precision.", "OptimizerConfig", "false")
    ]
    fp16: Annotated[bool, Key("The model is in float16; must agree with policy.precision.", "OptimizerConfig", "false")]
    params_dtype: Annotated[
        DtypeName,
        Key("The dtype of the parameters; must agree with policy.precision.", "OptimizerConfig", "float32"),
    ]
    adam_beta1: Annotated[Fraction, Key("The decay of Adam's first moment.", "OptimizerConfig", "0.9")]
    adam_beta2: Annotated[Fraction, Key("The decay of Adam's second moment.", "OptimizerConfig", "0.999")]
    adam_eps: Annotated[float, Key("What Adam adds to the denominator.", "OptimizerConfig", "1e-08")]
    sgd_momentum: Annotated[float, Key("SGD's momentum.", "OptimizerConfig", "0.9")]
    muon_momentum: Annotated[float, Key("Muon's momentum.", "OptimizerConfig", "0.95")]
    use_distributed_optimizer: Annotated[
        bool,
        Key(
            "Shards optimizer state over data-parallel ranks; CPU offload needs it.",
            "OptimizerConfig, ddp.use_distributed_optimizer",
            "false",
        ),
    ]
    use_layer_wise_distributed_optimizer: Annotated[
        bool, Key("Gives each rank whole layers instead of shards.", "OptimizerConfig", "false")
    ]
    use_precision_aware_optimizer: Annotated[
        bool, Key("Keeps the state in the dtypes below instead of FP32.", "OptimizerConfig", "false")
    ]
    store_param_remainders: Annotated[
        bool, Key("Keeps the 16 bits that BF16 drops instead of an FP32 copy.", "OptimizerConfig", "true")
    ]
    main_grads_dtype: Annotated[DtypeName, Key("The dtype of gradients for the step.", "OptimizerConfig", "float32")]
    main_params_dtype: Annotated[DtypeName, Key("The dtype of master weights.", "OptimizerConfig", "float32")]
    exp_avg_dtype: Annotated[DtypeName, Key("The dtype of the first moment.", "OptimizerConfig", "float32")]
    exp_avg_sq_dtype: Annotated[DtypeName, Key("The dtype of the second moment.", "OptimizerConfig", "float32")]
    optimizer_cpu_offload: Annotated[
        bool,
        Key(
            "Steps on the CPU; needs use_distributed_optimizer, adam or sgd, and a fraction above 0.",
            "OptimizerConfig",
            "false",
        ),
    ]
    optimizer_offload_fraction: Annotated[
        Fraction, Key("The share of the parameters whose optimizer is on the CPU.", "OptimizerConfig", "0.0")
    ]
    use_torch_optimizer_for_cpu_offload: Annotated[
        bool, Key("Uses torch's optimizer on the GPU too.", "OptimizerConfig", "false")
    ]
    overlap_cpu_optimizer_d2h_h2d: Annotated[
        bool, Key("Copies while the CPU steps; needs optimizer_cpu_offload.", "OptimizerConfig", "false")
    ]
    pin_cpu_grads: Annotated[bool, Key("Pins the CPU's gradients.", "OptimizerConfig", "true")]
    pin_cpu_params: Annotated[bool, Key("Pins the CPU's parameters.", "OptimizerConfig", "true")]
    loss_scale: Annotated[float | None, Key("A fixed loss scale for float16.", "OptimizerConfig", "a dynamic one")]
    initial_loss_scale: Annotated[float, Key("Where the dynamic scale starts.", "OptimizerConfig", "2**32")]
    min_loss_scale: Annotated[float, Key("Where the dynamic scale stops.", "OptimizerConfig", "1.0")]
    loss_scale_window: Annotated[float, Key("Steps after which the dynamic scale grows.", "OptimizerConfig", "1000")]
    hysteresis: Annotated[Count, Key("Overflows before the dynamic scale shrinks.", "OptimizerConfig", "2")]
    log_num_zeros_in_grad: Annotated[bool, Key("Counts zeros of the gradient.", "OptimizerConfig", "false")]
    optimizer_cuda_graph: Annotated[bool, Key("Captures the step in a CUDA graph.", "OptimizerConfig", "false")]


@open_section
class SchedulerConfig(TypedDict, total=False):
    """How learning rate and weight decay move. Fields of Bridge's SchedulerConfig that are not listed are passed on."""

    start_weight_decay: Annotated[
        float | None, Key("Weight decay at the start.", "SchedulerConfig", "the optimizer's weight_decay")
    ]
    end_weight_decay: Annotated[
        float | None, Key("Weight decay at the end.", "SchedulerConfig", "the optimizer's weight_decay")
    ]
    weight_decay_incr_style: Annotated[
        Literal["constant", "linear", "cosine"],
        Key("How it gets from start to end.", "SchedulerConfig", "constant"),
    ]
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        Key("The curve from lr to min_lr.", "SchedulerConfig", "linear"),
    ]
    lr_decay_iters: Annotated[
        Size | None, Key("The step at which the rate reaches min_lr.", "SchedulerConfig", "train_iters")
    ]
    lr_warmup_iters: Annotated[Count, Key("Steps up to lr.", "SchedulerConfig", "0")]
    lr_warmup_init: Annotated[float, Key("The rate at which the warm-up starts.", "SchedulerConfig", "0.0")]
    lr_warmup_fraction: Annotated[
        Fraction | None, Key("The warm-up as a share of the decay's steps.", "SchedulerConfig", "lr_warmup_iters")
    ]
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"],
        Key("The last phase of WSD.", "SchedulerConfig", "exponential"),
    ]
    lr_wsd_decay_iters: Annotated[Size | None, Key("The steps of that phase.", "SchedulerConfig", "none")]
    lr_decay_samples: Annotated[Size | None, Key("lr_decay_iters in samples.", "SchedulerConfig", "lr_decay_iters")]
    lr_wsd_decay_samples: Annotated[
        Size | None, Key("lr_wsd_decay_iters in samples.", "SchedulerConfig", "lr_wsd_decay_iters")
    ]
    lr_warmup_samples: Annotated[Count, Key("lr_warmup_iters in samples.", "SchedulerConfig", "0")]
    override_opt_param_scheduler: Annotated[
        bool, Key("Takes these values and not a checkpoint's.", "SchedulerConfig", "false")
    ]
    use_checkpoint_opt_param_scheduler: Annotated[
        bool, Key("Takes a checkpoint's values and not these.", "SchedulerConfig", "false")
    ]
    no_weight_decay_cond_type: Annotated[
        Literal["qwen3_next"] | None, Key("A rule for parameters without weight decay.", "SchedulerConfig", "none")
    ]


@open_section
class DistributedDataParallelConfig(TypedDict, total=False):
    """Gradients across data-parallel ranks. Fields of Megatron's class that are not listed are passed on."""

    grad_reduce_in_fp32: Annotated[bool, Key("Sums gradients in FP32.", "ddp.grad_reduce_in_fp32", "Megatron's")]
    overlap_grad_reduce: Annotated[
        bool, Key("Sums them while the backward pass runs.", "ddp.overlap_grad_reduce", "Megatron's")
    ]
    overlap_param_gather: Annotated[
        bool,
        Key(
            "Gathers weights while the forward pass runs; excludes use_fused_linear_logprobs.",
            "ddp.overlap_param_gather, optimizer.overlap_param_gather",
            "Megatron's",
        ),
    ]
    align_param_gather: Annotated[
        bool,
        Key("Starts that gather at the same moment on all pipeline stages.", "ddp.align_param_gather", "Megatron's"),
    ]
    data_parallel_sharding_strategy: Annotated[
        str, Key("What Megatron-FSDP shards.", "ddp.data_parallel_sharding_strategy", "no_shard")
    ]
    use_custom_fsdp: Annotated[bool, Key("The older name of use_megatron_fsdp.", "ddp.use_custom_fsdp", "false")]
    use_megatron_fsdp: Annotated[bool, Key("Shards with Megatron-FSDP.", "ddp.use_megatron_fsdp", "false")]
    bucket_size: Annotated[Size | None, Key("Parameters in a gradient bucket.", "ddp.bucket_size", "Megatron's")]
    num_distributed_optimizer_instances: Annotated[
        Size,
        Key("Copies of the sharded optimizer.", "ddp.num_distributed_optimizer_instances", "1"),
    ]
