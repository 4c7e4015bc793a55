"""GPU memory that can be given back and taken again at the same addresses, by torch_memory_saver where it is installed.

That library ends the process when memory is paused that is paused already, or resumed that was not, and after its first
use it takes no settings. Here both are harmless: what is known of each tag stands beside the calls.

Needed with torch_memory_saver up to 0.0.10; the bookkeeping may go when it raises, or does nothing, instead.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

_logger = logging.getLogger("megasetup")

# Of each tag that a region was made for in this process, whether its memory is paused.
_paused: dict[str, bool] = {}


@contextlib.contextmanager
def pausable_memory(tag: str, what: str) -> Iterator[None]:
    """GPU memory that the block takes can be paused from then on. Without torch_memory_saver it cannot: one warning.

    Args:
        tag: names it for `pause` and `resume`.
        what: whose memory it is, for messages.

    Raises:
        RuntimeError: memory of this tag is paused.
    """
    saver = _memory_saver()
    if saver is None:
        _logger.warning(
            "torch_memory_saver is not installed, so %s keeps its GPU memory: pip install torch_memory_saver", what
        )
        yield
        return
    if _paused.get(tag):
        raise RuntimeError(f"the memory of {what} is paused: resume it before more is taken")
    with saver.region(tag=tag):
        yield
    _paused[tag] = False


def pause(tag: str) -> bool:
    """Give the memory of a tag back; its contents are lost, its addresses stay reserved.

    Returns:
        Whether it is paused now: False where no region was made for it.
    """
    return _switch(tag, paused=True)


def resume(tag: str) -> bool:
    """Put memory under the addresses of a tag again.

    Returns:
        Whether it can be used and paused: False where no region was made for it.
    """
    return _switch(tag, paused=False)


def _switch(tag: str, *, paused: bool) -> bool:
    if tag not in _paused:
        return False
    if _paused[tag] != paused:
        saver = _memory_saver()
        (saver.pause if paused else saver.resume)(tag)
        _paused[tag] = paused
    return True


def _memory_saver() -> Any:
    try:
        saver = importlib.import_module("torch_memory_saver").torch_memory_saver
    except ImportError:
        return None
    if not _paused and "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        # Its other way of hooking in needs the library preloaded. (Another user of it may have come first, and then its
        # own check stumbles over what it has deleted by then.)
        with contextlib.suppress(AssertionError, AttributeError):
            saver.hook_mode = "torch"
    return saver
