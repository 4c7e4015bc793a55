"""How torch_memory_saver is driven: a region while memory is taken, then pauses and resumes by name, none too many.

The package asks for a CUDA driver as soon as it is used, so a stand-in records the calls. As the real one (0.0.10) it
takes its mode until it is first used, has an AttributeError for it from then on, and ends the process over a pause or a
resume too many.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from megasetup.compat import memory_saver


class Saver:
    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.calls: list[str] = []
        self.paused = False

    def __setattr__(self, name: str, value: object) -> None:
        if name == "hook_mode":
            assert self.settings is not None
            self.settings[name] = str(value)
        else:
            super().__setattr__(name, value)

    def _use(self, call: str) -> None:
        if "settings" in vars(self):
            self.calls.append(f"first used in mode {self.settings.get('hook_mode', 'preload')}")
            del self.settings
        self.calls.append(call)

    @contextlib.contextmanager
    def region(self, tag: str) -> Iterator[None]:
        self._use(f"region {tag}")
        yield
        self.calls.append("end of region")

    def pause(self, tag: str) -> None:
        self._use(f"pause {tag}")
        if self.paused:
            raise SystemExit("Cannot pause allocation that is not active.")
        self.paused = True

    def resume(self, tag: str) -> None:
        self._use(f"resume {tag}")
        if not self.paused:
            raise SystemExit("Cannot resume allocation that is not paused.")
        self.paused = False


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_saver, "_paused", {})
    monkeypatch.delenv("LD_PRELOAD", raising=False)


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Saver:
    made = Saver()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", SimpleNamespace(torch_memory_saver=made))
    return made


@pytest.mark.parametrize(
    ("preload", "mode"), [("", "torch"), ("/x/torch_memory_saver_hook_mode_preload.so", "preload")]
)
def test_paused_and_resumed_by_name(monkeypatch: pytest.MonkeyPatch, saver: Saver, preload: str, mode: str) -> None:
    monkeypatch.setenv("LD_PRELOAD", preload)
    assert not memory_saver.pause("weights")
    assert not memory_saver.resume("weights")
    with memory_saver.pausable_memory("weights", "the model"):
        saver.calls.append("built")
    switches = (memory_saver.resume, memory_saver.pause, memory_saver.pause, memory_saver.resume, memory_saver.resume)
    assert all(switch("weights") for switch in switches)
    assert saver.calls == [
        f"first used in mode {mode}",
        "region weights",
        "built",
        "end of region",
        "pause weights",
        "resume weights",
    ]


def test_another_user_came_first(saver: Saver) -> None:
    saver._use("other")
    with memory_saver.pausable_memory("weights", "the model"):
        pass
    assert memory_saver.pause("weights")


def test_no_memory_is_added_to_what_is_paused(saver: Saver) -> None:
    with memory_saver.pausable_memory("weights", "the model"):
        pass
    memory_saver.pause("weights")
    with (
        pytest.raises(RuntimeError, match="the memory of the model is paused: resume it"),
        memory_saver.pausable_memory("weights", "the model"),
    ):
        pass


def test_without_it_the_memory_stays_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with caplog.at_level(logging.WARNING, "megasetup"), memory_saver.pausable_memory("weights", "the model"):
        pass
    assert not memory_saver.pause("weights")
    assert not memory_saver.resume("weights")
    assert ["the model keeps its GPU memory: pip install" in record.getMessage() for record in caplog.records] == [True]
