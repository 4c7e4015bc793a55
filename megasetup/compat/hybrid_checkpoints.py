"""Repairs the distributed checkpoints of a DistributedOptimizer that holds one of our hybrid optimizers.

megatron-core 0.19, with its own hybrid optimizer too:
- Where a group holds natively FP32 and 16-bit parameters, each is looked up at another one's place, so that saving
  fails for a wrong size, or saves another one's values.
- Loading in standard mode asks the checkpoint for "step" and "master_param", which are not in it (KeyError).
- Two of the sharding types do not tell the hybrid optimizer that its state was loaded, so that its masters keep the
  values from before, and write to natively FP32 parameters with gradients enabled (RuntimeError).
- dp_reshardable, Megatron's default, sets the loaded count of steps back to the one before the load.
- Without Transformer Engine and Apex a new process cannot load (AssertionError): the count of steps is asked of a state
  that is made a moment later.
- Saving before the first step is a KeyError; here an error that says so.
To ask for what is to be loaded loads the state that is there, which is no reason to forget that a step was cut off; and
what a step that was cut off has left is not saved.

Each object is repaired and stays so. Nothing that is set on it refers to it: the pinned memory goes with the last
reference to it, and not some time later with the next collection of garbage.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch


def repair(distributed: Any) -> None:
    """Repair a DistributedOptimizer whose hybrid optimizer is made."""
    _repair_places(distributed)
    kind, found = type(distributed), weakref.ref(distributed)
    distributed._set_main_param_and_optimizer_states = _setting_what_is_there(
        found, kind._set_main_param_and_optimizer_states
    )
    distributed.sharded_state_dict = _with_a_state(found, kind.sharded_state_dict)
    for name in ("load_parameter_state_from_dp_zero", "load_parameter_state_from_dp_reshardable"):
        setattr(distributed, name, _followed_by_sync(found, getattr(kind, name)))


def _repair_places(distributed: Any) -> None:
    """Have Megatron find each parameter where it has put it: in each group those that are natively FP32 come first."""
    for group, (native, widened) in enumerate(
        zip(distributed.model_fp32_groups, distributed.model_float16_groups, strict=True)
    ):
        for place, param in enumerate([*native, *widened]):
            distributed.model_param_group_index_map[param] = (group, place)


def _setting_what_is_there(found: Callable[[], Any], set_tensors: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_tensors)
    def set_what_is_there(model_param: Any, tensors: dict[str, Any]) -> None:
        # What is not a tensor is skipped; the hybrid optimizer counts its steps and keeps its masters itself.
        set_tensors(found(), model_param, {"master_param": None, **tensors, "step": None})

    return set_what_is_there


def _with_a_state(found: Callable[[], Any], sharded: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sharded)
    def with_a_state(model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        distributed = found()
        hybrid = distributed.optimizer
        if not is_loading:
            if hybrid.cut_off is not None:
                raise RuntimeError(hybrid.cut_off)
            # (A rank may have no share of the parameters, and so never any state; the others wait for it.)
            if not hybrid.state and any(group["params"] for group in hybrid.param_groups):
                raise RuntimeError(
                    "the hybrid optimizer has no moments before its first step, and a distributed checkpoint needs "
                    "them: save after a step, or the model alone"
                )
            return sharded(distributed, model_sharded_state_dict, is_loading, *args, **kwargs)
        cut_off = hybrid.cut_off
        if not hybrid.state:
            hybrid.dummy_step()  # as Megatron does next
        try:
            return sharded(distributed, model_sharded_state_dict, is_loading, *args, **kwargs)
        finally:
            hybrid.cut_off = cut_off

    return with_a_state


def _followed_by_sync(found: Callable[[], Any], load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    @torch.no_grad()
    def loaded(*args: Any, **kwargs: Any) -> None:
        distributed = found()
        load(distributed, *args, **kwargs)
        distributed.optimizer._sync_hdo_state_to_sub_optimizers()

    return loaded
