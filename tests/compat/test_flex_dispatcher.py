"""Bridge validates a container for the flex dispatcher without asking the GPU, and asks it again afterwards."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("megatron.core")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron-bridge is not installed", allow_module_level=True)

from megasetup.compat.bridge import import_bridge
from megasetup.compat.flex_dispatcher import without_asking_the_gpu


def test_the_gpu_is_asked_outside_and_not_inside(monkeypatch):
    config = import_bridge("megatron.bridge.training.config")
    asked = []
    monkeypatch.setattr(config, "validate_flex_dispatcher_backend", asked.append)
    with without_asking_the_gpu():
        config.validate_flex_dispatcher_backend("model")
    assert asked == []
    config.validate_flex_dispatcher_backend("model")
    assert asked == ["model"]


def test_a_bridge_that_does_not_ask_is_left_alone(monkeypatch):
    config = import_bridge("megatron.bridge.training.config")
    monkeypatch.delattr(config, "validate_flex_dispatcher_backend")
    with without_asking_the_gpu():
        assert not hasattr(config, "validate_flex_dispatcher_backend")
