"""Makes Megatron construct PipelinedHybridOptimizer wherever it would construct its HybridDeviceOptimizer.

megatron-core 0.19: several modules hold the stock class under its name, for construction and for isinstance checks. So
no name is replaced: the stock class's own constructor turns the object that it is called on into one of ours. Objects
that exist stay what they are, subclasses of others too.

DistributedOptimizer is followed when it has constructed its second, real hybrid optimizer, whose host side is then made
at once. It also gets its distributed checkpoints repaired, in each object that holds one of ours (they stay repaired
after uninstall()):
- Where a group holds natively FP32 and 16-bit parameters, each is looked up at another one's place, so that saving
  fails for a wrong size, or saves another one's values.
- Loading in standard mode asks the checkpoint for "step" and "master_param", which are not in it (KeyError).
- Two of the sharding types do not tell the hybrid optimizer that its state was loaded, so that its masters keep the
  values from before, and write to natively FP32 parameters with gradients enabled (RuntimeError).
- dp_reshardable, Megatron's default, sets the loaded count of steps back to the one before the load.
Writers of asynchronous checkpoints are given copies of its tensors, as long as it lives (async_save.py).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_depth = 0
_originals: list[tuple[type, Callable[..., None]]] = []


def install() -> None:
    """From here on Megatron's hybrid optimizers are PipelinedHybridOptimizers. Calls nest; each needs an uninstall().

    Raises:
        ImportError: megatron-core is not installed.
    """
    global _depth
    with _lock:
        if _depth == 0:
            _patch()
        _depth += 1


def uninstall() -> None:
    """Undo one install(). The last one leaves Megatron's classes as they were.

    Raises:
        RuntimeError: there was no install() to undo.
    """
    global _depth
    with _lock:
        if _depth == 0:
            raise RuntimeError("uninstall() without an install() before it")
        _depth -= 1
        if _depth == 0:
            while _originals:
                kind, constructor = _originals.pop()
                kind.__init__ = constructor  # type: ignore[misc]


def is_installed() -> bool:
    """Whether Megatron constructs ours now."""
    return _depth > 0


@contextmanager
def fast_hybrid_optimizer() -> Iterator[None]:
    """install() for a `with` block."""
    install()
    try:
        yield
    finally:
        uninstall()


def _patch() -> None:
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megasetup.compat import async_save
    from megasetup.masters.hybrid import PipelinedHybridOptimizer

    construct_hybrid = HybridDeviceOptimizer.__init__
    construct_distributed = DistributedOptimizer.__init__

    @functools.wraps(construct_hybrid)
    def hybrid(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is HybridDeviceOptimizer:
            self.__class__ = PipelinedHybridOptimizer
            PipelinedHybridOptimizer.__init__(self, *args, **kwargs)
            async_save.protect(self)
        else:
            construct_hybrid(self, *args, **kwargs)

    @functools.wraps(construct_distributed)
    def distributed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct_distributed(self, *args, **kwargs)
        if isinstance(self.optimizer, PipelinedHybridOptimizer):
            self.optimizer.make()
            if not self.ddp_config.use_megatron_fsdp:  # which keeps all of this itself
                _repair_places(self)
                _repair_loading(self)

    _originals.append((HybridDeviceOptimizer, construct_hybrid))
    _originals.append((DistributedOptimizer, construct_distributed))
    HybridDeviceOptimizer.__init__ = hybrid
    DistributedOptimizer.__init__ = distributed


def _repair_places(distributed: Any) -> None:
    """Have Megatron find each parameter where it has put it: in each group those that are natively FP32 come first."""
    for group, (native, widened) in enumerate(
        zip(distributed.model_fp32_groups, distributed.model_float16_groups, strict=True)
    ):
        for place, param in enumerate([*native, *widened]):
            distributed.model_param_group_index_map[param] = (group, place)


def _repair_loading(distributed: Any) -> None:
    # Nothing here refers to the object that it is set on: the pinned memory goes with the last reference to that, and
    # not some time later with the next collection of garbage.
    kind, found = type(distributed), weakref.ref(distributed)

    def set_what_is_there(model_param: Any, tensors: dict[str, Any]) -> None:
        # What is not a tensor is skipped; the hybrid optimizer counts its steps and keeps its masters itself.
        kind._set_main_param_and_optimizer_states(found(), model_param, {"master_param": None, **tensors, "step": None})

    distributed._set_main_param_and_optimizer_states = set_what_is_there
    for name in ("load_parameter_state_from_dp_zero", "load_parameter_state_from_dp_reshardable"):
        setattr(distributed, name, _followed_by_sync(found, getattr(kind, name)))


def _followed_by_sync(found: Callable[[], Any], load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    @torch.no_grad()
    def loaded(*args: Any, **kwargs: Any) -> None:
        distributed = found()
        load(distributed, *args, **kwargs)
        distributed.optimizer._sync_hdo_state_to_sub_optimizers()

    return loaded
