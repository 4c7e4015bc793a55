"""Processes that import together and then measure one after another, each alone.

Importing Megatron and Transformer Engine takes longer than most measurements, and a process that has imported them
cannot be forked: they ask the CUDA driver, which does not survive a fork. So all processes of a benchmark begin at
once, import beside each other, and wait for their turn, idle and without memory on the GPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from megasetup.cli.errors import CommandError

_CONTEXT = multiprocessing.get_context("spawn")


class Turn:
    """One process and what it will measure.

    Args:
        label: what it is called in errors.
        prepare: called in the process at once.
        work: called in the process when its turn comes, with the argument; returns plain data. All three are pickled.
        argument: what the work gets.
    """

    def __init__(self, label: str, prepare: Callable[[], None], work: Callable[[Any], dict[str, Any]], argument: Any):
        self._label = label
        self._ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_main, args=(prepare, work, argument, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait for its imports.

        Raises:
            CommandError: they failed, with the traceback, or the process ended.
        """
        self._answer()

    def take(self) -> dict[str, Any]:
        """Measure; the process has ended when this returns.

        Raises:
            CommandError: the work failed, with its traceback, or the process ended.
        """
        with contextlib.suppress(OSError):  # one that has ended while it waited is told of by its missing answer
            self._ours.send(None)
        answer = self._answer()
        self._process.join()
        return answer

    def end(self) -> None:
        """End the process, wherever it is."""
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()
        self._ours.close()

    def _answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._ours.recv()
        except (EOFError, ConnectionError):  # the second if it ended without reading what it was sent
            self._process.join()
            raise CommandError(
                f"{self._label}: its process ended with exit status {self._process.exitcode} and no answer; a negative "
                "status is a signal, and -9 is mostly the kernel's, for memory: use --scale"
            ) from None
        if "error" in answer:
            raise CommandError(f"{self._label} failed:\n{answer['error']}")
        return answer


@contextmanager
def started(
    prepare: Callable[[], None], works: Sequence[tuple[str, Callable[[Any], dict[str, Any]], Any]]
) -> Iterator[list[Turn]]:
    """One process for each (label, work, argument), all ready; those that are left at the end of the block are ended.

    Raises:
        CommandError: one could not get ready.
    """
    turns: list[Turn] = []
    try:
        turns += [Turn(label, prepare, work, argument) for label, work, argument in works]
        for turn in turns:
            turn.wait_until_ready()
        yield turns
    finally:
        for turn in turns:
            turn.end()


def _main(
    prepare: Callable[[], None], work: Callable[[Any], dict[str, Any]], argument: Any, answers: Connection
) -> None:
    try:
        prepare()
        answers.send({})
        answers.recv()
        answers.send(work(argument))
    except EOFError:
        return  # whoever was to be answered is gone
    except Exception:
        answers.send({"error": traceback.format_exc()})
