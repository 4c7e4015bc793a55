"""Adam's moments in the memory that was made for them, where torch's first step would allocate its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Moments:
    """What is to hold the moments of each master.

    Args:
        places: for each master its moments by name, zeroed; a master that is not in it has the moments that the
            optimizer makes.
    """

    def __init__(self, places: Mapping[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        self._places = places
        self._used: set[torch.Tensor] = set()

    def begin(self, optimizer: torch.optim.Optimizer, master: torch.Tensor) -> None:
        """Give the master the state that torch's Adam begins with, if it has none."""
        moments = self._places.get(master)
        if moments is None or optimizer.state[master]:
            return
        settings = optimizer.param_groups[0]
        on_device = settings["capturable"] or settings["fused"]
        step = torch.zeros((), dtype=torch.float32) if on_device else torch.tensor(0.0)
        if master in self._used:
            for moment in moments.values():
                moment.zero_()
        self._used.add(master)
        optimizer.state[master].update(step=step, **moments)

    def adopt(self, master: torch.Tensor, entry: dict[str, Any]) -> None:
        """Bring the tensors of a state into the master's memory, others to its device."""
        places = self._places.get(master, {})
        for key, value in entry.items():
            if key == "master_param" or not isinstance(value, torch.Tensor):
                continue
            place = places.get(key)
            if place is None:
                # Counts of steps may have been loaded as one tensor for all, which each of them would count up.
                entry[key] = value.to(master.device, copy=value.dim() == 0)
            elif place.data_ptr() != value.data_ptr():
                self._used.add(master)
                entry[key] = place.copy_(value.view(place.shape))
