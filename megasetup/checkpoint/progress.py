"""How far a long conversion is: a bar on a terminal, a line in the log every few seconds elsewhere.

A thread asks for the count, so that work which cannot report by itself, such as writing a checkpoint, is shown by what
it leaves behind. It never speaks for longer than the work takes, and an error in the work passes through untouched.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_logger = logging.getLogger("megasetup")

LOG_EVERY_SECONDS = 5.0
_BAR_EVERY_SECONDS = 0.2


@contextmanager
def watch(what: str, total: int, count: Callable[[], int], *, shown: bool = True) -> Iterator[None]:
    """Show how far the block is while it runs.

    Args:
        what: what the block does ("Reading Qwen/Qwen3-8B").
        total: the count at the end, at least 1.
        count: says how far the block is, called from another thread.
        shown: False on ranks that keep quiet.
    """
    if not shown:
        yield
        return
    stop = threading.Event()
    follow = _bar if sys.stderr.isatty() else _lines
    thread = threading.Thread(
        target=follow, args=(what, max(total, 1), count, stop), name="megasetup-progress", daemon=True
    )
    started = time.monotonic()
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    _logger.info("%s: done in %.1f s", what, time.monotonic() - started)


def tracked[Item](items: Collection[Item], what: str, *, shown: bool = True) -> Iterator[Item]:
    """The items, one after the other, with how many have been worked on shown meanwhile."""
    done = 0

    def count() -> int:
        return done

    with watch(what, len(items), count, shown=shown):
        for item in items:
            yield item
            done += 1


def bytes_below(folder: Path) -> int:
    """The bytes that the files below a folder hold at this moment."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # (renamed or removed since it was listed)
            total += file.stat().st_size if file.is_file() else 0
    return total


def _bar(what: str, total: int, count: Callable[[], int], stop: threading.Event) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task: Any = progress.add_task(what, total=total)
        while not stop.wait(_BAR_EVERY_SECONDS):
            progress.update(task, completed=min(count(), total))


def _lines(what: str, total: int, count: Callable[[], int], stop: threading.Event) -> None:
    started = time.monotonic()
    while not stop.wait(LOG_EVERY_SECONDS):
        share = min(count() / total, 1.0)
        _logger.info("%s: %.0f%% after %.0f s", what, 100 * share, time.monotonic() - started)
