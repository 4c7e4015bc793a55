"""The step of what a hybrid optimizer leaves on the GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megasetup import kernels
from megasetup.masters.hybrid_choice import tensors_of
from megasetup.masters.hybrid_fill import convert
from megasetup.masters.hybrid_traffic import gradient_of


def step_on_gpu(optimizer: torch.optim.Optimizer, original: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Step FP32 copies with their parameters' gradients, and parameters that have none as they are.

    Args:
        optimizer: what steps them.
        original: the parameter for each tensor that it steps, which may be that tensor.
    """
    before, copied = [], []
    try:
        for stepped in tensors_of(optimizer.param_groups):
            param = original[stepped]
            if stepped is not param:
                copied.append((stepped, param.detach()))
            elif getattr(param, "decoupled_grad", None) is None:
                continue
            before.append((stepped, stepped.grad))
            gradient = gradient_of(param)
            stepped.grad = None if gradient is None else gradient.to(stepped.dtype)
        optimizer.step()
    finally:
        for stepped, gradient in before:
            stepped.grad = gradient
    with torch.no_grad():
        convert(kernels.narrow, copied)
