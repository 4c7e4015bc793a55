"""The model and the optimizer, built, loaded, and with every FP32 copy of every weight true.

This is where the parts meet: Megatron-Bridge builds and loads, `megasetup.masters` refreshes or repairs the FP32
copies, and each step is a stage that is timed and that names itself when it fails.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

from megasetup.compat.bridge import import_bridge
from megasetup.compat.hybrid_optimizer import fast_hybrid_optimizer
from megasetup.config.colocated import inference_megatron_cfg
from megasetup.config.fields import megatron_cfg as megatron_section
from megasetup.config.peft import create_lora
from megasetup.model import bridge
from megasetup.model.chunks import build_chunks, bytes_of, param_sync_function
from megasetup.model.copies import make_masters_true
from megasetup.model.draft import get_attached_draft_model
from megasetup.model.hooks import Hook, check_supported, draft_hook, lora_hook, pre_wrap_hooks
from megasetup.model.loading import load
from megasetup.model.report import SetupReport
from megasetup.model.result import ColocatedReshardPlan, ModelAndOptimizerState
from megasetup.model.stages import Stages
from megasetup.model.starting import fill_vocabulary, need_gpu, new_state, tune_process


def setup_model_and_optimizer(
    policy_cfg: Mapping[str, Any],
    megatron_cfg: Any,
    load_optimizer: bool = True,
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    pre_load_checkpoint_hook: Callable[[list[Any]], object] | None = None,
    additional_pre_wrap_hooks: list[Hook] | None = None,
    load_weights: bool = True,
) -> ModelAndOptimizerState:
    """Build the model and the optimizer, load a checkpoint, and make every FP32 copy of the weights true.

    Collective: every rank calls it, after setup_distributed. If it fails on one rank it fails on all.

    Weights come from the resume checkpoint if there is one (megatron_cfg.checkpoint.load), else from the pretrained
    one. After a load that restored no optimizer state every FP32 copy is refreshed from the model; after a real resume
    the copies stay as they were loaded, and only those that contradict the model are repaired.

    Args:
        policy_cfg: the policy config.
        megatron_cfg: Megatron-Bridge's ConfigContainer, from validate_and_set_config. It is completed here: validated
            for this many ranks, external_gpu_device_mapping set.
        load_optimizer: whether to make an optimizer and its schedule.
        get_embedding_ranks: see Megatron's initialize_model_parallel; default: Bridge's for this model.
        get_position_embedding_ranks: likewise.
        pre_load_checkpoint_hook: called with the list of wrapped chunks before the checkpoint is loaded.
        additional_pre_wrap_hooks: called with the list of chunks, last before they are wrapped; each returns the list,
            or None when it changed the chunks in place.
        load_weights: whether to load any; False leaves them as initialised.

    Raises:
        ConfigError: the config asks for something contradictory or unsupported.
        FileNotFoundError: there is no checkpoint to load.
        PeerFailedError: another rank failed.
        RuntimeError: there is no GPU; a copy is still stale after everything.
    """
    report = SetupReport()
    with Stages("setup", report) as stages:
        with stages.stage("config", "see the key that the message names"):
            check_supported(policy_cfg)
            lora = create_lora(policy_cfg)
            need_gpu()
            state = new_state(megatron_cfg, lora)
        with stages.stage("parallel state", "check the parallel sizes against the number of ranks"):
            groups = bridge.initialize(
                megatron_cfg,
                bridge.embedding_ranks(megatron_cfg.model, get_embedding_ranks),
                get_position_embedding_ranks,
            )
            stages.join()
            tune_process(megatron_cfg)
            context = import_bridge("megatron.bridge.training.checkpointing").init_checkpointing_context(
                megatron_cfg.checkpoint
            )
            fill_vocabulary(megatron_cfg)
        plan = _reshard_plan(policy_cfg, megatron_cfg)
        with stages.stage(
            "model", "give the model more GPUs (tensor or pipeline parallelism), or free this one"
        ) as stage:
            adapt = None if lora is None else lora_hook(lora, state, load_base=load_weights)
            # A checkpoint to resume holds the draft. A pretrained one does not, and is loaded before there is one.
            fresh = load_weights and not bridge.is_checkpoint(megatron_cfg.checkpoint.load)
            draft = draft_hook(policy_cfg, megatron_cfg, state, load_base=fresh and lora is None)
            hooks = pre_wrap_hooks(policy_cfg, megatron_cfg.model, adapt, additional_pre_wrap_hooks or (), draft)
            chunks = build_chunks(policy_cfg, megatron_cfg, groups, hooks)
            stage.bytes = bytes_of(chunks)
        optimizer = scheduler = None
        if load_optimizer:
            with stages.stage("optimizer", "lower optimizer_offload_fraction, or free host memory"):
                optimizer, scheduler = _build_optimizer(policy_cfg, megatron_cfg, state, chunks, groups)
        resumed = False
        if load_weights:
            beside = ["adapters as initialised"] * (lora is not None) + ["a draft"] * (draft is not None)
            resumed = load(stages, state, chunks, optimizer, scheduler, context, pre_load_checkpoint_hook, beside)
        if optimizer is not None:
            make_masters_true(stages, megatron_cfg, chunks, optimizer, resumed=resumed)
        result = ModelAndOptimizerState(
            state,
            chunks if len(chunks) > 1 else chunks[0],
            optimizer,
            scheduler,
            context,
            param_sync_function(megatron_cfg, chunks),
            get_attached_draft_model(chunks),
            plan,
        )
        result.report = report
    return result


def _reshard_plan(policy_cfg: Mapping[str, Any], cfg: Any) -> ColocatedReshardPlan | None:
    if inference_megatron_cfg(policy_cfg) is None:
        return None
    # Building the training model leaves process groups and hooks behind in its provider.
    return ColocatedReshardPlan(copy.deepcopy(cfg.model))


def _build_optimizer(
    policy_cfg: Mapping[str, Any], cfg: Any, state: Any, chunks: list[Any], groups: Any
) -> tuple[Any, Any]:
    cfg.model.timers = cfg.optimizer.timers = state.timers
    optim = import_bridge("megatron.bridge.training.optim")
    fast = cfg.optimizer.optimizer_cpu_offload and megatron_section(policy_cfg).get("fast_hybrid_optimizer", True)
    with fast_hybrid_optimizer() if fast else contextlib.nullcontext():
        optimizer, scheduler = bridge.quietly(optim.setup_optimizer)(
            optimizer_config=cfg.optimizer,
            scheduler_config=cfg.scheduler,
            model=chunks,
            use_gloo_process_groups=cfg.dist.use_gloo_process_groups,
            # (with Megatron's own groups it takes them itself, gloo ones included)
            pg_collection=groups if cfg.dist.use_decentralized_pg else None,
            optimizer_config_override_provider=cfg.optimizer_config_override_provider,
        )
    return optimizer, scheduler
