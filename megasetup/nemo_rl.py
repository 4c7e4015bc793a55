"""The names and signatures of nemo_rl.models.megatron.setup, for use in its place.

Code that calls those functions finds them here unchanged, positional order and keyword names included; what they do
stands in the packages below. One thing differs from megasetup's own functions: that module runs code which comes with a
Hugging Face model, so these do too, unless the config says `trust_remote_code: false`, and say so once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megasetup.checkpoint import importing, paths
from megasetup.compat.hf_config import patch_hf_configs
from megasetup.compat.signal_handler import patch_signal_handler
from megasetup.config import (
    container,
    moe,
    mtp,
    optimizer,
    overrides,
    parallelism,
    performance,
    precision,
    runtime,
    setup,
)
from megasetup.config.checkpoint import create_checkpoint_config
from megasetup.config.environment import configure_refit_environment
from megasetup.config.logprobs import validate_chunking_config
from megasetup.config.value_model import make_policy_like_config
from megasetup.masters import sync_master_weights
from megasetup.model import distributed, finalize
from megasetup.model.distributed import setup_distributed
from megasetup.model.draft import create_draft_pre_wrap_hook
from megasetup.model.inference import build_inference_model
from megasetup.model.reference import setup_reference_model_state
from megasetup.model.training import setup_model_and_optimizer

if TYPE_CHECKING:
    from megasetup.moe import MoEFloat16Module

_logger = logging.getLogger("megasetup")

TokenizerType = TypeVar("TokenizerType")

_NEMOTRON_OMNI_EXPANDED_SEQUENCE_CONTRACT = "expanded_sequence_v1"
_HF_CONFIG_PATCHED = False
_BRIDGE_SIGNAL_HANDLER_PATCHED = False

# Functions that differ in nothing but the name.
_apply_moe_config = moe.apply_moe_config
_apply_mtp_config = mtp.apply_mtp_config
_apply_parallelism_config = parallelism.apply_parallelism_config
_apply_performance_config = performance.apply_performance_config
_apply_precision_config = precision.apply_precision_config
_canonicalize_hf_config_overrides = paths.canonicalize_hf_config_overrides
_create_checkpoint_config = create_checkpoint_config
_create_megatron_config = container.create_megatron_config
_get_hf_config_overrides_hash = paths.get_hf_config_overrides_hash
_merge_model_override_value = overrides.merge_model_override_value
_merge_model_overrides = overrides.merge_model_overrides
_resolve_iter_dir_from_root = paths.resolve_iter_dir_from_root
_validate_chunking_config = validate_chunking_config
_validate_dtype_config = precision.validate_dtype_config
_validate_model_override_conflicts = overrides.validate_model_override_conflicts
_validate_optimizer_config = optimizer.validate_optimizer_config
_validate_training_config = container.validate_training_config
validate_model_paths = paths.validate_model_paths

__all__ = [
    "MoEFloat16Module",
    "TokenizerType",
    "build_inference_model",
    "configure_refit_environment",
    "destroy_parallel_state",
    "finalize_megatron_setup",
    "handle_model_import",
    "make_policy_like_config",
    "setup_distributed",
    "setup_model_and_optimizer",
    "setup_model_config",
    "setup_reference_model_state",
    "validate_and_set_config",
    "validate_model_paths",
]


def __getattr__(name: str) -> Any:
    # Its base class is Megatron's, so the class is made when it is first asked for.
    if name == "MoEFloat16Module":
        from megasetup.moe import MoEFloat16Module

        return MoEFloat16Module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _say_that_code_is_trusted() -> None:
    _logger.warning(
        "code that comes with a Hugging Face model is run, as nemo_rl.models.megatron.setup does: set "
        "policy.megatron_cfg.trust_remote_code to false, or to true to silence this"
    )


def _trusting(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with trust_remote_code, which the seed's module does not ask about; its own word is kept."""
    megatron = dict(config.get("megatron_cfg") or {})
    if "trust_remote_code" not in megatron:
        _say_that_code_is_trusted()
        megatron["trust_remote_code"] = True
    return {**config, "megatron_cfg": megatron}


def _patch_hf_config_double_instantiation() -> None:
    """Mend Hugging Face configs that do not take nested configs which are built already, where they need it."""
    global _HF_CONFIG_PATCHED
    patch_hf_configs()
    _HF_CONFIG_PATCHED = True


