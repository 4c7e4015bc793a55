"""Has the pages of host memory be there before they are used, by threads of its own, beside other work of the process.

The kernel clears a page when it is first used, and who uses it waits. The worker threads of the compiled module are
needed meanwhile (they fill the masters while the moments' pages are cleared), so these are other threads, which end.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
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
        self._memory = memory
        self._first, self._end = address, address + nbytes
        self._check = check
        self._blocks = itertools.count(address // _BLOCK_BYTES)
        self._over = threading.Event()
        self._problem: Exception | None = None
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        if nbytes:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            self._threads = [
                threading.Thread(target=self._work, args=(libc.madvise,), name="megasetup-populating", daemon=True)
                for _ in range(threads)
            ]
            # All begin at once: to start a thread memory is mapped, which would wait for the calls of those that are at
            # work, and hold up their next ones.
            self._started = threading.Barrier(threads + 1)
            for thread in self._threads:
                thread.start()
            self._started.wait()

    def _work(self, madvise: Any) -> None:
        self._started.wait()
        while not self._over.is_set():
            block = next(self._blocks)
            first = max(block * _BLOCK_BYTES, self._first)
            end = min((block + 1) * _BLOCK_BYTES, self._end)
            if first >= end:
                return
            try:
                if block % _BLOCKS_BETWEEN_CHECKS == 0:
                    self._check(self._end - first)
            except Exception as problem:
                self._problem = problem
                self._over.set()
                return
            if madvise(first, end - first, _POPULATE_WRITE):
                self._over.set()

    def wait(self) -> None:
        """Wait until all pages are there, or cannot be.

        Raises:
            Exception: what the check raised.
        """
        self._join()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """End the work where it is, and let go of the memory."""
        self._over.set()
        self._join()

    def _join(self) -> None:
        # A forked child has the memory, and none of the threads.
        if self._process == os.getpid():
            for thread in self._threads:
                thread.join()
        self._threads = []
        self._memory = None
