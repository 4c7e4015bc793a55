"""Lines in the log where there is no terminal, a bar where there is one, and nothing on quiet ranks."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from pathlib import Path

import pytest

from megasetup.checkpoint import progress
from megasetup.checkpoint.progress import bytes_below, tracked, watch


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.02)
    caplog.set_level(logging.INFO, logger="megasetup")
    return caplog


def _no_thread_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "megasetup-progress"]


def test_lines_in_the_log(lines: pytest.LogCaptureFixture) -> None:
    done = [0]
    with watch("Writing x", 200, lambda: done[0]):
        done[0] = 50
        time.sleep(0.1)
        done[0] = 500
        time.sleep(0.1)
    said = [record.getMessage() for record in lines.records]
    assert "Writing x: 25% after 0 s" in said
    assert "Writing x: 100% after 0 s" in said
    assert said[-1].startswith("Writing x: done in 0.")
    assert _no_thread_left()


def test_items_pass_through_in_order(lines: pytest.LogCaptureFixture) -> None:
    seen = []
    for item in tracked(["a", "b", "c", "d"], "Loading"):
        seen.append(item)
        time.sleep(0.05)
    assert seen == ["a", "b", "c", "d"]
    assert any("Loading: 50%" in record.getMessage() for record in lines.records)


def test_quiet_ranks(lines: pytest.LogCaptureFixture) -> None:
    assert list(tracked([1, 2], "Loading", shown=False)) == [1, 2]
    assert not lines.records
    assert _no_thread_left()


def test_an_error_passes_and_is_not_called_done(lines: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="x"), watch("Writing", 1, lambda: 0):
        raise KeyError("x")
    assert not [record for record in lines.records if "done" in record.getMessage()]
    assert _no_thread_left()


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with watch("Writing x", 4, lambda: 3):
        time.sleep(0.6)
    assert "Writing x" in terminal.getvalue()
    assert "75%" in terminal.getvalue()
    assert [record.getMessage()[:14] for record in lines.records] == ["Writing x: don"]


def test_bytes_below(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 7)
    (tmp_path / "c").write_bytes(b"x" * 5)
    assert bytes_below(tmp_path) == 12
    assert bytes_below(tmp_path / "no") == 0
