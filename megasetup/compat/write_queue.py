"""Lets Megatron write a checkpoint without a second process to pass results through.

Megatron's writer hands its results over in a queue of a multiprocessing manager, a process that it starts at the first
save and never ends. It is meant for asynchronous saves. For a conversion, which writes in its own process, it costs two
to five seconds, runs the caller's script a second time when that has no `if __name__ == "__main__"`, and outlives a
process that is killed, holding its output open. A plain queue does the same there.

Needed with megatron-core from 0.16 to 0.19.2 at least; does nothing on a version whose writer has no such queue.
"""

from __future__ import annotations

import importlib
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


@contextmanager
def plain_write_queue() -> Iterator[None]:
    """Have synchronous saves use a plain queue while the block runs."""
    writer: Any = importlib.import_module(_WRITER)
    if not hasattr(writer, "_results_queue"):
        yield
        return
    before = writer._results_queue
    writer._results_queue = queue.Queue()
    try:
        yield
    finally:
        writer._results_queue = before
