"""The lock between processes and threads, and its end when the holder is killed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launch import bare_environment

from megasetup.checkpoint.locks import FileLock

_HOLD = """
import os, sys, time
from pathlib import Path
from megasetup.checkpoint.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
print(lock.try_acquire(), flush=True)
if os.fork() == 0:  # as a checkpoint writer's helper, which outlives it
    os.close(1)
    time.sleep(20)
    os._exit(0)
time.sleep(60)
"""


def test_one_at_a_time_in_one_process(tmp_path: Path) -> None:
    one, other = FileLock(tmp_path / "made" / "a.lock"), FileLock(tmp_path / "made" / "a.lock")
    assert one.try_acquire()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(other.try_acquire()))
    thread.start()
    thread.join()
    assert found == [False]
    assert FileLock(tmp_path / "made" / "b.lock").try_acquire()
    one.release()
    one.release()
    assert other.try_acquire()
    other.release()


def test_another_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, text=True, env=bare_environment()
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        lock = FileLock(path)
        assert not lock.try_acquire()
        assert lock.holder() == f"process {process.pid} on {socket.gethostname()}"
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while not lock.try_acquire():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert path.read_text().split() == [socket.gethostname(), str(os.getpid())]
        lock.release()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_lock_file_that_says_nothing(tmp_path: Path) -> None:
    assert FileLock(tmp_path / "none").holder() == "another process"


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    lock = FileLock(tmp_path / "a.lock")
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        assert lock.try_acquire()
    lock.release()
    assert "this file system has no locks (No locks available)" in caplog.text


def test_other_errors_are_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        FileLock(tmp_path / "file" / "a.lock").try_acquire()
