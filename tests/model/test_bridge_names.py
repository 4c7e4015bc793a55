"""The names of Megatron-Bridge and Megatron that the setup uses, public or not, and their arguments, as installed."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

pytest.importorskip("megatron.core")

from megasetup.compat.bridge import import_bridge

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)

FUNCTIONS = [
    ("training.setup", "_resolve_embedding_ranks_fn", ["model_config", "get_embedding_ranks"]),
    (
        "training.checkpointing",
        "_load_checkpoint_from_path",
        [
            "load_dir",
            "state",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "checkpointing_context",
            "ignore_ckpt_step",
        ],
    ),
    ("training.checkpointing", "_resolve_checkpoint_iteration", ["load_dir", "ckpt_step_override"]),
    (
        "training.checkpointing",
        "load_checkpoint",
        [
            "state",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "checkpointing_context",
            "skip_load_to_model_and_opt",
        ],
    ),
    ("training.checkpointing", "init_checkpointing_context", ["checkpoint_config"]),
    ("training.initialize", "_create_pg_collection", ["model_config", "num_distributed_optimizer_instances"]),
    (
        "training.initialize",
        "torch_dist_init",
        [
            "model_config",
            "dist_config",
            "rng_config",
            "micro_batch_size",
            "num_distributed_optimizer_instances",
            "get_embedding_ranks",
            "get_position_embedding_ranks",
            "skip_mpu_initialization",
        ],
    ),
    ("training.initialize", "init_rerun_state", ["rerun_state_machine_config"]),
    ("training.initialize", "set_jit_fusion_options", ["model_config", "micro_batch_size"]),
    (
        "training.optim",
        "setup_optimizer",
        [
            "optimizer_config",
            "scheduler_config",
            "model",
            "use_gloo_process_groups",
            "pg_collection",
            "optimizer_config_override_provider",
        ],
    ),
    ("training.optim", "memory_efficient_fp32_optimizer_state_loading", ["optimizer"]),
    ("training.utils.checkpoint_utils", "checkpoint_exists", ["checkpoints_path"]),
    ("training.utils.checkpoint_utils", "is_hf_checkpoint_dir", ["path"]),
    ("training.utils.checkpoint_utils", "is_checkpoint_iteration_directory", ["path"]),
    ("training.utils.checkpoint_utils", "get_checkpoint_name", ["checkpoints_path", "iteration", "release"]),
    ("training.utils.checkpoint_utils", "get_checkpoint_run_config_filename", ["checkpoints_path"]),
    ("training.utils.checkpoint_utils", "read_run_config", ["run_config_filename"]),
    ("training.utils.checkpoint_utils", "file_exists", ["path"]),
    ("training.tokenizers.tokenizer", "build_tokenizer", ["config"]),
]


@pytest.mark.parametrize(("module", "name", "arguments"), FUNCTIONS, ids=[name for _, name, _ in FUNCTIONS])
def test_function(module: str, name: str, arguments: list[str]) -> None:
    found = inspect.signature(getattr(import_bridge(f"megatron.bridge.{module}"), name)).parameters
    assert [argument for argument in arguments if argument not in found] == []


def test_the_provider_takes_what_we_give_it() -> None:
    provider = import_bridge("megatron.bridge.models.model_provider").ModelProviderMixin
    found = inspect.signature(provider.provide_distributed_model).parameters
    given = {
        "ddp_config",
        "wrap_with_ddp",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "overlap_param_gather_with_optimizer_step",
        "data_parallel_random_init",
        "pre_wrap_hook",
        "mixed_precision_wrapper",
        "use_cpu_initialization",
        "pg_collection",
    }
    assert given <= found.keys()


def test_the_container_has_what_we_read() -> None:
    config = import_bridge("megatron.bridge.training.config")
    fields = config.ConfigContainer.__dataclass_fields__
    assert {"dist", "checkpoint", "train", "rng", "rerun_state_machine", "ddp", "peft", "tokenizer"} <= fields.keys()
    assert {"optimizer_config_override_provider"} <= fields.keys()
    checkpoint = config.CheckpointConfig.__dataclass_fields__
    assert {"load", "save", "pretrained_checkpoint", "finetune", "load_optim", "async_save"} <= checkpoint.keys()
    dist = config.DistributedInitConfig.__dataclass_fields__
    assert {"external_gpu_device_mapping", "use_decentralized_pg", "use_torch_fsdp2"} <= dist.keys()
