"""When a setup fails on one rank, the others fail with it, and say why.

A rank that raises never joins the next collective, and its peers would sit in theirs until NCCL's timeout, tens of
minutes later, with a message about NCCL. Here the failing rank leaves a note in the process group's store. A thread on
every other rank reads it, keeps it for the main thread, and aborts the communicators, which is what gets a main thread
out of a NCCL collective. Gloo has no abort; its collectives end when the failing rank closes its side, which it does
once its peers have read the note. A main thread that even so does not come back, because it waits where nothing can
wake it, is given a minute; then its process ends with the message, as NCCL's own watchdog would end it after its
timeout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import distributed_c10d

_logger = logging.getLogger("megasetup")

_POLL = 0.25  # seconds between two looks into the store: at 1,000 ranks 4,000 small requests a second
_ACKNOWLEDGE = 5.0  # seconds that a failing rank waits for its peers to read the note
_GRACE = 60.0  # seconds from the note until a process whose main thread stays blocked is ended
_FINISH = 1800.0  # seconds that a rank which is done waits for the others


@dataclass(frozen=True)
class Failure:
    """What went wrong, where, and what to try.

    Attributes:
        rank: the rank on which it happened.
        stage: the stage that was running there.
        error: the exception, its type and its text.
        remedy: what to try.
    """

    rank: int
    stage: str
    error: str
    remedy: str

    def __str__(self) -> str:
        return f"setup failed on rank {self.rank} in stage '{self.stage}': {self.error}. To try: {self.remedy}"


class PeerFailedError(RuntimeError):
    """Setup failed on another rank, so it ends on this one too. The text says where, why and what to try.

    Attributes:
        failure: what happened there.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def _abort_groups() -> None:
    """Drop every process group, so that whoever waits in one of their collectives stops waiting."""
    # Failures are expected here: half of it may be gone already.
    with contextlib.suppress(Exception):
        distributed_c10d._abort_process_group()
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        with contextlib.suppress(Exception):
            parallel_state.destroy_model_parallel()


class FailureWatch:
    """Watches for a failure on any rank of the default process group while a setup runs, and spreads one of its own.

    Use it as a context manager around collective work. With one rank, or without a process group, it does nothing.

    Args:
        name: what is being set up; calls of the same name are counted, so that one does not see the notes of another.
        grace: seconds from a peer's failure until this process is ended, should its main thread stay blocked.
    """

    def __init__(self, name: str = "setup", *, grace: float = _GRACE) -> None:
        self._name = name
        self._grace = grace
        self._failure: Failure | None = None
        self._store: Any = None
        self._served: Any = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.rank, self.world_size = 0, 1

    def __enter__(self) -> Self:
        if self._store is not None or not dist.is_initialized():
            return self
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size == 1:
            return self
        # A client of its own: the group's may be held by a call that waits, and a store serves one call at a time.
        # Kept: on the rank that serves it, the store must outlive the process group that is aborted.
        self._served = distributed_c10d._get_default_store()
        root = self._served.clone()
        turn = root.add(f"megasetup/{self._name}/turn/{self.rank}", 1)
        self._store = distributed_c10d.PrefixStore(f"megasetup/{self._name}/{turn}", root)
        self._thread = threading.Thread(
            target=self._watch, args=(self._store.clone(),), name="megasetup-failure-watch", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is None:
            # The store's port is needed again should the process group be made anew.
            self._store = self._served = None

    @property
    def failure(self) -> Failure | None:
        """The failure of another rank, once this rank knows of it."""
        return self._failure

    def raise_if_peer_failed(self) -> None:
        """Raise PeerFailedError if another rank has failed."""
        if self._failure is not None:
            raise PeerFailedError(self._failure)

    def report(self, failure: Failure) -> None:
        """Tell the other ranks of a failure on this one, and leave the process groups."""
        self._over.set()
        if self._store is None:
            return
        store = self._store
        try:
            store.compare_set("failure", "", json.dumps(asdict(failure)))
            self._await_acknowledgements(store)
        except dist.DistError as error:
            _logger.warning("the other ranks could not be told that setup failed: %s", error)
        _abort_groups()

    def finish(self) -> None:
        """Wait until every rank has come here.

        Raises:
            PeerFailedError: another rank failed.
            TimeoutError: some rank did not come within half an hour.
        """
        if self._store is None:
            return
        try:
            self._wait_for_all(self._store)
        except dist.DistError:
            self.raise_if_peer_failed()
            raise
        self._over.set()

    def _wait_for_all(self, store: Any) -> None:
        if store.add("finished", 1) == self.world_size:
            store.set("all finished", "1")
        deadline, pause = time.monotonic() + _FINISH, 0.005
        while not store.check(["all finished"]):
            self.raise_if_peer_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{store.add('finished', 0)} of {self.world_size} ranks finished {self._name}, and the others did "
                    f"not follow within {_FINISH:.0f} s: look for the rank whose log ends early"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL)

    def _await_acknowledgements(self, store: Any) -> None:
        """Wait a moment for all to have read the note: who leaves first may take the store along."""
        deadline = time.monotonic() + _ACKNOWLEDGE
        while store.add("acknowledged", 0) < self.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL / 5)

    def _watch(self, store: Any) -> None:
        while not self._over.wait(_POLL):
            try:
                if not store.check(["failure"]):
                    continue
                self._failure = Failure(**json.loads(store.get("failure")))
                store.add("acknowledged", 1)
                self._await_acknowledgements(store)
            except dist.DistError as error:
                gone = f"the process group's store is gone ({error})"
                self._failure = Failure(0, "unknown", gone, "read the log of rank 0, or of torchrun, which held it")
            break
        if self._failure is None:
            return
        _logger.error("%s", self._failure)
        _abort_groups()
        if not self._over.wait(self._grace):
            _logger.critical(
                "rank %d is still blocked %.0f s after that, where nothing can wake it: ending this process",
                self.rank,
                self._grace,
            )
            logging.shutdown()
            os._exit(1)
