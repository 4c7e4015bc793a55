"""The signal handler off the main thread: Bridge's own, and the one without the check that Megatron-LM still ships."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megasetup.compat.bridge import import_bridge
from megasetup.compat.signal_handler import patch_handler_class, patch_signal_handler

pytest.importorskip("megatron.core")

_SIGNAL = signal.SIGUSR2


def _in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def unguarded() -> type[Any]:
    """A class of its own with the methods of the handler without the check, so that nothing stays patched."""
    original = import_bridge("megatron.training.dist_signal_handler").DistributedSignalHandler
    return type("DistributedSignalHandler", (), {k: v for k, v in vars(original).items() if k != "__dict__"})


def _enter_and_release(handler_class: type[Any]) -> tuple[Any, ...]:
    before = signal.getsignal(_SIGNAL)
    handler = handler_class(_SIGNAL)
    with handler as entered:
        during = signal.getsignal(_SIGNAL)
        received = handler._signal_received
    return entered is handler, during is before, received, signal.getsignal(_SIGNAL) is before, handler.release()


def test_an_unguarded_handler_fails_in_a_thread_and_is_mended_once(unguarded: type[Any]) -> None:
    assert isinstance(_in_thread(lambda: _enter_and_release(unguarded)), ValueError)
    assert patch_handler_class(unguarded) is True
    assert patch_handler_class(unguarded) is False
    assert _in_thread(lambda: _enter_and_release(unguarded)) == (True, True, False, True, False)


def test_a_mended_handler_still_works_in_the_main_thread(unguarded: type[Any]) -> None:
    patch_handler_class(unguarded)
    before = signal.getsignal(_SIGNAL)
    handler = unguarded(_SIGNAL)
    with handler:
        os.kill(os.getpid(), _SIGNAL)
        assert handler._signal_received is True
    assert signal.getsignal(_SIGNAL) is before
    assert handler.release() is False


def test_mending_leaves_handlers_as_they_were(unguarded: type[Any]) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, _SIGNAL)}
    patch_handler_class(unguarded)
    assert {one: signal.getsignal(one) for one in before} == before


def test_the_installed_bridge_works_in_a_thread_afterwards() -> None:
    module = import_bridge("megatron.bridge.training.utils.sig_utils")
    enter = module.DistributedSignalHandler.__enter__
    changed = patch_signal_handler()
    assert (module.DistributedSignalHandler.__enter__ is enter) is not changed
    assert patch_signal_handler() is False
    assert _in_thread(lambda: _enter_and_release(module.DistributedSignalHandler)) == (True, True, False, True, False)
