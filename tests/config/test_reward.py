"""Reward models are refused, and nothing else of that section."""

from __future__ import annotations

from typing import Any

import pytest

from megasetup.config.reward import validate_reward_model_config


def test_one_that_is_asked_for() -> None:
    with pytest.raises(
        NotImplementedError, match=r"policy\.reward_model_cfg\.enabled is True: must be false"
    ) as raised:
        validate_reward_model_config({"reward_model_cfg": {"enabled": True}})
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("settings", [None, {}, {"enabled": False, "reward_model_type": "bradley_terry"}])
def test_none(settings: Any) -> None:
    validate_reward_model_config({"reward_model_cfg": settings})
    validate_reward_model_config({})
