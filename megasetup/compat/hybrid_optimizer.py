"""Makes Megatron construct PipelinedHybridOptimizer wherever it would construct its HybridDeviceOptimizer.

megatron-core 0.19: several modules hold the stock class under its name, for construction and for isinstance checks. So
no name is replaced: the stock class's own constructor turns the object that it is called on into one of ours. Objects
that exist stay what they are, subclasses of others too.

DistributedOptimizer is followed when it has constructed its second, real hybrid optimizer, whose host side is then made
at once. Its distributed checkpoints are repaired (hybrid_checkpoints.py). Writers of asynchronous checkpoints are given
copies of the hybrid optimizer's tensors, as long as it lives (async_save.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_depth = 0
_originals: list[tuple[type, Callable[..., None]]] = []


def install() -> None:
    """From here on Megatron's hybrid optimizers are PipelinedHybridOptimizers. Calls nest; each needs an uninstall().

    Raises:
        ImportError: megatron-core is not installed.
    """
    global _depth
    with _lock:
        if _depth == 0:
            _patch()
        _depth += 1


def uninstall() -> None:
    """Undo one install(). The last one leaves Megatron's classes as they were.

    Raises:
        RuntimeError: there was no install() to undo.
    """
    global _depth
    with _lock:
        if _depth == 0:
            raise RuntimeError("uninstall() without an install() before it")
        _depth -= 1
        if _depth == 0:
            while _originals:
                kind, constructor = _originals.pop()
                kind.__init__ = constructor  # type: ignore[misc]


def is_installed() -> bool:
    """Whether Megatron constructs ours now."""
    return _depth > 0


@contextmanager
def fast_hybrid_optimizer() -> Iterator[None]:
    """install() for a `with` block."""
    install()
    try:
        yield
    finally:
        uninstall()


def _patch() -> None:
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megasetup.compat import async_save, hybrid_checkpoints
    from megasetup.masters.hybrid import PipelinedHybridOptimizer

    construct_hybrid = HybridDeviceOptimizer.__init__
    construct_distributed = DistributedOptimizer.__init__

    @functools.wraps(construct_hybrid)
    def hybrid(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is HybridDeviceOptimizer:
            self.__class__ = PipelinedHybridOptimizer
            PipelinedHybridOptimizer.__init__(self, *args, **kwargs)
            async_save.protect(self)
        else:
            construct_hybrid(self, *args, **kwargs)

    @functools.wraps(construct_distributed)
    def distributed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct_distributed(self, *args, **kwargs)
        if isinstance(self.optimizer, PipelinedHybridOptimizer):
            self.optimizer.make()
            if not self.ddp_config.use_megatron_fsdp:  # which keeps all of this itself
                hybrid_checkpoints.repair(self)

    _originals.append((HybridDeviceOptimizer, construct_hybrid))
    _originals.append((DistributedOptimizer, construct_distributed))
    HybridDeviceOptimizer.__init__ = hybrid
    DistributedOptimizer.__init__ = distributed
