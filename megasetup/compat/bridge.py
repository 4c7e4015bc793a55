"""One quiet way to import Megatron-Bridge, with or without Transformer Engine.

Bridge reports every optional library that it does not find as a log record with a traceback, printed by a handler of
its own: a hundred lines on a machine without a GPU, which say nothing that `megasetup doctor` does not say better. They
are held back while it is imported, and other packages' import-time warnings with them. A library that Bridge imports
also gives the root logger a handler and a level; how a program logs is its own affair, so both are put back.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from types import ModuleType

from megasetup.compat.transformer_engine import ensure_importable

_NOISY = "megatron.bridge.utils.import_utils"


def _at_least_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def import_bridge(name: str = "megatron.bridge") -> ModuleType:
    """Import Megatron-Bridge (15 seconds the first time) or one of its modules.

    Args:
        name: the module, `megatron.bridge` or below.

    Raises:
        ImportError: megatron-bridge, or something it cannot do without, is not installed.
    """
    noisy, root = logging.getLogger(_NOISY), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    noisy.addFilter(_at_least_warning)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ensure_importable()
            return importlib.import_module(name)
    finally:
        noisy.removeFilter(_at_least_warning)
        root.handlers[:] = handlers
        root.setLevel(level)
