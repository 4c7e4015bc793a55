"""What a hybrid optimizer, Megatron's or ours, takes of the host's memory: pinned, needed of that, and at its peak.

"Needed" is counted in the same way for both: the bytes of the tensors in use that lie in pinned memory, each memory
once. So what is pinned against what is needed tells what pinning itself costs: blocks rounded up, and blocks that the
allocator keeps after their tensors are gone. It says nothing of who uses more pinned tensors; the bytes do.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from megasetup import host


def pinned_bytes(hybrid: Any) -> int:
    """Bytes in the blocks that torch's pinned allocator holds, used or not, and those that ours has pinned itself."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)) + getattr(hybrid, "pinned_bytes", 0)


def needed_bytes(hybrid: Any) -> int:
    """Bytes of the tensors in pinned memory through which the optimizer steps.

    Clones, gradients (one a clone in Megatron's, from the first step on; the ring's buffers in ours), and the state's
    tensors. What is pageable does not count, as Megatron's clones in precision-aware mode and everybody's moments.
    """
    tensors = [
        *hybrid.cpu_copys_map_gpu_param,
        *hybrid.cpu_copy_map_grad.values(),
        *getattr(hybrid, "gradient_buffers", ()),
        *(value for entry in hybrid.state.values() for value in entry.values() if isinstance(value, torch.Tensor)),
    ]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.is_pinned()}.values())


class PeakHostMemory:
    """The most host memory that was taken while the block ran, pinned memory included, seen by the whole machine."""

    def __init__(self) -> None:
        self.bytes = 0
        self._before = host.memory().available
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, self._before - host.memory().available)

    def __enter__(self) -> PeakHostMemory:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
