"""A policy: the model, its batches, generation, and megatron_cfg."""

from typing import Annotated, Any, Literal, Required, TypedDict

from .key import TRAINER, Count, Fraction, Key, Size, open_section, section
from .megatron import MegatronConfig

_TRAINERS = "the trainer's"


@section
class TokenizerConfig(TypedDict, total=False):
    """The tokenizer, always a Hugging Face one."""

    name: Annotated[str, Key("The Hugging Face id or folder.", TRAINER, "policy.model_name")]
    chat_template: Annotated[str | None, Key("Another chat template.", TRAINER, "the tokenizer's")]
    chat_template_kwargs: Annotated[dict[str, Any] | None, Key("Arguments of the template.", TRAINER, "none")]
    use_processor: Annotated[bool, Key("Loads a processor, for images and sound.", TRAINER, "false")]
    tokenizer_kwargs: Annotated[dict[str, Any] | None, Key("Arguments of the tokenizer.", TRAINER, "none")]


@section
class PretrainedCheckpoint(TypedDict, total=False):
    """A Megatron checkpoint to start from."""

    path: Required[
        Annotated[
            str, Key("The checkpoint's folder, or one that holds iter_* folders.", "checkpoint.pretrained_checkpoint")
        ]
    ]
    format: Required[
        Annotated[
            Literal["megatron_bridge", "megatron_lm"],
            Key(
                "megatron_bridge holds run_config.yaml; megatron_lm is torch_dist, and the architecture comes from "
                "policy.model_name.",
                "setup_model_config",
            ),
        ]
    ]


@section
class ColocatedResources(TypedDict, total=False):
    """GPUs of generation that is not colocated."""

    gpus_per_node: Annotated[Size | None, Key("GPUs on each node.", TRAINER, _TRAINERS)]
    num_nodes: Annotated[Size | None, Key("Nodes.", TRAINER, _TRAINERS)]


@section
class ColocatedConfig(TypedDict, total=False):
    """Whether generation shares the training GPUs."""

    enabled: Required[
        Annotated[
            bool,
            Key(
                "Generation runs on the training GPUs; false sets NCCL_CUMEM_ENABLE for the weight transfer.",
                "RuntimeConfig.is_generation_colocated",
            ),
        ]
    ]
    resources: Annotated[ColocatedResources | None, Key("The GPUs that generation has of its own.", TRAINER, _TRAINERS)]


@open_section
class McoreGenerationConfig(TypedDict, total=False):
    """Generation by Megatron itself. Keys that are not listed are passed on to its engine."""

    tensor_model_parallel_size: Annotated[
        Size, Key("Tensor parallelism of the inference model.", "build_inference_model", "the training model's")
    ]
    pipeline_model_parallel_size: Annotated[
        Size, Key("Its pipeline stages, evenly split.", "build_inference_model", "the training model's")
    ]
    expert_model_parallel_size: Annotated[
        Size, Key("GPUs that share out its experts.", "build_inference_model", "the training model's")
    ]
    expert_tensor_parallel_size: Annotated[
        Size | None, Key("GPUs that share each expert.", "build_inference_model", "the training model's")
    ]
    transformer_impl: Annotated[
        Literal["local", "transformer_engine", "inference_optimized"],
        Key("The kind of its layers.", "build_inference_model", "the training model's"),
    ]
    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"],
        Key("Who captures its CUDA graphs; any but none switches the RNG tracker on.", "the inference model", "none"),
    ]
    buffer_size_gb: Annotated[float, Key("Memory for keys and values.", TRAINER, _TRAINERS)]
    buffer_guaranteed_fraction: Annotated[Fraction, Key("The share that running requests keep.", TRAINER, _TRAINERS)]
    num_cuda_graphs: Annotated[Count | None, Key("Batch sizes that are captured.", TRAINER, _TRAINERS)]
    block_size_tokens: Annotated[Size, Key("Tokens in a block of keys and values.", TRAINER, _TRAINERS)]
    use_cuda_graphs_for_non_decode_steps: Annotated[bool, Key("Captures prefill too.", TRAINER, _TRAINERS)]
    enable_chunked_prefill: Annotated[bool, Key("Cuts long prompts.", TRAINER, _TRAINERS)]
    unified_memory_level: Annotated[Count, Key("Lets keys and values live in host memory.", TRAINER, _TRAINERS)]
    max_tokens: Annotated[Size, Key("Tokens in one step.", TRAINER, _TRAINERS)]


