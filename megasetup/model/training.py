"""The model and the optimizer, built, loaded, and with every FP32 copy of every weight true.

This is where the parts meet: Megatron-Bridge builds and loads, `megasetup.masters` refreshes or repairs the FP32
copies, and each step is a stage that is timed and that names itself when it fails.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from megasetup.compat.bridge import import_bridge
from megasetup.compat.hybrid_optimizer import fast_hybrid_optimizer
from megasetup.compat.optimizer_state import loading_state_of_torch_adam
from megasetup.compat.signal_handler import patch_signal_handler
from megasetup.config.colocated import inference_megatron_cfg
from megasetup.config.fields import megatron_cfg as megatron_section
from megasetup.config.peft import create_lora
from megasetup.masters import AuditReport, audit_master_weights, ensure_master_weights, sync_master_weights
from megasetup.model import bridge
from megasetup.model.draft import get_attached_draft_model
from megasetup.model.hooks import Hook, check_supported, draft_hook, lora_hook, pre_wrap_hooks, run_hooks
from megasetup.model.report import SetupReport
from megasetup.model.stages import Stages

_logger = logging.getLogger("megasetup")


class ColocatedReshardPlan(NamedTuple):
    """What is needed to build the inference model of generation by Megatron on the training GPUs.

    There is one where generation has another layout or other layers than training; without, the training model
    generates itself.

    Attributes:
        initial_model_provider: the provider as it was before the training model was built from it; for
            build_inference_model.
    """

    initial_model_provider: Any


class _StateFields(NamedTuple):
    state: Any
    model: Any
    optimizer: Any
    scheduler: Any
    checkpointing_context: dict[str, Any]
    param_sync_func: Any
    draft_model: Any
    colocated_reshard_plan: ColocatedReshardPlan | None


class ModelAndOptimizerState(_StateFields):
    """What setup_model_and_optimizer made.

    Attributes:
        state: Megatron-Bridge's GlobalState.
        model: the wrapped model: one module, or a list of chunks where there are virtual pipeline stages.
        optimizer: Megatron's optimizer; None without one.
        scheduler: its schedule; None without an optimizer.
        checkpointing_context: what Bridge's load and save functions share.
        param_sync_func: what starts the gathering of parameters where that overlaps and is aligned (one function, or a
            list for several chunks), else None.
        draft_model: the draft on the ranks that have one (the last pipeline stage), else None.
        colocated_reshard_plan: for colocated generation by Megatron with a model of its own, else None.
        report: what the setup did, a SetupReport. Not one of the tuple's fields.
    """

    report: SetupReport


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
            _need_gpu()
            state = _new_state(megatron_cfg, lora)
        with stages.stage("parallel state", "check the parallel sizes against the number of ranks"):
            groups = bridge.initialize(
                megatron_cfg,
                bridge.embedding_ranks(megatron_cfg.model, get_embedding_ranks),
                get_position_embedding_ranks,
            )
            stages.join()
            _tune_process(megatron_cfg)
            context = import_bridge("megatron.bridge.training.checkpointing").init_checkpointing_context(
                megatron_cfg.checkpoint
            )
            _fill_vocabulary(megatron_cfg)
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
            stage.bytes = _bytes_of(chunks)
        optimizer = scheduler = None
        if load_optimizer:
            with stages.stage("optimizer", "lower optimizer_offload_fraction, or free host memory"):
                optimizer, scheduler = _build_optimizer(policy_cfg, megatron_cfg, state, chunks, groups)
        resumed = False
        if load_weights:
            beside = ["adapters as initialised"] * (lora is not None) + ["a draft"] * (draft is not None)
            resumed = _load(stages, state, chunks, optimizer, scheduler, context, pre_load_checkpoint_hook, beside)
        if optimizer is not None:
            _make_masters_true(stages, megatron_cfg, chunks, optimizer, resumed=resumed)
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


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "training needs a GPU, and this process sees none: look at CUDA_VISIBLE_DEVICES and `megasetup doctor`. "
            "Without one, checkpoints can be converted and configs checked"
        )


def _new_state(cfg: Any, lora: Any) -> Any:
    """The GlobalState of a completed config, with the worker of asynchronous saves started before CUDA is."""
    patch_signal_handler()
    # Each process was given its GPU by whoever started it, by CUDA_VISIBLE_DEVICES or by setup_distributed.
    cfg.dist.external_gpu_device_mapping = True
    if lora is not None:
        cfg.peft = lora
    cfg.set_data_parallel_size()
    bridge.quietly(cfg.validate)()
    state = import_bridge("megatron.bridge.training.state").GlobalState()
    state.cfg = cfg
    state.initialize_async_checkpoint_worker()
    return state


def _tune_process(cfg: Any) -> None:
    """Settings of this process that a model's features ask for."""
    from megatron.core.config import set_experimental_flag
    from megatron.core.jit import disable_jit_fuser

    set_experimental_flag(cfg.dist.enable_megatron_core_experimental)
    if cfg.dist.disable_jit_fuser:
        disable_jit_fuser()
    if getattr(cfg.model, "fine_grained_activation_offloading", False):
        from megatron.core.pipeline_parallel.utils import set_ideal_affinity_for_current_gpu

        set_ideal_affinity_for_current_gpu()
    if getattr(cfg.model, "cuda_graph_impl", "none") != "none":
        # Nothing may be compiled while a graph is captured. Without graphs, the first step compiles what it needs.
        bridge.quietly(import_bridge("megatron.bridge.training.initialize").set_jit_fusion_options)(
            cfg.model, cfg.train.micro_batch_size
        )


