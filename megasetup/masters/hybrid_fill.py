"""Values of parameters into their masters and back, wherever each lies.

Those that may be cut as flat memory go through the kernels and the engine, many at once; torch copies the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from megasetup import kernels
from megasetup.masters.hybrid_traffic import can_be_cut


def convert(
    kernel: Callable[[list[torch.Tensor], list[torch.Tensor]], None], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """kernels.widen or narrow over (source, target) pairs of one device; torch copies what they cannot."""
    sources, targets = [], []
    for source, target in pairs:
        low, high = (source, target) if kernel is kernels.widen else (target, source)
        if can_be_cut(low, high):
            sources.append(source)
            targets.append(target)
        else:
            target.copy_(source)
    kernel(sources, targets)


def fill(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the parameter of each (parameter, master) into the master, exactly; on the host all is there then."""
    jobs: dict[torch.device, list[kernels.CopyJob]] = defaultdict(list)
    on_host = []
    for param, master in pairs:
        source = param.detach()
        if source.is_cuda and can_be_cut(source, master):
            near = master.device == source.device
            jobs[source.device].append(kernels.CopyJob(source, master if near else None, None if near else master))
        elif source.is_cuda or master.is_cuda:
            master.copy_(source)
        else:
            on_host.append((source, master))
    for device, of_device in jobs.items():
        kernels.Transfer(of_device, device).run()
    convert(kernels.widen, on_host)