@open_section
class GenerationConfig(TypedDict, total=False):
    """Generation. Keys that are not listed are the engine's."""

    backend: Annotated[
        str | None,
        Key("vllm, sglang or megatron.", "NCCL_CUMEM_ENABLE; CUDA graphs of colocated Megatron generation", "none"),
    ]
    colocated: Required[Annotated[ColocatedConfig, Key("Where it runs.", "RuntimeConfig.is_generation_colocated")]]
    temperature: Annotated[float, Key("Divides the logits.", "RuntimeConfig.sampling_params", "1.0")]
    top_p: Annotated[
        Fraction, Key("Samples from this share of the probability.", "RuntimeConfig.sampling_params", "1.0")
    ]
    top_k: Annotated[
        int | None, Key("Samples from this many tokens; null for all.", "RuntimeConfig.sampling_params", "all tokens")
    ]
    mcore_generation_config: Annotated[
        McoreGenerationConfig | None, Key("Generation by Megatron.", "build_inference_model", "none")
    ]
    max_new_tokens: Annotated[Size, Key("Tokens of an answer.", TRAINER, _TRAINERS)]
    model_name: Annotated[str | None, Key("The model that generates.", TRAINER, "policy.model_name")]
    stop_token_ids: Annotated[list[int] | None, Key("Tokens that end an answer.", TRAINER, _TRAINERS)]
    stop_strings: Annotated[list[str] | None, Key("Strings that end an answer.", TRAINER, _TRAINERS)]
    vllm_cfg: Annotated[dict[str, Any] | None, Key("vLLM's settings.", TRAINER, _TRAINERS)]
    vllm_kwargs: Annotated[dict[str, Any] | None, Key("vLLM's further settings.", TRAINER, _TRAINERS)]
    sglang_cfg: Annotated[dict[str, Any] | None, Key("SGLang's settings.", TRAINER, _TRAINERS)]
    sglang_kwargs: Annotated[dict[str, Any] | None, Key("SGLang's further settings.", TRAINER, _TRAINERS)]


@open_section
class SequencePackingConfig(TypedDict, total=False):
    """Several sequences in one row."""

    enabled: Required[
        Annotated[bool, Key("Packs; context parallelism needs it.", "the check of context_parallel_size; the trainer")]
    ]
    train_mb_tokens: Annotated[Size, Key("Tokens of a training micro-batch.", TRAINER, _TRAINERS)]
    logprob_mb_tokens: Annotated[Size, Key("Tokens of a log-probability micro-batch.", TRAINER, _TRAINERS)]
    algorithm: Annotated[str, Key("How sequences are packed.", TRAINER, _TRAINERS)]


@open_section
class DraftConfig(TypedDict, total=False):
    """A draft model that is trained beside the policy, for speculative decoding."""

    enabled: Required[Annotated[bool, Key("Attaches a draft model.", "a hook before the model is wrapped")]]
    model_name: Annotated[
        str | None,
        Key(
            "The draft's Hugging Face id or folder: its config.json and weights.",
            "the draft's hook",
            "the policy's sizes, fresh weights, the policy's LM head",
        ),
    ]
    loss_weight: Annotated[float, Key("The weight of the draft's loss.", TRAINER, _TRAINERS)]
    num_layers: Annotated[Size | None, Key("The draft's layers.", "the draft's hook", "the draft config's, else 1")]
    aux_layer_indices: Annotated[
        list[int] | None,
        Key(
            "Layers of the policy after which the draft reads its hidden states, counted from 0.",
            "the draft's hook",
            "the draft config's, else an early, a middle and a late layer",
        ),
    ]


@section
class RouterReplayConfig(TypedDict, total=False):
    """Routing replay."""

    enabled: Required[
        Annotated[
            bool,
            Key(
                "Routes tokens in training as generation by vLLM routed them; excludes virtual pipeline stages.",
                "provider.moe_enable_routing_replay",
            ),
        ]
    ]


@open_section
class RewardModelConfig(TypedDict, total=False):
    """Reward models, which Megatron policies do not offer."""

    enabled: Required[Annotated[bool, Key("Asks for one, which is an error.", "validate_and_set_config")]]
    reward_model_type: Annotated[str, Key("Which kind.", TRAINER, _TRAINERS)]


