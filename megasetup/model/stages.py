"""A setup runs in named stages, so that its time is known by its parts and a failure by its place.

`Stages` times each stage, notes what the stage says of itself in a SetupReport, and turns an exception into one that
names the stage, the rank and what to try, here and on every other rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megasetup.model.failure import Failure, FailureWatch, PeerFailedError
from megasetup.model.report import SetupReport, Stage

_logger = logging.getLogger("megasetup")


class Stages:
    """Runs the stages of one setup, on all ranks alike.

    Args:
        name: what is being set up ("setup", "reference model").
        report: what the stages are noted in.
        grace: see FailureWatch.
    """

    def __init__(self, name: str, report: SetupReport | None = None, **watch: Any) -> None:
        self.name = name
        self.report = SetupReport() if report is None else report
        self._watch = FailureWatch(name, **watch)

    def __enter__(self) -> Self:
        self._watch.__enter__()
        self.report.rank, self.report.world_size = self._watch.rank, self._watch.world_size
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._watch.__exit__(kind, error, trace)

    def join(self) -> None:
        """Begin to watch the other ranks: for a process group that the setup's own stages have made."""
        self.__enter__()

    @contextmanager
    def stage(self, name: str, remedy: str) -> Iterator[Stage]:
        """Run one stage.

        Args:
            name: what the stage does.
            remedy: what to try when it fails, as the end of a sentence.

        Yields:
            The stage's entry in the report; set its `bytes`.

        Raises:
            PeerFailedError: another rank failed meanwhile.
            RuntimeError: the body asked for the process to end (SystemExit), or torch could not read a checkpoint.
            Exception: whatever else the body raises, with a note that names the stage, the rank and the remedy.
        """
        self._watch.raise_if_peer_failed()
        entry = Stage(name)
        start = time.perf_counter()
        try:
            yield entry
            if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
        except PeerFailedError:
            raise
        except SystemExit as error:  # (Megatron-Bridge leaves so when a checkpoint lacks something)
            ended = RuntimeError(f"the process was asked to end, with status {error.code}")
            self._spread(name, remedy, ended, error)
            raise ended from error
        except CheckpointException as error:  # (not an Exception: whoever catches those would miss it)
            failures = error.failures.items()
            causes = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures)
            failed = RuntimeError(f"the checkpoint could not be read: {causes}")
            self._spread(name, remedy, failed, error)
            raise failed from error
        except Exception as error:
            self._spread(name, remedy, error, error)
            raise
        self._watch.raise_if_peer_failed()
        entry.seconds = time.perf_counter() - start
        entry.slowest_rank, entry.slowest_seconds = self._watch.rank, entry.seconds
        self.report.stages.append(entry)

    def _spread(self, name: str, remedy: str, error: Exception, origin: BaseException) -> None:
        """Name the place of an error of this rank, here and on the others."""
        if self._watch.failure is not None:
            # What the body ran into is how the other rank's failure looks from here.
            raise PeerFailedError(self._watch.failure) from origin
        failure = Failure(self._watch.rank, name, f"{type(error).__name__}: {error}", remedy)
        error.add_note(str(failure))
        _logger.error("%s", failure)
        self._watch.report(failure)

    def _finish(self) -> None:
        self._watch.finish()
        if self._watch.world_size > 1:
            own = {stage.name: stage.seconds for stage in self.report.stages}
            every: list[dict[str, float]] = [{} for _ in range(self._watch.world_size)]
            dist.all_gather_object(every, own)
            self.report.set_slowest(dict(enumerate(every)))
        if self._watch.rank == 0:
            _logger.info("%s: %s", self.name, self.report)