def _fill_vocabulary(cfg: Any) -> None:
    if cfg.model.vocab_size is None:
        tokenizer = bridge.quietly(import_bridge("megatron.bridge.training.tokenizers.tokenizer").build_tokenizer)(
            cfg.tokenizer
        )
        cfg.model.vocab_size, cfg.model.should_pad_vocab = tokenizer.vocab_size, True


def _reshard_plan(policy_cfg: Mapping[str, Any], cfg: Any) -> ColocatedReshardPlan | None:
    if inference_megatron_cfg(policy_cfg) is None:
        return None
    # Building the training model leaves process groups and hooks behind in its provider.
    return ColocatedReshardPlan(copy.deepcopy(cfg.model))


def build_chunks(
    policy_cfg: Mapping[str, Any], cfg: Any, groups: Any, hooks: list[Hook], *, wrap_with_ddp: bool = True
) -> list[Any]:
    """Build the model's chunks from cfg.model and wrap them.

    Args:
        policy_cfg: the policy config.
        cfg: the ConfigContainer.
        groups: the process groups.
        hooks: what runs before the wrapping, in order.
        wrap_with_ddp: whether to wrap for training.
    """
    from megatron.core.transformer.module import Float16Module

    from megasetup.moe import MoEFloat16Module

    experts = getattr(cfg.model, "num_moe_experts", None) or megatron_section(policy_cfg).get("freeze_moe_router")
    overlaps_step = wrap_with_ddp and cfg.optimizer.overlap_param_gather_with_optimizer_step
    chunks: list[Any] = bridge.quietly(cfg.model.provide_distributed_model)(
        ddp_config=cfg.ddp if wrap_with_ddp else None,
        wrap_with_ddp=wrap_with_ddp,
        use_megatron_fsdp=cfg.dist.use_megatron_fsdp,
        use_torch_fsdp2=cfg.dist.use_torch_fsdp2,
        overlap_param_gather_with_optimizer_step=overlaps_step,
        data_parallel_random_init=cfg.rng.data_parallel_random_init,
        pre_wrap_hook=run_hooks(hooks),
        mixed_precision_wrapper=MoEFloat16Module if experts else Float16Module,
        use_cpu_initialization=not torch.cuda.is_available(),
        pg_collection=groups,
    )
    return chunks


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


