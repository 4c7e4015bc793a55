"""How fast the host's memory takes the CPU's streaming stores: the limit of any refresh of FP32 clones.

Every FP32 element is four bytes written, whichever way it came, so where several ranks share a host its memory, not
their wires, can be what bounds them. Measured by widening one block that stays in the cache into a large target again
and again: the writes are all that costs.
"""

from __future__ import annotations

import torch

from megasetup import kernels
from megasetup.cli.timing import seconds_of

# 128 KiB of BF16: within any second-level cache, and read from there.
_BLOCK = 1 << 16


def measure_host_writes(target: torch.Tensor, repeats: int = 3) -> float:
    """Bytes a second of streaming stores into `target`, on the threads that the package uses: the best of several.

    Args:
        target: FP32 CPU memory, flat, larger than any cache; it is overwritten.
    """
    blocks = list(torch.split(target, _BLOCK))
    source = torch.zeros(_BLOCK, dtype=torch.bfloat16)
    sources = [source[: len(block)] for block in blocks]
    return target.nbytes / min(
        seconds_of(lambda: kernels.widen(sources, blocks), target.device)[0] for _ in range(repeats)
    )
