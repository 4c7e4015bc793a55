"""The same functions in plain torch, for when the compiled module is absent.

Slower (a copy a tensor, and whole-tensor temporaries in compare, kept small by working in pieces), but the values are
the same, and the tests hold both to one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements compared at a time: bounds the temporaries at a few hundred MB.
_PIECE = 1 << 24

Result = tuple[int, int, int, int]


@torch.no_grad()
def widen(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.view(-1).copy_(source.view(-1))


narrow = widen


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _first(differs: torch.Tensor, offset: int) -> int:
    return int(differs.to(torch.uint8).argmax()) + offset


@torch.no_grad()
def compare_one(weight: torch.Tensor, master: torch.Tensor) -> Result:
    weight, master = weight.reshape(-1), master.reshape(-1)
    exact = rounded = 0
    first_exact = first_rounded = -1
    for start in range(0, weight.numel(), _PIECE):
        low, high = weight[start : start + _PIECE], master[start : start + _PIECE].to(weight.device)
        # A 16-bit copy of a 16-bit weight is compared by its bits alone, as the compiled kernels do.
        numbers = ~(low.isnan() & high.isnan()) if high.element_size() == 4 else torch.ones_like(low, dtype=torch.bool)
        differs = (_bits(low.to(high.dtype)) != _bits(high)) & numbers
        rounds_off = (_bits(high.to(low.dtype)) != _bits(low)) & numbers
        piece_exact, piece_rounded = int(differs.sum()), int(rounds_off.sum())
        if piece_exact and first_exact < 0:
            first_exact = _first(differs, start)
        if piece_rounded and first_rounded < 0:
            first_rounded = _first(rounds_off, start)
        exact += piece_exact
        rounded += piece_rounded
    return exact, rounded, first_exact, first_rounded


def compare(weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> list[Result]:
    return [compare_one(weight, master) for weight, master in zip(weights, masters, strict=True)]
