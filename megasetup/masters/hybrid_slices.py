"""Stepping a long master slice by slice, with the same results as at once.

Whole, an embedding of hundreds of millions of elements would be fetched before anything of it is stepped and stepped
before anything of it is sent. torch's fused Adam works element by element; its threads share a tensor out in units of
64 bytes, and only what is left after the last vector is not done by the vector loop. So slices from multiples of 64
elements give the same bits.

The sub-optimizer that Megatron sees holds the whole master and one state of it. Another of the same class steps the
slices, whose moments are views of that state's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# The state of torch's Adam and AdamW that has a tensor's size.
MOMENTS = ("exp_avg", "exp_avg_sq")


class SlicedMaster:
    """Steps one master slice by slice.

    Args:
        optimizer: the sub-optimizer that holds the master; torch's Adam or AdamW, fused. Its settings and its state are
            what counts. It is not stepped itself.
        master: the master, flat.
        ranges: the elements [first, last) of each slice.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, master: torch.Tensor, ranges: Sequence[tuple[int, int]]
    ) -> None:
        self.optimizer = optimizer
        (self._whole,) = optimizer.param_groups[0]["params"]
        self._slices = {first: (last, master[first:last]) for first, last in ranges}
        kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
        self._stepper = kind([{**optimizer.param_groups[0], "params": [master[:0]]}])

    def slice_at(self, first: int) -> torch.Tensor:
        """The slice that begins at this element."""
        return self._slices[first][1]

    def begin(self) -> None:
        """Take the settings and the state of the sub-optimizer, which has one."""
        settings = self.optimizer.param_groups[0]
        self._stepper.param_groups[0].update({key: value for key, value in settings.items() if key != "params"})
        entry: dict[str, Any] = self.optimizer.state[self._whole]
        held = self._stepper.state.get(self.slice_at(0), {})
        # Compared by where they lie: whoever moves the whole moment's storage has taken these views along.
        if not held or any(held[name].data_ptr() != entry[name].data_ptr() for name in MOMENTS):
            for first, (last, piece) in self._slices.items():
                views = {name: entry[name].view(-1)[first:last] for name in MOMENTS}
                self._stepper.state[piece] = {"step": entry["step"].clone(), **views}
        for _, piece in self._slices.values():
            self._stepper.state[piece]["step"].copy_(entry["step"])

    def step(self, piece: torch.Tensor) -> None:
        """Step one slice; one without a gradient stays as it is."""
        self._stepper.param_groups[0]["params"][0] = piece
        self._stepper.step()

    def end(self) -> None:
        """All slices have been stepped: so has the whole."""
        piece = next(iter(self._slices.values()))[1]
        self.optimizer.state[self._whole]["step"].copy_(self._stepper.state[piece]["step"])
