"""Fusions that a provider comes with, where what they need is installed and where it is not."""

from __future__ import annotations

import importlib
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from megasetup.compat.fusions import refused_fusions, without_missing_fusions
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
        without_missing_fusions(provider)
    assert provider.gradient_accumulation_fusion is False
    assert EXTENSION in caplog.text


@pytest.mark.usefixtures("installed")
def test_one_that_can_be_built_stays():
    provider = _provider(True)
    without_missing_fusions(provider)
    assert provider.gradient_accumulation_fusion is True


def test_a_provider_without_the_field_stays_as_it_is():
    provider = SimpleNamespace()
    without_missing_fusions(provider)
    assert vars(provider) == {}


@pytest.mark.parametrize(("given", "expected"), [({}, False), ({"gradient_accumulation_fusion": True}, True)])
def test_the_users_own_setting_is_honoured(given, expected):
    provider = _provider(True)
    apply_performance_config(provider, {"megatron_cfg": given})
    assert provider.gradient_accumulation_fusion is expected


TRANSFORMER_ENGINE = {
    "moe_permute_fusion": ("megatron.core.transformer.moe.moe_utils", "fused_permute"),
    "apply_rope_fusion": ("megatron.core.models.common.embeddings.rope_utils", "fused_apply_rotary_pos_emb"),
}


@pytest.mark.parametrize("field", TRANSFORMER_ENGINE)
def test_what_transformer_engine_does_follows_megatrons_own_finding(field, monkeypatch, caplog):
    module, name = TRANSFORMER_ENGINE[field]
    there, missing = SimpleNamespace(**{field: True}), SimpleNamespace(**{field: True})
    monkeypatch.setattr(importlib.import_module(module), name, print)
    without_missing_fusions(there)
    assert field not in refused_fusions()
    monkeypatch.setattr(importlib.import_module(module), name, None)
    with caplog.at_level(logging.INFO, "megasetup"):
        without_missing_fusions(missing)
    assert field in refused_fusions()
    assert (getattr(there, field), getattr(missing, field)) == (True, False)
    assert f"{field} is off: Megatron needs Transformer Engine" in caplog.text
    own = SimpleNamespace(**{field: True})
    without_missing_fusions(own, {field: True})
    assert getattr(own, field) is True


def test_local_attention_does_without_apexs_softmax_unless_the_user_asks_for_it(monkeypatch):
    provider = SimpleNamespace(masked_softmax_fusion=True, gated_linear_unit=True, transformer_impl="local")
    apply_performance_config(provider, {"megatron_cfg": {"model_overrides": {"masked_softmax_fusion": True}}})
    assert provider.masked_softmax_fusion is True
    apply_performance_config(provider, {"megatron_cfg": {}})
    assert provider.masked_softmax_fusion is False
    assert "masked_softmax_fusion" not in refused_fusions()
    for name in ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    provider.masked_softmax_fusion = True
    apply_performance_config(provider, {"megatron_cfg": {}})
    assert provider.masked_softmax_fusion is True


def test_other_attention_than_local_keeps_the_setting():
    provider = SimpleNamespace(
        masked_softmax_fusion=True, gated_linear_unit=True, transformer_impl="transformer_engine"
    )
    apply_performance_config(provider, {"megatron_cfg": {}})
    assert provider.masked_softmax_fusion is True
