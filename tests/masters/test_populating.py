"""Populating: pages are there afterwards, nobody's values change, and what is free is looked at on the way."""

from __future__ import annotations

import mmap
import multiprocessing
import threading
import weakref
from pathlib import Path

import pytest
import torch

from megasetup.masters import populating
from megasetup.masters.arena import ArenaError, PinnedArena
from megasetup.masters.populating import Populating

MB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_are_there_and_values_stay() -> None:
    arena = PinnedArena(100 * MB + 12345, device="cpu", pin=False, touch=False)
    tensor = arena.empty(25 * MB, torch.float32)
    tensor[7 * MB] = 3.0
    before = resident_bytes()
    arena.populate().wait()
    assert 90 * MB < resident_bytes() - before < 120 * MB
    assert tensor[7 * MB] == 3.0
    assert tensor.count_nonzero() == 1


def test_nothing_to_populate() -> None:
    PinnedArena(0, device="cpu").populate().wait()


def test_it_can_be_stopped_and_lets_go_of_the_memory() -> None:
    memory = mmap.mmap(-1, 64 * MB)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    running = Populating(memory, address, 64 * MB, threads=2)
    running.stop()
    assert running._work.memory is None
    running.wait()


def test_dropped_it_ends_and_lets_go_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populating, "_BLOCKS_BETWEEN_CHECKS", 1)
    begun, go_on, missing = threading.Event(), threading.Event(), []

    def check(nbytes: int) -> None:
        missing.append(nbytes)
        begun.set()
        go_on.wait(30)

    memory = mmap.mmap(-1, 64 * MB)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    running = Populating(memory, address, 64 * MB, threads=1, check=check)
    (thread,) = running._threads
    begun.wait(30)
    held = weakref.ref(memory)
    del running, memory
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert len(missing) == 1
    assert held() is None


@pytest.mark.parametrize("threads", [1, 3])
def test_what_the_check_finds_is_raised_by_who_waits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populating, "_BLOCKS_BETWEEN_CHECKS", 1)
    seen = []

    def check(missing: int) -> None:
        seen.append(missing)
        if missing <= 64 * MB:
            raise ArenaError("too little")

    memory = mmap.mmap(-1, 128 * MB)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    before = resident_bytes()
    running = Populating(memory, address, 128 * MB, threads=threads, check=check)
    with pytest.raises(ArenaError, match="too little"):
        running.wait()
    assert max(seen) == 128 * MB
    assert resident_bytes() - before < 110 * MB


def test_a_forked_child_waits_for_nothing() -> None:
    arena = PinnedArena(64 * MB, device="cpu", pin=False, touch=False)
    running = arena.populate()
    child = multiprocessing.get_context("fork").Process(target=running.wait)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    running.wait()
