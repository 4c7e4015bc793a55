"""megatron_cfg: how the model is spread over GPUs, its experts, and multi-token prediction."""

from typing import Annotated, Any, Literal, TypedDict

from .key import Count, DtypeName, Key, Size, section


@section
class ParallelismKeys(TypedDict, total=False):
    """Parallel sizes and the pipeline's layout."""

    tensor_model_parallel_size: Annotated[
        Size, Key("GPUs that share each weight matrix.", "provider.tensor_model_parallel_size")
    ]
    pipeline_model_parallel_size: Annotated[
        Size, Key("Stages that the layers are cut into.", "provider.pipeline_model_parallel_size")
    ]
    num_layers_in_first_pipeline_stage: Annotated[
        Size | None,
        Key(
            "Layers of the first stage where the split is uneven.",
            "provider.num_layers_in_first_pipeline_stage",
            "an even split",
        ),
    ]
    num_layers_in_last_pipeline_stage: Annotated[
        Size | None,
        Key(
            "Layers of the last stage where the split is uneven.",
            "provider.num_layers_in_last_pipeline_stage",
            "an even split",
        ),
    ]
    context_parallel_size: Annotated[
        Size,
        Key(
            "GPUs that share each sequence; above 1 it needs sequence_packing.enabled and no fused linear logprobs.",
            "provider.context_parallel_size",
        ),
    ]
    sequence_parallel: Annotated[
        bool,
        Key("Shares norms and dropout over the tensor-parallel GPUs along the sequence.", "provider.sequence_parallel"),
    ]
    pipeline_dtype: Annotated[
        DtypeName | None, Key("The dtype in which stages pass activations on.", "provider.pipeline_dtype")
    ]


@section
class MoeKeys(TypedDict, total=False):
    """Mixture of experts."""

    expert_tensor_parallel_size: Annotated[
        Size | None, Key("GPUs that share each expert's matrices.", "provider.expert_tensor_parallel_size")
    ]
    expert_model_parallel_size: Annotated[
        Size, Key("GPUs that share out the experts.", "provider.expert_model_parallel_size")
    ]
    moe_router_dtype: Annotated[
        Literal["fp32", "fp64"] | None, Key("The dtype of the router's arithmetic.", "provider.moe_router_dtype")
    ]
    moe_router_load_balancing_type: Annotated[
        str | list[str],
        Key(
            "How tokens are balanced over experts: none, aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or "
            "quantile_balancing; a list combines losses.",
            "provider.moe_router_load_balancing_type",
        ),
    ]
    moe_router_bias_update_rate: Annotated[
        float, Key("How far a step moves each expert's bias.", "provider.moe_router_bias_update_rate")
    ]
    moe_router_num_groups: Annotated[
        Size | None,
        Key(
            "Groups of experts for group-limited routing; None for inference_optimized when it is 1.",
            "provider.moe_router_num_groups",
        ),
    ]
    moe_router_group_topk: Annotated[
        Size | None,
        Key(
            "Groups that a token may go to; None for inference_optimized when there is one group.",
            "provider.moe_router_group_topk",
        ),
    ]
    moe_enable_deepep: Annotated[bool, Key("Dispatches tokens with DeepEP.", "provider.moe_enable_deepep")]
    moe_token_dispatcher_type: Annotated[
        Literal["allgather", "alltoall", "flex"],
        Key("How tokens travel to their experts.", "provider.moe_token_dispatcher_type"),
    ]
    moe_flex_dispatcher_backend: Annotated[
        Literal["deepep", "hybridep", "ncclep"],
        Key(
            "What the flex dispatcher sends tokens with; hybridep also sets its environment variables.",
            "provider.moe_flex_dispatcher_backend",
        ),
    ]
    moe_shared_expert_overlap: Annotated[
        bool, Key("Computes the shared experts while tokens travel.", "provider.moe_shared_expert_overlap")
    ]
    moe_permute_fusion: Annotated[
        bool, Key("Sorts tokens by expert in one fused kernel.", "provider.moe_permute_fusion")
    ]
    moe_grouped_gemm: Annotated[
        bool, Key("Multiplies a rank's experts in one grouped kernel.", "provider.moe_grouped_gemm")
    ]
    moe_pad_experts_for_cuda_graph_inference: Annotated[
        bool,
        Key(
            "Pads each expert's input to a fixed size, so that generation can replay CUDA graphs.",
            "provider.moe_pad_experts_for_cuda_graph_inference",
            "on for local CUDA-graph inference with expert parallelism, else the provider's",
        ),
    ]
    use_grouped_gemm_for_dense_mlp: Annotated[
        bool, Key("Uses that kernel for dense layers too.", "provider.use_grouped_gemm_for_dense_mlp")
    ]
    use_grouped_gemm_for_shared_expert: Annotated[
        bool, Key("Uses it for shared experts too.", "provider.use_grouped_gemm_for_shared_expert")
    ]
    inference_moe_token_dispatcher_type: Annotated[
        Literal["nccl", "nvls"],
        Key("How tokens travel in generation by Megatron.", "provider.inference_moe_token_dispatcher_type"),
    ]
    inference_grouped_gemm_backend: Annotated[
        Literal["flashinfer", "torch", "vllm"],
        Key("The grouped kernel of generation by Megatron.", "provider.inference_grouped_gemm_backend"),
    ]
    moe_flex_dispatcher_num_sms: Annotated[
        Size | None,
        Key(
            "The GPU's multiprocessors that the flex dispatcher may use.",
            "provider.moe_flex_dispatcher_num_sms, or moe_hybridep_num_sms where Megatron has only that",
        ),
    ]
    moe_hybridep_num_sms: Annotated[
        Size | None,
        Key("The older name of moe_flex_dispatcher_num_sms.", "whichever of the two fields this Megatron has"),
    ]
    num_of_hybrid_ep_ranks_per_nvlink_domain: Annotated[
        Size | None,
        Key(
            "Ranks that share one NVLink domain, for hybridep.",
            "the environment: NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
            "the environment's, else min(expert_model_parallel_size, 64) with a warning",
        ),
    ]
    use_mnnvl: Annotated[
        bool | None,
        Key(
            "NVLink reaches across nodes, for hybridep.",
            "the environment: USE_MNNVL",
            "the environment's, else whether expert_model_parallel_size is above 4, with a warning",
        ),
    ]
    moe_per_layer_logging: Annotated[
        bool, Key("Logs each layer's balancing loss by itself.", "provider.moe_per_layer_logging")
    ]
    freeze_moe_router: Annotated[
        bool,
        Key(
            "Leaves every router's weights and biases untrained, also those of MTP layers and nested language models.",
            "a hook that runs before the model is wrapped, with MoEFloat16Module as the wrapper",
            "false",
        ),
    ]


