"""The default of gradient_accumulation_fusion, with and without the extension that it needs."""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from megasetup.compat.gradient_fusion import without_missing_gradient_fusion
from megasetup.config.performance import apply_performance_config

EXTENSION = "fused_weight_gradient_mlp_cuda"


@pytest.fixture
def installed(monkeypatch):
    """The extension of APEX, which has to be compiled for a GPU, as far as it is looked for."""
    module = ModuleType(EXTENSION)
    module.__spec__ = ModuleSpec(EXTENSION, None)
    monkeypatch.setitem(sys.modules, EXTENSION, module)


def _provider(fusion: bool) -> SimpleNamespace:
    return SimpleNamespace(gradient_accumulation_fusion=fusion, gated_linear_unit=True)


def test_a_default_that_cannot_be_built_is_switched_off_and_said(caplog):
    provider = _provider(True)
    with caplog.at_level(logging.INFO, "megasetup"):
        without_missing_gradient_fusion(provider)
    assert provider.gradient_accumulation_fusion is False
    assert EXTENSION in caplog.text


@pytest.mark.usefixtures("installed")
def test_one_that_can_be_built_stays():
    provider = _provider(True)
    without_missing_gradient_fusion(provider)
    assert provider.gradient_accumulation_fusion is True


def test_a_provider_without_the_field_stays_as_it_is():
    provider = SimpleNamespace()
    without_missing_gradient_fusion(provider)
    assert vars(provider) == {}


@pytest.mark.parametrize(("given", "expected"), [({}, False), ({"gradient_accumulation_fusion": True}, True)])
def test_the_users_own_setting_is_honoured(given, expected):
    provider = _provider(True)
    apply_performance_config(provider, {"megatron_cfg": given})
    assert provider.gradient_accumulation_fusion is expected
