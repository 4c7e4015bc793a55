"""Multi-token prediction: each setting only if present."""

from __future__ import annotations

from typing import Any

import pytest
from bridge_providers import changes, policy, provider

from megasetup.config.mtp import apply_mtp_config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mtp_num_layers", 2),
        ("mtp_num_layers", 0),
        ("mtp_loss_scaling_factor", 0.3),
        ("mtp_use_repeated_layer", True),
        ("mtp_detach_heads", True),
    ],
)
def test_a_key_sets_its_field_and_no_other(key: str, value: Any) -> None:
    model_cfg = provider()
    apply_mtp_config(model_cfg, policy(**{key: value}))
    assert changes(model_cfg) == {key: value}


def test_absent_keys_leave_the_provider_alone() -> None:
    model_cfg = provider()
    model_cfg.mtp_num_layers = 1
    apply_mtp_config(model_cfg, policy())
    assert changes(model_cfg) == {"mtp_num_layers": 1}


def test_none_switches_it_off() -> None:
    model_cfg = provider()
    model_cfg.mtp_num_layers = 1
    apply_mtp_config(model_cfg, policy(mtp_num_layers=None))
    assert model_cfg.mtp_num_layers is None
