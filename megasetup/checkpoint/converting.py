"""One conversion from Hugging Face's format to a Megatron checkpoint, by all ranks of the default process group.

The model is built with the parallel sizes asked for, so that each rank reads and writes its share, and the checkpoint's
config is written with the provider's own, so that it says nothing of the run that happened to make it. Who converts,
when, and where the result goes is not decided here.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasetup.checkpoint.bridges import open_model
from megasetup.checkpoint.marks import FIRST_ITERATION, RUN_CONFIG
from megasetup.checkpoint.progress import bytes_below, watch
from megasetup.checkpoint.settings import ALONE, changed
from megasetup.checkpoint.worlds import parallel_state_of, uses_gpu
from megasetup.compat.bridge import import_bridge
from megasetup.compat.local_layers import (
    building_local_layers,
    fields_of_the_machine,
    layer_spec_of_any_machine,
    local_layer_settings,
    name_as_transformer_engine,
    uses_local_layers,
    with_extra_states,
)
from megasetup.compat.no_gpu import no_gpu
from megasetup.compat.transformer_engine import is_installed
from megasetup.compat.write_queue import plain_write_queue

# What only training needs, and some machines cannot build.
_WITHOUT_GRADIENTS: dict[str, Any] = {"gradient_accumulation_fusion": False}


@dataclass(frozen=True)
class Conversion:
    """What is converted, and how.

    Attributes:
        hf_model_name: a Hugging Face id, or a folder as save_pretrained makes it.
        sizes: parallel sizes and stage layer counts by the names of policy.megatron_cfg; a process alone needs none.
        overrides: fields of the Hugging Face config to change.
        trust_remote_code: whether code that comes with the model may run.
        model_post_wrap_hook: called with each chunk of the model when its weights are loaded.
        transformer_layer_spec: a ModuleSpec, or a callable that returns one, in place of the provider's.
        hybrid_stack_spec: the same for the layer stack of Mamba and hybrid models.
    """

    hf_model_name: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    model_post_wrap_hook: Callable[[Any], Any] | None = None
    transformer_layer_spec: Any = None
    hybrid_stack_spec: Any = None


def convert(conversion: Conversion, folder: Path, final: Path) -> None:
    """Convert into a folder. Collective: every rank of the default process group calls it with equal arguments.

    Args:
        conversion: what to convert.
        folder: where to write the checkpoint; rank 0 makes it.
        final: where the checkpoint will be moved to, for its config.

    Raises:
        ValueError: Bridge does not know the model, or the provider lacks what is to be overridden.
        RuntimeError: the number of ranks does not fit the sizes.
    """
    quiet = dist.get_rank() != 0
    import_bridge("megatron.bridge.training.checkpointing")  # (before torch.cuda is answered for: imports look at it)
    with contextlib.ExitStack() as stack:
        if not uses_gpu():
            stack.enter_context(no_gpu())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # (Megatron's and Bridge's, about settings that are not the user's here)
        bridge = open_model(
            conversion.hf_model_name,
            overrides=conversion.overrides,
            trust_remote_code=conversion.trust_remote_code,
            shown=not quiet,
        )
        provider = bridge.to_megatron_provider(load_weights=True)
        _override_specs(provider, conversion)
        local = not uses_gpu() or not is_installed()
        # Local layers that the caller asks for are what the checkpoint is for; others only stand in.
        stand_in = local and (conversion.transformer_layer_spec is None or not uses_local_layers(provider))
        settings = _WITHOUT_GRADIENTS | _sizes(conversion.sizes) | (local_layer_settings(provider) if local else {})
        if stand_in:
            provider.register_pre_wrap_hook(name_as_transformer_engine)
            provider.register_pre_wrap_hook(with_extra_states)
        with changed(provider, settings) as put_back, _explained(provider, local, conversion.sizes):
            provider.finalize()
            with parallel_state_of(provider), building_local_layers() if local else contextlib.nullcontext():
                model = provider.provide_distributed_model(
                    wrap_with_ddp=False,
                    use_cpu_initialization=not uses_gpu(),
                    post_wrap_hook=_on_each_chunk(provider, conversion.model_post_wrap_hook),
                )
                saved = _save(model, folder, f"Writing {final}", quiet)
        if not quiet:
            put_back()
            if stand_in and hasattr(provider, "transformer_layer_spec"):
                provider.transformer_layer_spec = layer_spec_of_any_machine(provider.transformer_layer_spec)
            _write_run_config(saved, folder, final, fields_of_the_machine(provider) if local else [])


def _override_specs(provider: Any, conversion: Conversion) -> None:
    if conversion.transformer_layer_spec is not None:
        if not hasattr(provider, "transformer_layer_spec"):
            raise ValueError(f"transformer_layer_spec is given, and {type(provider).__name__} has no such field")
        provider.transformer_layer_spec = conversion.transformer_layer_spec
    if conversion.hybrid_stack_spec is not None:
        # Bridge called the field mamba_stack_spec before its hybrid models.
        names = [name for name in ("hybrid_stack_spec", "mamba_stack_spec") if hasattr(provider, name)]
        if not names:
            raise ValueError(
                f"a stack spec is given, and {type(provider).__name__} has neither hybrid_stack_spec nor "
                "mamba_stack_spec: leave it out for models without Mamba layers"
            )
        setattr(provider, names[0], conversion.hybrid_stack_spec)


def _sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {**ALONE, **sizes} if dist.get_world_size() > 1 else dict(ALONE)


@contextlib.contextmanager
def _explained(provider: Any, local: bool, sizes: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        kind = type(provider).__name__
        if local:
            error.add_note(
                f"megasetup: {kind} was built without Transformer Engine. A model that brings layers of its own "
                "(vision, hybrid) may need it: convert on a machine with a GPU and Transformer Engine"
            )
        if dist.get_world_size() > 1:
            shown = ", ".join(f"{name} {sizes[name]}" for name in ALONE if name in sizes)
            error.add_note(f"megasetup: {dist.get_world_size()} ranks convert with {shown or 'all parallel sizes 1'}")
        raise


def _on_each_chunk(provider: Any, hook: Callable[[Any], Any] | None) -> Callable[[list[Any]], list[Any]] | None:
    registered = provider.post_wrap_hook
    if hook is None:
        return registered  # type: ignore[no-any-return]

    def on_each(model: list[Any]) -> list[Any]:
        if registered is not None:
            model = registered(model) or model
        for chunk in model:
            hook(chunk)
        return model

    return on_each


def _save(model: list[Any], folder: Path, what: str, quiet: bool) -> Any:
    """Write the model alone, in the torch_dist format; gives the ConfigContainer that it was saved with."""
    training = import_bridge("megatron.bridge.training.config")
    state = import_bridge("megatron.bridge.training.state").GlobalState()
    state.cfg = training.ConfigContainer(
        model=import_bridge("megatron.core.utils").get_model_config(model[0]),
        train=None,
        optimizer=import_bridge("megatron.core.optimizer").OptimizerConfig(use_distributed_optimizer=False),
        ddp=None,
        scheduler=None,
        dataset=None,
        logger=training.LoggerConfig(),
        tokenizer=None,
        checkpoint=training.CheckpointConfig(
            async_save=False, save=str(folder), save_optim=False, save_rng=False, ckpt_format="torch_dist"
        ),
        dist=None,
    )
    total = _bytes_of(model)
    with plain_write_queue(), watch(what, total, lambda: bytes_below(folder), shown=not quiet):
        import_bridge("megatron.bridge.training.checkpointing").save_checkpoint(
            state=state,
            model=model,
            optimizer=None,
            opt_param_scheduler=None,
            num_floating_point_operations_so_far=0,
        )
    return state.cfg


def _bytes_of(model: list[Any]) -> int:
    """The bytes of the whole model: those of this rank times the ranks that share it out."""
    core = import_bridge("megatron.core.parallel_state")
    own = sum(parameter.numel() * parameter.element_size() for chunk in model for parameter in chunk.parameters())
    shares = core.get_tensor_model_parallel_world_size() * core.get_pipeline_model_parallel_world_size()
    return int(own * shares)


def _write_run_config(saved: Any, folder: Path, final: Path, left_out: list[str]) -> None:
    """Write the checkpoint's config again, as any machine and any run may read it."""
    yaml = import_bridge("yaml")
    path = folder / FIRST_ITERATION / RUN_CONFIG
    saved.checkpoint.save = str(final)
    saved.to_yaml(str(path))
    if left_out:
        written = yaml.safe_load(path.read_text())
        for name in left_out:
            written["model"].pop(name, None)
        path.write_text(yaml.safe_dump(written))
