"""One conversion of a model, however many processes ask for it at once: a lock says who converts, the others wait.

Whoever gets the lock looks again whether the checkpoint is there: another may have made it meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import torch.distributed as dist

from megasetup.checkpoint import nodes
from megasetup.checkpoint.converting import Conversion, convert
from megasetup.checkpoint.locks import FileLock
from megasetup.checkpoint.marks import stranger, what_is_missing
from megasetup.checkpoint.placing import building, identity, put_in_place
from megasetup.checkpoint.progress import LOG_EVERY_SECONDS
from megasetup.checkpoint.worlds import lone_world

_logger = logging.getLogger("megasetup")

_RETRY_SECONDS = 0.2


def import_alone(conversion: Conversion, target: Path, *, force: bool) -> bool:
    """Convert in this process, or wait for the process that does. Returns whether this one converted."""
    found = identity(target)
    lock = _lock(target)
    with contextlib.closing(_Waiting(lock)) as waiting:
        while not lock.try_acquire():
            waiting.again()
    try:
        if _need_not(target, force, found):
            return False
        with building(target) as folder, lone_world():
            convert(conversion, folder, target)
            put_in_place(conversion, folder, target)
        return True
    finally:
        lock.release()


def import_together(conversion: Conversion, target: Path, *, force: bool) -> bool:
    """The same for all ranks of the default process group, on a folder that they share."""
    first = dist.get_rank() == 0
    found = identity(target)
    lock = _lock(target)
    with contextlib.closing(_Waiting(lock)) as waiting:
        # Short rounds: a rank that waited for long in one broadcast would look hung to the process group.
        while not nodes.from_first(lambda: lock.try_acquire()):
            waiting.again()
    try:
        if nodes.from_first(lambda: _need_not(target, force, found)):
            return False
        with contextlib.ExitStack() as stack:
            folder = Path(nodes.from_first(lambda: str(stack.enter_context(building(target)))))
            convert(conversion, folder, target)
            nodes.from_first(lambda: put_in_place(conversion, folder, target))
        nodes.check_all_see(target)
        return True
    finally:
        if first:
            lock.release()


class _Waiting:
    """Says every few seconds that another process is being waited for."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = lock
        self._started = time.monotonic()
        self._next = 0.0

    def again(self) -> None:
        waited = time.monotonic() - self._started
        if waited >= self._next and not (dist.is_initialized() and dist.get_rank()):
            _logger.info(
                "%s converts this model (lock %s); waiting since %.0f s", self._lock.holder(), self._lock.path, waited
            )
            self._next = waited + LOG_EVERY_SECONDS
        time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        if self._next:
            _logger.info("waited %.1f s for another process", time.monotonic() - self._started)


def _lock(target: Path) -> FileLock:
    return FileLock(target.parent / f".{target.name}.lock")


def _need_not(target: Path, force: bool, found: str | None) -> bool:
    """Whether the checkpoint is there: with `force`, whether another process has made it since this one asked."""
    missing = what_is_missing(target)
    if missing is None and (not force or identity(target) != found):
        _logger.info("the converted checkpoint %s is there", target)
        return True
    if missing is not None and target.exists():
        if (found_there := stranger(target)) is not None:
            raise FileExistsError(
                f"{target} is not a converted checkpoint: {found_there}. It would be lost: "
                "choose another folder, or remove it"
            )
        _logger.warning("%s is not a whole checkpoint and will be replaced: %s", target, missing)
    return False
