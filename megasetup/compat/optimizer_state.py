"""Resumes of optimizer state on a machine with neither Transformer Engine nor APEX.

There Megatron steps with torch's Adam, which has made no state before its first step, and keeps a count of steps for
each parameter, by which it corrects its moments. Before a load megatron-core asks DistributedOptimizer for that count
and fails by a bare assert when there is none. After a load in its default form, dp_reshardable, the counts are those
from before the load; in other forms all parameters share one, as one tensor, which one step would raise as often as
there are parameters. The right count is in the parameter groups.

Needed with megatron-core 0.19; may go when it begins torch's state before it asks for it, and gives each parameter the
count that was saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megasetup.compat.bridge import import_bridge


@contextlib.contextmanager
def loading_state_of_torch_adam(optimizer: Any, restored: Sequence[object]) -> Iterator[None]:
    """Let optimizer state be loaded where Megatron has no fused Adam; nothing is done where it has one.

    Args:
        optimizer: Megatron's optimizer; its state is begun before the block where it has none.
        restored: filled by the block when the state was loaded; where it stays empty the state that was begun is taken
            away again.

    Raises:
        NotImplementedError: the optimizer is not torch's Adam, whose state Megatron cannot load without a fused Adam.
            Nothing has been read or changed.
    """
    distributed = import_bridge("megatron.core.optimizer.distrib_optimizer")
    parts = [
        part.optimizer
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        # (without an optimizer where this rank trains none of its parameters)
        if isinstance(part, distributed.DistributedOptimizer) and part.optimizer is not None
    ]
    if distributed.HAVE_APEX_OR_TE or not parts:
        yield
        return
    steppers = [stepper for part in parts for stepper in getattr(part, "sub_optimizers", [part])]
    for stepper in steppers:
        if not isinstance(stepper, torch.optim.Adam | torch.optim.AdamW):
            raise NotImplementedError(
                f"the state of {type(stepper).__name__} cannot be resumed on a machine that has neither Transformer "
                "Engine nor APEX: policy.megatron_cfg.optimizer.optimizer must be adam there; or resume without its "
                "state (optimizer_path None), or install Transformer Engine"
            )
    begun = [part for part in parts if not part.state]
    for part in begun:
        _begin(part)
    yield
    if not restored:
        for part in begun:
            for stepper in (part, *getattr(part, "sub_optimizers", ())):
                stepper.state.clear()
        return
    for part in parts:
        for group in part.param_groups:
            for entry in [part.state[parameter] for parameter in group["params"] if "step" in group]:
                entry["step"] = torch.full_like(entry["step"], group["step"])


def _begin(part: Any) -> None:
    """State as torch's Adam begins it."""
    if hasattr(part, "sub_optimizers"):
        # As Megatron does it where there is a fused Adam. The step's weights are loaded over, as the state is.
        part.dummy_step()
        return
    for group in part.param_groups:
        for parameter in group["params"]:
            part.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
