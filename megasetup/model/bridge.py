"""What the setup needs of Megatron-Bridge beyond its public functions: the only file of this package that knows it.

tests/model/test_bridge_names.py pins these names against the installed Bridge, so that a rename fails there and not on
a cluster.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch.distributed as dist

from megasetup.checkpoint.safety import check_index
from megasetup.compat.bridge import import_bridge
from megasetup.compat.checkpoint_reads import counting_reads
from megasetup.compat.layer_names import named_as_saved

type Ranks = Callable[..., list[int]]


def quietly[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function without the warnings of Bridge about its own coming changes, which its user can do nothing about."""

    @functools.wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message=".*is deprecated and will be removed")
            return function(*args, **kwargs)

    return quiet


def embedding_ranks(model_cfg: Any, wanted: Ranks | None) -> Ranks | None:
    """The caller's choice of ranks that hold the embedding, else Bridge's for this kind of model."""
    setup = import_bridge("megatron.bridge.training.setup")
    ranks: Ranks | None = setup._resolve_embedding_ranks_fn(model_cfg, wanted)
    return ranks


def load_weights_from(path: str, state: Any, chunks: list[Any]) -> int:
    """Load a checkpoint's weights, and nothing else of it, into a model.

    Args:
        path: a checkpoint's root or one iteration's folder.
        state: the GlobalState; its config is left as it was.
        chunks: the model's chunks, wrapped or not.

    Returns:
        The bytes that this rank read of the checkpoint's tensors.
    """
    checkpointing = import_bridge("megatron.bridge.training.checkpointing")
    settings = state.cfg.checkpoint
    finetune = settings.finetune
    names = _safe_names(path)
    settings.finetune = True  # (so that no optimizer, random number or iteration is read)
    try:
        with named_as_saved(chunks, names), counting_reads() as reads:
            quietly(checkpointing._load_checkpoint_from_path)(
                load_dir=path,
                state=state,
                model=chunks,
                optimizer=None,
                opt_param_scheduler=None,
                checkpointing_context={},
                ignore_ckpt_step=True,
            )
    finally:
        settings.finetune = finetune
    return reads.bytes


def load_checkpoint(state: Any, chunks: list[Any], optimizer: Any, scheduler: Any, context: dict[str, Any]) -> int:
    """Load what state.cfg.checkpoint says: the resume checkpoint if there is one, else the pretrained one's weights.

    Returns:
        The bytes that this rank read of the checkpoint's tensors, those of the optimizer included.
    """
    checkpointing = import_bridge("megatron.bridge.training.checkpointing")
    settings = state.cfg.checkpoint
    names = _safe_names(settings.load if is_checkpoint(settings.load) else settings.pretrained_checkpoint)
    with named_as_saved(chunks, names), counting_reads() as reads:
        quietly(checkpointing.load_checkpoint)(
            state,
            chunks,
            optimizer,
            scheduler,
            checkpointing_context=context,
            skip_load_to_model_and_opt=state.cfg.dist.use_torch_fsdp2,
        )
    return reads.bytes


def is_checkpoint(path: str | None) -> bool:
    """Whether a folder holds a checkpoint that Bridge can load: its own, Megatron's, or a Hugging Face one."""
    utils = import_bridge("megatron.bridge.training.utils.checkpoint_utils")
    if path is None:
        return False
    return bool(utils.checkpoint_exists(path) or utils.is_hf_checkpoint_dir(path))


def iteration_of(path: str) -> str | None:
    """The folder of the iteration that a load of this path reads; None where there is none (a Hugging Face folder).

    Collective: every rank calls it.
    """
    checkpointing = import_bridge("megatron.bridge.training.checkpointing")
    utils = import_bridge("megatron.bridge.training.utils.checkpoint_utils")
    if utils.is_checkpoint_iteration_directory(path):
        return path
    iteration, release = checkpointing._resolve_checkpoint_iteration(path, None)
    if iteration < 0 and not release:
        return None
    folder: str = utils.get_checkpoint_name(path, iteration, release)
    return folder


def saved_optimizer(path: str) -> bool:
    """Whether the checkpoint that a resume would load has optimizer state; True where it does not say.

    Collective: every rank calls it.
    """
    return bool(_run_config(path).get("checkpoint", {}).get("save_optim", True))


