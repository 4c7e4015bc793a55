"""State that was loaded into a hybrid optimizer becomes that of its sub-optimizers, in the memory made for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megasetup.masters.hybrid_fill import fill
from megasetup.masters.hybrid_moments import Moments

# Says of a parameter, its master and the state's master, None if it has none, whether the parameter is what counts.
FromParam = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], bool]


@torch.no_grad()
def adopt(
    sub_optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[torch.Tensor, dict[str, Any]],
    original: Mapping[torch.Tensor, torch.Tensor],
    moments: Moments,
    from_param: FromParam,
) -> None:
    """Hand a state to the sub-optimizers; its entries become theirs.

    A master is taken from the state where that holds another tensor than the master itself; otherwise from the
    parameter, if from_param says so. No copy that reads masters may be under way.

    Args:
        sub_optimizers: what steps the masters.
        state: by the hybrid optimizer's parameters.
        original: the parameter for each tensor that a sub-optimizer steps, which may be that tensor.
        moments: what holds Adam's moments.
        from_param: what to do where the state has no other master.
    """
    refreshed = []
    for optimizer in sub_optimizers:
        of_optimizer: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for master in [master for group in optimizer.param_groups for master in group["params"]]:
            param = original[master]
            entry = state.get(param, {})
            saved = entry.get("master_param")
            if saved is not None and saved.data_ptr() != master.data_ptr():
                master.copy_(saved.view(master.shape))
                entry["master_param"] = master
            elif master is not param and from_param(param, master, saved):
                refreshed.append((param, master))
            if entry:
                moments.adopt(master, entry)
                of_optimizer[master] = entry
        optimizer.state = of_optimizer
    fill(refreshed)
