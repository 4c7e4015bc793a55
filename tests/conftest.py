"""Skips tests whose device is missing, with the reason, and keeps other packages' import-time warnings out of ours.

Warnings are errors here. Megatron and Transformer Engine warn while they are imported, which no test can help, so they
are imported quietly before the first module that needs them is collected.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megasetup import kernels

_NEEDED = {"gpu": 1, "multigpu": 2}


@functools.cache
def _import_quietly(name: str) -> None:
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        importlib.import_module(name)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    if "megatron.core" in module_path.read_text():
        _import_quietly("megatron.core.optimizer")
        _import_quietly("megatron.core.models.gpt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needed = max((_NEEDED.get(mark.name, 0) for mark in item.iter_markers()), default=0)
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}"))


@pytest.fixture
def widen_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.dtype, int]]:
    """The device, the dtype and the number of sources of each call of `kernels.widened` that has any."""
    calls: list[tuple[str, torch.dtype, int]] = []
    widened = kernels.widened

    def counted(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if sources:
            calls.append((str(sources[0].device), sources[0].dtype, len(sources)))
        return widened(sources)

    monkeypatch.setattr(kernels, "widened", counted)
    return calls