def check_order_of_state(path: str, transformer_impl: str) -> None:
    """Make sure that the optimizer state of a checkpoint goes to the parameters that it was saved from.

    Megatron's default form, dp_reshardable, has no names: the state is in the order of the model's parameters. Local
    layers have a norm before the attention that it goes into, Transformer Engine's in the middle of it, so that each
    would find another one's moments, of fitting sizes and without an error.

    Collective: every rank calls it.

    Args:
        path: the checkpoint that a resume would load.
        transformer_impl: what the model's layers are.

    Raises:
        NotImplementedError: one of the two has local layers, the other has not, and the state is in that form.
    """
    saved = _run_config(path)
    checkpoint, model = saved.get("checkpoint", {}), saved.get("model", {})
    layers = model.get("transformer_impl", transformer_impl)
    is_named = (
        checkpoint.get("dist_ckpt_optim_fully_reshardable", False)
        or checkpoint.get("ckpt_format", "torch_dist") != "torch_dist"
        or not (saved.get("optimizer") or {}).get("use_distributed_optimizer", True)
    )
    if (layers == "local") != (transformer_impl == "local") and not is_named:
        raise NotImplementedError(
            f"{path} holds optimizer state in the order of the parameters of {layers!r} layers, and the model has "
            f"{transformer_impl!r} ones, where the order is another: set policy.megatron_cfg.transformer_impl to "
            f"{layers!r}, or resume the weights alone (optimizer_path None)"
        )


def _run_config(path: str) -> dict[str, Any]:
    """The config that lies beside what a resume would load; empty where there is none."""
    utils = import_bridge("megatron.bridge.training.utils.checkpoint_utils")
    folder = iteration_of(path)
    file = None if folder is None else utils.get_checkpoint_run_config_filename(folder)
    if file is None or not utils.file_exists(file):
        return {}
    config: dict[str, Any] = utils.read_run_config(file)
    return config


def _safe_names(path: str) -> Collection[str] | None:
    """What the index of a checkpoint that is to be loaded lists, once it is known to be safe; None without an index."""
    folder = iteration_of(path)
    index = None if folder is None else check_index(folder)
    return None if index is None else index.state_dict_metadata


def new_process_groups(model_cfg: Any) -> Any:
    """Process groups of their own for a model with these parallel sizes, over all ranks, beside Megatron's.

    Collective: every rank calls it, in the same order as other calls that make groups.
    """
    initialize = import_bridge("megatron.bridge.training.initialize")
    return initialize._create_pg_collection(model_cfg, num_distributed_optimizer_instances=1)


def initialize(cfg: Any, get_embedding_ranks: Ranks | None, get_position_embedding_ranks: Ranks | None) -> Any:
    """Megatron's parallel state, random seeds, rerun state and micro-batch calculator for a config.

    Bridge's own initialize_megatron also compiles Megatron's dataset helpers, which a trainer with its own data does
    not need, and which asks for a compiler and a writable site-packages.

    Returns:
        The process groups.

    Raises:
        RuntimeError: the parallel state is up already with other sizes.
    """
    bridge = import_bridge("megatron.bridge.training.initialize")
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

    _check_existing(parallel_state, cfg.model)
    # An earlier setup in this process has left both, and Megatron makes neither twice.
    rerun_state_machine.destroy_rerun_state_machine()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        dist.get_rank() if dist.is_initialized() else 0,
        cfg.train.rampup_batch_size,
        cfg.train.global_batch_size,
        cfg.train.micro_batch_size,
        cfg.data_parallel_size,
        cfg.train.decrease_batch_size_if_needed,
    )
    bridge.init_rerun_state(cfg.rerun_state_machine)
    return quietly(bridge.torch_dist_init)(
        model_config=cfg.model,
        dist_config=cfg.dist,
        rng_config=cfg.rng,
        micro_batch_size=cfg.train.micro_batch_size,
        num_distributed_optimizer_instances=cfg.ddp.num_distributed_optimizer_instances,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        skip_mpu_initialization=False,
    )


def _check_existing(parallel_state: Any, model_cfg: Any) -> None:
    if not parallel_state.model_parallel_is_initialized():
        return
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    wrong = {name: size for name, size in sizes.items() if (getattr(model_cfg, name, 1) or 1) != size}
    if wrong:
        found = ", ".join(f"{name} {size}, wanted {getattr(model_cfg, name)}" for name, size in wrong.items())
        raise RuntimeError(
            f"Megatron's parallel state is up already with other sizes ({found}): call destroy_parallel_state() and "
            "setup_distributed() first"
        )


@contextlib.contextmanager
def economical_state_loading(optimizer: Any) -> Iterator[None]:
    """Bridge's way to load Adam's moments without a second copy of them, where this Bridge has it."""
    optim = import_bridge("megatron.bridge.training.optim")
    economical = getattr(optim, "memory_efficient_fp32_optimizer_state_loading", None)
    with contextlib.nullcontext() if economical is None else economical(optimizer):
        yield