@section
class MtpKeys(TypedDict, total=False):
    """Multi-token prediction."""

    mtp_num_layers: Annotated[
        Count | None, Key("Layers that predict further tokens; null or 0 for none.", "provider.mtp_num_layers")
    ]
    mtp_loss_scaling_factor: Annotated[
        float | None, Key("The weight of their loss.", "provider.mtp_loss_scaling_factor")
    ]
    mtp_use_repeated_layer: Annotated[
        bool, Key("Uses one layer again for every further token.", "provider.mtp_use_repeated_layer")
    ]
    mtp_detach_heads: Annotated[bool, Key("Keeps their gradient out of the model's body.", "provider.mtp_detach_heads")]


@section
class FreezeKeys(TypedDict, total=False):
    """Towers and parts that stay as they are."""

    freeze_vision_model: Annotated[
        bool, Key("Leaves the vision tower untrained.", "provider.freeze_vision_model; an error where it has none")
    ]
    freeze_vision_projection: Annotated[
        bool,
        Key(
            "Leaves the projection from vision to language untrained.",
            "provider.freeze_vision_projection; an error where it has none",
        ),
    ]
    freeze_sound_encoder: Annotated[
        bool, Key("Leaves the sound encoder untrained.", "provider.freeze_sound_encoder; an error where it has none")
    ]
    freeze_sound_projection: Annotated[
        bool,
        Key(
            "Leaves the projection from sound to language untrained.",
            "provider.freeze_sound_projection; an error where it has none",
        ),
    ]
    radio_force_cpe_eval_mode: Annotated[
        bool,
        Key(
            "Runs the RADIO tower's position embedding as in evaluation.",
            "provider.radio_force_cpe_eval_mode; an error where it has none",
        ),
    ]
    freeze_config: Annotated[
        dict[str, Any] | None,
        Key(
            "Arguments of the model's own freeze() (freeze_language_model: true).",
            "model.freeze(**freeze_config), in a hook before the model is wrapped",
            "freeze() is not called",
        ),
    ]