def _patch_bridge_signal_handler_for_worker_threads() -> None:
    """Make Megatron-Bridge's signal handler safe off the main thread, where it needs it."""
    global _BRIDGE_SIGNAL_HANDLER_PATCHED
    patch_signal_handler()
    _BRIDGE_SIGNAL_HANDLER_PATCHED = True


def destroy_parallel_state() -> None:
    """Take down the process group, Megatron's parallel state and its queue of asynchronous saves."""
    distributed.destroy_parallel_state()


def validate_and_set_config(
    config: Mapping[str, Any],
    rank: int,
    hf_model_name: str,
    pretrained_path: str | None,
    weights_path: str | None,
    optimizer_path: str | None,
    *,
    skip_weight_load: bool = False,
) -> runtime.RuntimeConfig:
    """See megasetup.config.runtime.validate_and_set_config."""
    return runtime.validate_and_set_config(
        _trusting(config),
        rank,
        hf_model_name,
        pretrained_path,
        weights_path,
        optimizer_path,
        skip_weight_load=skip_weight_load,
    )


def setup_model_config(
    config: Mapping[str, Any],
    rank: int,
    dtype: torch.dtype,
    hf_model_name: str,
    pretrained_path: str | None,
    weights_path: str | None = None,
    optimizer_path: str | None = None,
    *,
    skip_weight_load: bool = False,
) -> tuple[Any, Any]:
    """See megasetup.config.setup.setup_model_config."""
    return setup.setup_model_config(
        _trusting(config),
        rank,
        dtype,
        hf_model_name,
        pretrained_path,
        weights_path,
        optimizer_path,
        skip_weight_load=skip_weight_load,
    )


def handle_model_import(
    config: Mapping[str, Any],
    hf_model_name: str,
    pretrained_path: str,
    pt_checkpoint_exists: bool,
    model_post_wrap_hook: Callable[[Any], Any] | None = None,
    transformer_layer_spec: Any | None = None,
    mamba_stack_spec: Any | None = None,
) -> None:
    """See megasetup.checkpoint.importing.handle_model_import."""
    importing.handle_model_import(
        _trusting(config),
        hf_model_name,
        pretrained_path,
        pt_checkpoint_exists,
        model_post_wrap_hook,
        transformer_layer_spec,
        mamba_stack_spec,
    )


def finalize_megatron_setup(
    config: Mapping[str, Any],
    megatron_cfg: Any,
    hf_model_name: str,
    worker_sharding_annotations: Any,
    model: Any,
    optimizer: Any,
) -> tuple[Any, Any, bool, int]:
    """See megasetup.model.finalize.finalize_megatron_setup."""
    return finalize.finalize_megatron_setup(
        _trusting(config), megatron_cfg, hf_model_name, worker_sharding_annotations, model, optimizer
    )


def _create_draft_pre_wrap_hook(
    policy_cfg: Mapping[str, Any],
    megatron_cfg: Any,
    state: Any,
    *,
    preload_policy_from_pretrained: bool,
) -> Callable[[list[Any]], list[Any]]:
    """See megasetup.model.draft.create_draft_pre_wrap_hook."""
    return create_draft_pre_wrap_hook(
        policy_cfg, megatron_cfg, state, preload_policy_from_pretrained=preload_policy_from_pretrained
    )


def _force_sync_optimizer_fp32_from_model(optimizer: Any, model: Any) -> None:
    """Write the model's weights into every FP32 copy that an offloading optimizer keeps of them.

    To be called right after a fine-tuning load, on every rank. Sub-optimizers without a HybridDeviceOptimizer are left
    untouched. What was done is logged at info level.

    Args:
        optimizer: the Megatron optimizer, or None where the setup made none: there is nothing to refresh then.
        model: the model's chunks, a module or a list of modules; used for names.

    Raises:
        PlanError: the copies do not fit their weights; a ValueError that lists all that is wrong. Nothing was written.
        TypeError: not a Megatron optimizer, or not a model.
        RuntimeError: a CUDA call failed.
    """
    if optimizer is None:
        _logger.info("no optimizer, so there are no FP32 copies to refresh")
        return
    _logger.info("%s", sync_master_weights(optimizer, model))
