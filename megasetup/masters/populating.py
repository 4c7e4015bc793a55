"""Has the pages of host memory be there before they are used, by threads of its own, beside other work of the process.

The kernel clears a page when it is first used, and who uses it waits. The worker threads of the compiled module are
needed meanwhile (they fill the masters while the moments' pages are cleared), so these are other threads, which end.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

# Linux 5.14. Where it is refused nothing is lost: the pages come when they are used.
_POPULATE_WRITE = 23

# What one call populates: whole huge pages, and short, because the kernel maps nothing else during a call.
_BLOCK_BYTES = 4 << 20
# Between two looks at what is free.
_BLOCKS_BETWEEN_CHECKS = 256


class Populating:
    """Pages that are being populated. Whoever uses them meanwhile is served as ever.

    When it is dropped the work ends where it is, and the memory is let go.

    Args:
        memory: what keeps the memory mapped.
        address: its first byte.
        nbytes: its length; 0 for nothing to do.
        threads: how many threads work on it, at least 1.
        check: called now and then with the bytes that are not there yet; what it raises ends the work.
    """

    def __init__(
        self,
        memory: Any,
        address: int,
        nbytes: int,
        *,
        threads: int,
        check: Callable[[int], None] = lambda missing: None,
    ) -> None:
        self._work = _Work(memory, address, address + nbytes, check)
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        # The threads know the work and not this object, so that it can be dropped while they are at it.
        weakref.finalize(self, self._work.over.set)
        if nbytes:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            # All begin at once: to start a thread memory is mapped, which would wait for the calls of those that are at
            # work, and hold up their next ones.
            started = threading.Barrier(threads + 1)
            self._threads = [
                threading.Thread(
                    target=self._work.run, args=(libc.madvise, started), name="megasetup-populating", daemon=True
                )
                for _ in range(threads)
            ]
            for thread in self._threads:
                thread.start()
            started.wait()

    def wait(self) -> None:
        """Wait until all pages are there, or cannot be.

        Raises:
            Exception: what the check raised.
        """
        self._join()
        if self._work.problem is not None:
            raise self._work.problem

    def stop(self) -> None:
        """End the work where it is, and let go of the memory."""
        self._work.over.set()
        self._join()

    def _join(self) -> None:
        # A forked child has the memory, and none of the threads.
        if self._process == os.getpid():
            for thread in self._threads:
                thread.join()
        self._threads = []
        self._work.memory = None


class _Work:
    """What the threads share."""

    def __init__(self, memory: Any, first: int, end: int, check: Callable[[int], None]) -> None:
        self.memory = memory
        self.over = threading.Event()
        self.problem: Exception | None = None
        self._first, self._end = first, end
        self._check = check
        self._blocks = itertools.count(first // _BLOCK_BYTES)

    def run(self, madvise: Any, started: threading.Barrier) -> None:
        started.wait()
        while not self.over.is_set():
            block = next(self._blocks)
            first = max(block * _BLOCK_BYTES, self._first)
            end = min((block + 1) * _BLOCK_BYTES, self._end)
            if first >= end:
                return
            try:
                if block % _BLOCKS_BETWEEN_CHECKS == 0:
                    self._check(self._end - first)
            except Exception as problem:
                self.problem = problem
                self.over.set()
                return
            if madvise(first, end - first, _POPULATE_WRITE):
                self.over.set()
