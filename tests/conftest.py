"""Skips tests whose device is missing, with the reason."""

from __future__ import annotations

import pytest
import torch

_NEEDED = {"gpu": 1, "multigpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needed = max((_NEEDED.get(mark.name, 0) for mark in item.iter_markers()), default=0)
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}"))