@section
class SharedKeys(TypedDict, total=False):
    """What a policy and a value model have in common."""

    model_name: Required[
        Annotated[
            str,
            Key(
                "A Hugging Face id or a local folder: architecture, weights, tokenizer.",
                "AutoBridge.from_hf_pretrained",
            ),
        ]
    ]
    tokenizer: Annotated[TokenizerConfig | None, Key("The tokenizer.", TRAINER, "the model's")]
    precision: Required[
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            Key(
                "The dtype of weights and arithmetic.",
                "provider.bf16, fp16 and params_dtype; RuntimeConfig.dtype",
            ),
        ]
    ]
    hf_config_overrides: Annotated[
        dict[str, Any] | None,
        Key(
            "Fields of the Hugging Face config to change before conversion; part of the cache folder's name.",
            "AutoConfig; ignored, with a warning, for megatron_bridge checkpoints",
            "none",
        ),
    ]
    pretrained_checkpoint: Annotated[
        PretrainedCheckpoint | None,
        Key(
            "A Megatron checkpoint to start from.", "checkpoint.pretrained_checkpoint", "the converted Hugging Face one"
        ),
    ]
    train_global_batch_size: Annotated[Size, Key("Samples in a step.", "train.global_batch_size", "Bridge's")]
    train_micro_batch_size: Annotated[
        Size,
        Key(
            "Samples in one forward pass of training.",
            "train.micro_batch_size; 1 where batches are cut by tokens",
            "1",
        ),
    ]
    logprob_batch_size: Annotated[
        Size, Key("Samples in one forward pass for log-probabilities.", TRAINER, "train_micro_batch_size")
    ]
    logprob_chunk_size: Annotated[
        Count | None,
        Key(
            "Tokens whose logits are FP32 at once; above 0 it needs megatron_cfg.defer_fp32_logits.",
            "the chunking check; the trainer",
            "all at once",
        ),
    ]
    max_total_sequence_length: Annotated[Size, Key("Tokens of prompt and answer.", TRAINER, _TRAINERS)]
    make_sequence_length_divisible_by: Annotated[
        Size, Key("Rows are padded to a multiple of this.", TRAINER, "tensor_model_parallel_size")
    ]
    sequence_packing: Annotated[SequencePackingConfig | None, Key("Several sequences in one row.", "see there", "off")]
    dynamic_batching: Annotated[dict[str, Any] | None, Key("Batches by tokens.", TRAINER, "off")]
    reward_model_cfg: Annotated[RewardModelConfig | None, Key("Reward models.", "validate_and_set_config", "off")]
    offload_optimizer_for_logprob: Annotated[
        bool,
        Key(
            "Moves the optimizer to host memory for the log-probability pass.",
            "RuntimeConfig.offload_optimizer_for_logprob",
            "false",
        ),
    ]
    offload_optimizer_for_refit: Annotated[
        bool,
        Key(
            "Moves the optimizer to host memory while generation gets new weights.",
            "RuntimeConfig.offload_optimizer_for_refit",
            "true",
        ),
    ]
    megatron_cfg: Required[Annotated[MegatronConfig, Key("Everything of Megatron.", "the provider and the container")]]
    dtensor_cfg: Annotated[dict[str, Any] | None, Key("The trainer's other backend.", TRAINER, "none")]
    max_grad_norm: Annotated[float | None, Key("Often interpolated into optimizer.clip_grad.", TRAINER, _TRAINERS)]
    optimizer: Annotated[Any, Key("The other backend's optimizer.", TRAINER, "none")]
    scheduler: Annotated[Any, Key("The other backend's schedule.", TRAINER, "none")]


@section
class PolicyConfig(SharedKeys, total=False):
    """A policy. Keys that the trainer alone reads are listed too, so that they are not taken for slips."""

    generation: Annotated[
        GenerationConfig | None,
        Key("How answers are generated.", "RuntimeConfig.sampling_params and is_generation_colocated", "none"),
    ]
    generation_batch_size: Annotated[Size, Key("Prompts generated at once.", TRAINER, _TRAINERS)]
    draft: Annotated[DraftConfig | None, Key("A draft model beside the policy.", "a hook", "off")]
    router_replay: Annotated[
        RouterReplayConfig | None, Key("Routing replay.", "provider.moe_enable_routing_replay", "off")
    ]
    refit_buffer_size_gb: Annotated[float | None, Key("Memory for the weight transfer.", TRAINER, _TRAINERS)]


@section
class ValueConfig(SharedKeys, total=False):
    """A value model (PPO's critic), made into the shape of a policy by make_policy_like_config."""


@open_section
class TrainerConfig(TypedDict, total=False):
    """A trainer's file. Its other sections (grpo, data, cluster, logger ...) are not read."""

    policy: Required[Annotated[PolicyConfig, Key("The model that is trained.", "every setup function")]]
    value: Annotated[ValueConfig | None, Key("PPO's value model.", "make_policy_like_config", "none")]
