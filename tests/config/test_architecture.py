"""layernorm_epsilon, and the towers' switches: an error on a model without the tower, also when they are off."""

from __future__ import annotations

import pytest
from bridge_providers import changes, policy, provider

from megasetup.config.architecture import TOWER_FIELDS, apply_architecture_config


def test_layernorm_epsilon_only_if_given() -> None:
    model_cfg = provider()
    apply_architecture_config(model_cfg, policy())
    assert changes(model_cfg) == {}
    apply_architecture_config(model_cfg, policy(layernorm_epsilon=1e-3))
    assert changes(model_cfg) == {"layernorm_epsilon": 1e-3}


@pytest.mark.parametrize("key", TOWER_FIELDS)
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_sets_its_field(key: str, value: bool) -> None:
    model_cfg = provider("omni")
    setattr(model_cfg, key, not value)
    apply_architecture_config(model_cfg, policy(**{key: value}))
    assert getattr(model_cfg, key) is value


@pytest.mark.parametrize("key", TOWER_FIELDS)
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_of_a_tower_that_the_model_lacks_is_a_value_error(key: str, value: bool) -> None:
    message = rf"policy\.megatron_cfg\.{key} is {value}: GPTModelProvider has no field {key}"
    with pytest.raises(ValueError, match=message):
        apply_architecture_config(provider(), policy(**{key: value}))


def test_a_vision_model_has_the_vision_switches_alone() -> None:
    model_cfg = provider("vision")
    apply_architecture_config(model_cfg, policy(freeze_vision_model=True, freeze_vision_projection=True))
    assert changes(model_cfg, "vision") == {"freeze_vision_model": True, "freeze_vision_projection": True}
    with pytest.raises(ValueError, match="2 problems"):
        apply_architecture_config(model_cfg, policy(freeze_sound_encoder=True, freeze_sound_projection=False))
