"""Lets Bridge's signal handler be entered in a thread other than the main one.

A trainer's actor often sets its model up in a worker thread. Python installs signal handlers in the main thread alone
and raises ValueError elsewhere; Bridge enters its handler while it sets up, when `train.exit_signal_handler` is on. The
handler is then entered without being installed: the signal goes where it went before, and nothing is undone on release.

Needed with megatron-bridge before 0.6.2, which looks at the thread itself. Whether the installed version needs it is
tried, not looked up, so this may go when no supported version does.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from megasetup.compat.bridge import import_bridge

logger = logging.getLogger("megasetup")


def _works_in_threads(handler_class: Any) -> bool:
    failures: list[ValueError] = []

    def attempt() -> None:
        handler = handler_class(signal.SIGUSR1)
        try:
            handler.__enter__()
            handler.release()
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=attempt, name="megasetup-signal-probe")
    thread.start()
    thread.join()
    return not failures


def patch_handler_class(handler_class: Any) -> bool:
    """Make one handler class safe off the main thread, if it is not.

    Args:
        handler_class: a DistributedSignalHandler, as Megatron-Bridge and Megatron-LM have it.

    Returns:
        Whether the class was changed.
    """
    if _works_in_threads(handler_class):
        return False
    enter, release = handler_class.__enter__, handler_class.release

    def __enter__(self: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return enter(self)
        self._signal_received = False
        self.original_handler = signal.getsignal(self.sig)
        self.released = True  # there is nothing to put back
        return self

    def released(self: Any) -> bool:
        return False if self.released else bool(release(self))

    handler_class.__enter__, handler_class.release = __enter__, released
    return True


def patch_signal_handler() -> bool:
    """Make Megatron-Bridge's signal handler safe off the main thread where the installed version needs it.

    Returns:
        Whether this call changed anything: not on a version without the fault, and not when called again.

    Raises:
        ImportError: megatron-bridge is not installed.
    """
    handler_class = import_bridge("megatron.bridge.training.utils.sig_utils").DistributedSignalHandler
    changed = patch_handler_class(handler_class)
    if changed:
        logger.debug("the installed megatron-bridge's signal handler now works off the main thread")
    return changed