def _load(
    stages: Stages,
    state: Any,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    context: dict[str, Any],
    before: Callable[[list[Any]], object] | None,
    beside: list[str],
) -> bool:
    """Load a checkpoint. Returns whether optimizer state was restored.

    beside: what hooks have put beside the base model; they have loaded its weights then, unless this is a resume.
    """
    cfg = state.cfg
    settings = cfg.checkpoint
    remedy = (
        "check that every node sees the folder and that it is complete; a checkpoint of an older Megatron-Bridge must "
        "be converted anew, and optimizer state needs the optimizer settings that it was saved with"
    )
    with stages.stage("load", remedy) as stage:
        resumes = bridge.is_checkpoint(settings.load)
        if not resumes and not bridge.is_checkpoint(settings.pretrained_checkpoint):
            raise FileNotFoundError(
                f"there is no checkpoint to load: neither in checkpoint.load ({settings.load}) nor in "
                f"checkpoint.pretrained_checkpoint ({settings.pretrained_checkpoint}). Convert the model first "
                "(handle_model_import), or pass load_weights=False"
            )
        if beside and not resumes:
            stages.report.weights = f"base model {settings.pretrained_checkpoint}, {', '.join(beside)}"
            return False
        if before is not None:
            before(chunks)
        if resumes and settings.load_optim and optimizer is not None:
            if bridge.saved_optimizer(settings.load):
                layers = getattr(cfg.model, "transformer_impl", "transformer_engine")
                bridge.check_order_of_state(settings.load, layers)
            else:
                _logger.warning(
                    "%s was saved without optimizer state: only the weights are resumed, and the optimizer starts "
                    "afresh",
                    settings.load,
                )
                settings.load_optim = False
        finetune = settings.finetune
        with (
            _noting_state_loads(optimizer) as restored,
            loading_state_of_torch_adam(optimizer, restored)
            if resumes and settings.load_optim
            else contextlib.nullcontext(),
            bridge.economical_state_loading(optimizer),
        ):
            stage.bytes = bridge.load_checkpoint(state, chunks, optimizer, scheduler, context)
        settings.finetune = finetune  # (Bridge sets it when it falls back on the pretrained checkpoint)
        where = settings.load if resumes else f"pretrained, {settings.pretrained_checkpoint}"
        stages.report.weights = f"{where}{', with optimizer state' if restored else ''}"
    return bool(restored)


@contextlib.contextmanager
def _noting_state_loads(optimizer: Any) -> Iterator[list[bool]]:
    """A list that gets an entry when the optimizer's state is loaded.

    Whether Bridge loads it hangs on the config, on the checkpoint's own settings and on its kind, so it is watched
    rather than foretold.
    """
    restored: list[bool] = []
    if optimizer is None:
        yield restored
        return
    load_state_dict = optimizer.load_state_dict

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = load_state_dict(*args, **kwargs)
        restored.append(True)
        return result

    optimizer.load_state_dict = noted
    try:
        yield restored
    finally:
        del optimizer.load_state_dict


def _make_masters_true(stages: Stages, cfg: Any, chunks: list[Any], optimizer: Any, *, resumed: bool) -> None:
    """Refresh the FP32 copies, or after a resume repair only what contradicts the model, and see that none is stale."""
    report = stages.report
    remedy = "run `megasetup doctor`; audit_master_weights(optimizer, model) names every copy"
    # Master weights that came from the checkpoint hold more than the model does, and are not to be overwritten.
    if resumed or cfg.checkpoint.load_main_params_from_ckpt:
        with stages.stage("check masters", remedy) as stage:
            report.ensure = ensure_master_weights(optimizer, chunks, levels="all")
            stage.bytes = _audited_bytes(report.ensure.audit)
    else:
        with stages.stage("sync masters", remedy) as stage:
            report.sync = sync_master_weights(optimizer, chunks, levels="all")
            stage.bytes = report.sync.bytes
    with stages.stage("audit", remedy) as stage:
        report.audit = audit_master_weights(optimizer, chunks)
        stage.bytes = _audited_bytes(report.audit)
        if not report.audit.ok:
            raise RuntimeError(
                f"FP32 copies do not hold the model's weights, and training would lose it:\n{report.audit}"
            )


def _audited_bytes(audit: AuditReport) -> int:
    return 4 * sum(found.elements for found in audit.copies)


def _bytes_of(chunks: list[Any]) -> int:
    return sum(parameter.numel() * parameter.element_size() for chunk in chunks for parameter in chunk.parameters())


def param_sync_function(cfg: Any, chunks: list[Any]) -> Any:
    """What starts the gathering of parameters, where that overlaps with the forward pass and is aligned over stages."""
    if not (cfg.ddp.overlap_param_gather and cfg.ddp.align_param_gather):
        return None
    functions = [chunk.start_param_sync for chunk in chunks]
    return functions if len(functions) > 1 else functions[0]
