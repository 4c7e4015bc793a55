"""Nested configs that are built already, in the one class of transformers that does not take them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from megasetup.compat.hf_config import patch_hf_configs

omni = pytest.importorskip("transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe")
Talker, Text, Predictor = (getattr(omni, f"Qwen3OmniMoeTalker{name}Config") for name in ("", "Text", "CodePredictor"))


@pytest.fixture
def unpatched() -> Iterator[None]:
    """The class as transformers has it, before and after the test."""
    original = Talker.__post_init__
    yield
    Talker.__post_init__ = original


@pytest.mark.usefixtures("unpatched")
def test_built_and_unbuilt_nested_configs_give_the_same(caplog: pytest.LogCaptureFixture) -> None:
    text, predictor = {"hidden_size": 64, "num_hidden_layers": 3}, {"vocab_size": 77}
    try:
        Talker(text_config=Text(**text))
        needed = False
    except TypeError:
        needed = True
    expected = Talker(text_config=text, code_predictor_config=predictor, num_code_groups=5, dtype="bfloat16").to_dict()

    with caplog.at_level(logging.DEBUG, logger="megasetup"):
        assert patch_hf_configs() == (["Qwen3OmniMoeTalkerConfig"] if needed else [])
        assert patch_hf_configs() == []
    assert len(caplog.records) == int(needed)

    built_text, built_predictor = Text(**text), Predictor(**predictor)
    built = Talker(text_config=built_text, code_predictor_config=built_predictor, num_code_groups=5, dtype="bfloat16")
    assert built.text_config is built_text
    assert built.code_predictor_config is built_predictor
    assert built.to_dict() == expected
    mixed = Talker(text_config=text, code_predictor_config=built_predictor, num_code_groups=5, dtype="bfloat16")
    assert mixed.to_dict() == expected
    assert isinstance(Talker().text_config, Text)
    assert Talker().to_dict() == Talker(text_config={}, code_predictor_config={}).to_dict()


@pytest.mark.usefixtures("unpatched")
def test_a_whole_omni_config_survives_being_built_inside_out() -> None:
    patch_hf_configs()
    talker = Talker(text_config=Text(hidden_size=48))
    whole = omni.Qwen3OmniMoeConfig(talker_config=talker)
    assert whole.talker_config is talker
    assert omni.Qwen3OmniMoeConfig(**whole.to_dict()).talker_config.text_config.hidden_size == 48


@pytest.mark.usefixtures("unpatched")
def test_a_class_that_takes_them_is_left_alone() -> None:
    patch_hf_configs()
    guarded = Talker.__post_init__
    assert patch_hf_configs() == []
    assert Talker.__post_init__ is guarded
