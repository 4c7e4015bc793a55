"""Yarn scaling must be complete, whichever of its names it goes by."""

from __future__ import annotations

from typing import Any

import pytest

from megasetup.config.rope import validate_rope_config

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e6,
    "original_max_position_embeddings": 128,
    "truncate": True,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", [key for key in YARN if key != "rope_type"])
def test_a_parameter_that_is_missing(section: str, key: str) -> None:
    rope = {name: value for name, value in YARN.items() if name != key}
    with pytest.raises(ValueError, match=rf"policy\.hf_config_overrides\.{section}\.{key} is missing") as raised:
        validate_rope_config({"hf_config_overrides": {section: rope}})
    assert isinstance(raised.value, AssertionError)


@pytest.mark.parametrize("key", [key for key in YARN if key != "rope_type"])
@pytest.mark.parametrize("value", [None, False, 0])
def test_a_parameter_that_is_given_counts_whatever_its_value(key: str, value: Any) -> None:
    validate_rope_config({"hf_config_overrides": {"rope_scaling": YARN | {key: value}}})


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": None},
        {},
        None,
    ],
)
def test_what_is_right(overrides: Any) -> None:
    validate_rope_config({"hf_config_overrides": overrides})


def test_the_older_name_of_the_type() -> None:
    with pytest.raises(ValueError, match="8 problems"):
        validate_rope_config({"hf_config_overrides": {"rope_scaling": {"type": "yarn"}}})
