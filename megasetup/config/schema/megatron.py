"""megatron_cfg as a whole: the parts that stand in the files beside this one, and what belongs to none of them."""

from typing import Annotated, Any, Literal, Required, TypedDict

from .key import TRAINER, Count, DtypeName, Fraction, Key, Size, open_section, section
from .optimizer import DistributedDataParallelConfig, OptimizerConfig, SchedulerConfig
from .parallelism import FreezeKeys, MoeKeys, MtpKeys, ParallelismKeys
from .performance import CudaGraphKeys, Fp8Config, KernelKeys, LogitsKeys, OffloadKeys, RecomputeKeys


@open_section
class PeftConfig(TypedDict, total=False):
    """LoRA. Fields of Bridge's LoRA that are not listed are passed on."""

    enabled: Required[Annotated[bool, Key("Trains adapters beside a frozen model.", "this section")]]
    target_modules: Annotated[
        list[str] | None,
        Key("Layers that get an adapter; an empty list for all linear ones.", "LoRA.target_modules", "LoRA's"),
    ]
    exclude_modules: Annotated[list[str] | None, Key("Layers that get none.", "LoRA.exclude_modules", "LoRA's")]
    dim: Annotated[Size, Key("The adapters' rank.", "LoRA.dim", "needed when enabled")]
    alpha: Annotated[float, Key("Their weight is alpha / dim.", "LoRA.alpha", "needed when enabled")]
    dropout: Annotated[
        Fraction, Key("The share of the adapters' activations that is dropped.", "LoRA.dropout", "LoRA's")
    ]
    dropout_position: Annotated[
        Literal["pre", "post"],
        Key("Whether they are dropped before or after the adapter.", "LoRA.dropout_position", "LoRA's"),
    ]
    lora_A_init_method: Annotated[str, Key("How the inner matrix starts.", "LoRA.lora_A_init_method", "LoRA's")]
    lora_B_init_method: Annotated[str, Key("How the outer matrix starts.", "LoRA.lora_B_init_method", "LoRA's")]
    a2a_experimental: Annotated[
        bool, Key("Exchanges by all-to-all under sequence parallelism.", "LoRA.a2a_experimental", "LoRA's")
    ]
    share_expert_adapters: Annotated[
        bool, Key("Gives a layer's experts one adapter together.", "LoRA.share_expert_adapters", "LoRA's")
    ]
    normalize_moe_lora: Annotated[
        bool, Key("Divides an expert's rank by the number of experts of a token.", "LoRA.normalize_moe_lora", "LoRA's")
    ]
    lora_dtype: Annotated[DtypeName | None, Key("The adapters' dtype.", "LoRA.lora_dtype", "the model's")]


@section
class CheckpointConfig(TypedDict, total=False):
    """How training checkpoints are written and read."""

    async_save: Annotated[
        bool,
        Key(
            "Writes in another process while training goes on.",
            "checkpoint.async_save",
            "Bridge's: false",
        ),
    ]
    ckpt_assume_constant_structure: Annotated[
        bool,
        Key("Plans the layout once for all saves.", "checkpoint.ckpt_assume_constant_structure", "Bridge's"),
    ]
    ckpt_fully_parallel_save_process_group: Annotated[
        Literal["dp", "ep_dp"],
        Key("Ranks that share the writing.", "checkpoint.ckpt_fully_parallel_save_process_group", "Bridge's"),
    ]
    ckpt_fully_parallel_load_process_group: Annotated[
        Literal["dp", "ep_dp"],
        Key("Ranks that share the reading.", "checkpoint.ckpt_fully_parallel_load_process_group", "Bridge's"),
    ]
    ckpt_fully_parallel_load_exchange_algo: Annotated[
        Literal["broadcast", "gather_rounds", "gather_object"],
        Key("How they pass on what they read.", "checkpoint.ckpt_fully_parallel_load_exchange_algo", "Bridge's"),
    ]


@section
class MegatronConfig(
    ParallelismKeys,
    MoeKeys,
    MtpKeys,
    RecomputeKeys,
    KernelKeys,
    CudaGraphKeys,
    OffloadKeys,
    LogitsKeys,
    FreezeKeys,
    total=False,
):
    """The Megatron half of a policy."""

    enabled: Annotated[bool, Key("The trainer uses Megatron for this policy.", TRAINER, "true")]
    train_iters: Annotated[
        Count, Key("Steps of the whole run; the schedule needs it.", "train.train_iters", "none: needed for training")
    ]
    optimizer: Annotated[OptimizerConfig, Key("The optimizer.", "ConfigContainer.optimizer")]
    scheduler: Annotated[SchedulerConfig, Key("Its schedule.", "ConfigContainer.scheduler")]
    distributed_data_parallel_config: Annotated[
        DistributedDataParallelConfig, Key("Gradients across data-parallel ranks.", "ConfigContainer.ddp")
    ]
    fp8_cfg: Annotated[Fp8Config | None, Key("8-bit floating point.", "the provider", "off")]
    peft: Annotated[PeftConfig | None, Key("LoRA.", "a hook before the model is wrapped", "off")]
    checkpoint: Annotated[CheckpointConfig | None, Key("Saving and loading.", "ConfigContainer.checkpoint", "Bridge's")]
    model_overrides: Annotated[
        dict[str, Any] | None,
        Key(
            "Fields of the provider that have no key here, nested as there; a key that has its own setting, or a "
            "field that the provider lacks, is an error.",
            "the provider, merged into a copy",
            "none",
        ),
    ]
    env_vars: Annotated[
        dict[str, Any] | None,
        Key("Environment variables of the workers.", TRAINER, "none"),
    ]
    force_reconvert_from_hf: Annotated[
        bool,
        Key("Converts the Hugging Face checkpoint again though the cache has one.", "handle_model_import", "false"),
    ]
    trust_remote_code: Annotated[
        bool, Key("Runs code that comes with a Hugging Face model.", "AutoBridge and AutoTokenizer", "false")
    ]
    fast_hybrid_optimizer: Annotated[
        bool,
        Key(
            "Offloads the optimizer with pipelined transfers and exact pinned memory; false takes Megatron's own.",
            "setup_model_and_optimizer",
            "true",
        ),
    ]
    use_gloo_process_groups: Annotated[
        bool, Key("Makes gloo groups beside the NCCL ones.", "dist.use_gloo_process_groups", "Bridge's")
    ]
    empty_unused_memory_level: Annotated[
        Literal[0, 1, 2], Key("How often the trainer empties the allocator's cache.", TRAINER, "the trainer's")
    ]
    converter_type: Annotated[str, Key("The Hugging Face class, for older trainers.", TRAINER, "none")]
    force_overwrite_initial_ckpt: Annotated[
        bool, Key("What older trainers called force_reconvert_from_hf.", TRAINER, "false")
    ]
