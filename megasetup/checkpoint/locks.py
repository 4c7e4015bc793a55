"""One process at a time: a lock on a file that is let go when its holder dies, however it dies.

A POSIX record lock belongs to the process. The kernel drops it when the process ends, by SIGKILL too; children that a
checkpoint writer forked do not keep it; and NFS carries it between machines, dropping the locks of one that is gone.
The file itself stays: removing it would let two processes hold locks on two files of one name.

A lock is here to save work, not to keep a checkpoint right: whoever ignores it still builds beside the place and
renames. So a file system without locks costs a warning and perhaps a second conversion, never a wrong one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
from pathlib import Path

_logger = logging.getLogger("megasetup")

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})

# A record lock does not keep two threads of one process apart, so the files that this process holds are noted as well.
_held: set[str] = set()
_held_guard = threading.Lock()


class FileLock:
    """A lock on one file.

    Args:
        path: the file; it and its folder are made when the lock is first tried.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock if it is free.

        Returns:
            Whether the lock is held now; True too, with a warning, where the file system has no locks.

        Raises:
            OSError: the file cannot be made or opened.
        """
        name = os.path.realpath(self.path)
        with _held_guard:
            if name in _held:
                return False
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                error.add_note(f"megasetup: nothing can be written to {self.path.parent}: choose a folder where it can")
                raise
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    if error.errno in (errno.EACCES, errno.EAGAIN):
                        return False
                    raise
                _logger.warning(
                    "%s: this file system has no locks (%s), so another process may do the same work at the same time",
                    self.path,
                    error.strerror,
                )
            _held.add(name)
            self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
        return True

    def holder(self) -> str:
        """The machine and process that last took the lock, for messages. Not for use while holding it."""
        try:
            host, pid = self.path.read_text().split()
        except (OSError, ValueError):
            return "another process"
        return f"process {pid} on {host}"

    def release(self) -> None:
        """Let the lock go; nothing happens when it is not held."""
        if self._descriptor is None:
            return
        with _held_guard:
            _held.discard(os.path.realpath(self.path))
            os.close(self._descriptor)
            self._descriptor = None
