"""Processes that wait for their turn: real ones, which note in files what they do when."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from megasetup.cli.bench.turns import started
from megasetup.cli.errors import CommandError

FOLDER = "FOLDER_OF_THE_TURNS"


def prepare() -> None:
    (Path(os.environ[FOLDER]) / f"ready-{os.getpid()}").touch()


def fail_to_prepare() -> None:
    raise ImportError("no such module")


def work(argument: int) -> dict[str, Any]:
    return {"process": os.getpid(), "twice": 2 * argument, "ready": len(list(Path(os.environ[FOLDER]).iterdir()))}


def fail(argument: int) -> dict[str, Any]:
    raise ValueError(f"argument {argument}")


def be_killed(argument: int) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))


def test_all_are_ready_before_the_first_works() -> None:
    with started(prepare, [("one", work, 1), ("two", work, 2)]) as turns:
        answers = [turn.take() for turn in turns]
    assert [answer["twice"] for answer in answers] == [2, 4]
    assert [answer["ready"] for answer in answers] == [2, 2]
    assert len({os.getpid(), *(answer["process"] for answer in answers)}) == 3


def test_what_fails_says_why_and_the_others_are_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(CommandError, match=r"two failed:(.|\n)*ValueError: argument 2"),
        started(prepare, [("one", work, 1), ("two", fail, 2), ("three", work, 3)]) as turns,
    ):
        [turn.take() for turn in turns]
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name.removeprefix("ready-")), 0)


def test_a_process_that_cannot_get_ready() -> None:
    with pytest.raises(CommandError, match="no such module"), started(fail_to_prepare, [("one", work, 1)]):
        pass


def test_a_process_that_is_killed() -> None:
    with pytest.raises(CommandError, match="exit status -9"), started(prepare, [("one", be_killed, 1)]) as turns:
        turns[0].take()


def test_a_process_that_is_killed_while_it_waits() -> None:
    with started(prepare, [("one", work, 1)]) as turns:
        os.kill(turns[0]._process.pid, signal.SIGKILL)
        turns[0]._process.join()
        with pytest.raises(CommandError, match="one: its process ended with exit status -9"):
            turns[0].take()


def test_a_process_that_is_killed_before_it_reads() -> None:
    with started(prepare, [("one", work, 1)]) as turns:
        pid = turns[0]._process.pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(CommandError, match="one: its process ended with exit status -9"):
            turns[0].take()
