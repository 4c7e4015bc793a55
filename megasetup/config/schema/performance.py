"""megatron_cfg: recomputation, fusions, attention, CUDA graphs, fp8, activation offloading, logits."""

from typing import Annotated, Literal, Required, TypedDict

from .key import Count, Fraction, Key, Size, section


@section
class Fp8Config(TypedDict, total=False):
    """8-bit floating point."""

    enabled: Required[Annotated[bool, Key("Computes in fp8; the other three keys are needed then.", "this section")]]
    fp8: Annotated[Literal["e4m3", "hybrid"], Key("The 8-bit format.", "provider.fp8", "needed when enabled")]
    fp8_recipe: Annotated[
        Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"],
        Key("How scales are chosen.", "provider.fp8_recipe", "needed when enabled"),
    ]
    fp8_param: Annotated[
        bool,
        Key(
            "Keeps the weights themselves in fp8; derives fp8_param_gather and, with mxfp8, "
            "reuse_grad_buf_for_mxfp8_param_ag.",
            "provider.fp8_param, ddp.fp8_param_gather",
            "needed when enabled",
        ),
    ]


@section
class RecomputeKeys(TypedDict, total=False):
    """Activation checkpointing."""

    activation_checkpointing: Annotated[
        bool | Literal["full", "selective"] | None,
        Key(
            "Recomputes activations in the backward pass: full (the same as true) whole layers one at a time, "
            "selective only recompute_modules.",
            "provider.recompute_granularity, recompute_method, recompute_num_layers",
        ),
    ]
    recompute_modules: Annotated[
        list[str] | None,
        Key(
            "What selective recomputes: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts.",
            "provider.recompute_modules",
        ),
    ]


@section
class KernelKeys(TypedDict, total=False):
    """Fusions, attention, layer implementation."""

    apply_rope_fusion: Annotated[
        bool, Key("Applies rotary embeddings in one fused kernel.", "provider.apply_rope_fusion")
    ]
    bias_activation_fusion: Annotated[
        bool, Key("Fuses the bias with the activation function.", "provider.bias_activation_fusion")
    ]
    gradient_accumulation_fusion: Annotated[
        bool,
        Key("Adds weight gradients to the buffer within the matrix product.", "provider.gradient_accumulation_fusion"),
    ]
    use_fused_weighted_squared_relu: Annotated[
        bool,
        Key("Fuses squared ReLU with the routing weight.", "provider.use_fused_weighted_squared_relu"),
    ]
    attention_backend: Annotated[
        Literal["flash", "fused", "unfused", "local", "auto"],
        Key(
            "Which attention kernel runs; when it is given, NVTE_FUSED_ATTN, NVTE_FLASH_ATTN and NVTE_UNFUSED_ATTN "
            "are removed from the environment.",
            "provider.attention_backend",
            "the provider's; auto for expanded-sequence Nemotron Omni models",
        ),
    ]
    transformer_impl: Annotated[
        Literal["local", "transformer_engine", "inference_optimized"],
        Key(
            "Which implementation layers are built from; inference_optimized with tensor parallelism needs "
            "sequence_parallel.",
            "provider.transformer_impl",
        ),
    ]
    layernorm_epsilon: Annotated[float, Key("The number that norms add to the variance.", "provider.layernorm_epsilon")]


@section
class CudaGraphKeys(TypedDict, total=False):
    """CUDA graphs for training."""

    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"],
        Key(
            "Who captures CUDA graphs; any but none switches Transformer Engine's RNG tracker on.",
            "provider.cuda_graph_impl, provider.use_te_rng_tracker",
        ),
    ]
    cuda_graph_modules: Annotated[
        str | list[str] | None,
        Key(
            "What is captured: attn, mlp, moe, moe_router, moe_preprocess, mamba; an empty list for whole layers.",
            "provider.cuda_graph_modules",
        ),
    ]
    cuda_graph_scope: Annotated[
        str | list[str] | None,
        Key("The older name of cuda_graph_modules.", "provider.cuda_graph_scope"),
    ]
    cuda_graph_warmup_steps: Annotated[
        Count, Key("Steps that run before the capture.", "provider.cuda_graph_warmup_steps")
    ]


@section
class OffloadKeys(TypedDict, total=False):
    """Fine-grained activation offloading."""

    fine_grained_activation_offloading: Annotated[
        bool,
        Key(
            "Keeps the input of offload_modules in host memory until the backward pass; false clears the list.",
            "provider.fine_grained_activation_offloading",
        ),
    ]
    offload_modules: Annotated[
        list[str] | None,
        Key(
            "Which: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm; expert_fc1, moe_act and fused_group_mlp "
            "need an MoE model.",
            "provider.offload_modules",
        ),
    ]
    min_offloaded_tensor_size: Annotated[
        Count, Key("Elements below which a tensor stays on the GPU.", "provider.min_offloaded_tensor_size")
    ]
    activation_offload_fraction: Annotated[
        Fraction, Key("The share of eligible groups that moves.", "provider.activation_offload_fraction")
    ]


@section
class LogitsKeys(TypedDict, total=False):
    """Logits and log-probabilities."""

    defer_fp32_logits: Annotated[
        bool,
        Key(
            "Leaves logits in the model's dtype until a chunk needs them in FP32; policy.logprob_chunk_size needs it.",
            "finalize and the forward pass of the trainer",
            "false",
        ),
    ]
    use_fused_linear_logprobs: Annotated[
        bool,
        Key(
            "Computes log-probabilities from hidden states without whole logits; excludes context parallelism and "
            "overlap_param_gather.",
            "linear_logprobs_of, for the trainer's forward pass",
            "false",
        ),
    ]
    fused_linear_logprobs_chunk_size: Annotated[
        Size | None, Key("Tokens in each of its chunks.", "linear_logprobs_of", "1024")
    ]
