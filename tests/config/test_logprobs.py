"""Chunked log-probabilities need deferred FP32 logits."""

from __future__ import annotations

from typing import Any

import pytest
from bridge_providers import policy

from megasetup.config.logprobs import (
    fused_linear_logprobs,
    fused_linear_logprobs_settings,
    validate_chunking_config,
)


@pytest.mark.parametrize("size", [0, None])
def test_no_chunks_need_nothing(size: Any) -> None:
    validate_chunking_config(policy(defer_fp32_logits=False) | {"logprob_chunk_size": size})
    validate_chunking_config(policy())


def test_chunks_with_deferred_logits() -> None:
    validate_chunking_config(policy(defer_fp32_logits=True) | {"logprob_chunk_size": 1024})


@pytest.mark.parametrize(("settings", "found"), [({}, "missing"), ({"defer_fp32_logits": False}, "False")])
def test_chunks_without_deferred_logits(settings: dict[str, Any], found: str) -> None:
    message = (
        rf"policy\.megatron_cfg\.defer_fp32_logits is {found}: must be true, because policy\.logprob_chunk_size is 1024"
    )
    with pytest.raises(AssertionError, match=message) as raised:
        validate_chunking_config(policy(**settings) | {"logprob_chunk_size": 1024})
    assert isinstance(raised.value, ValueError)


def test_fused_linear_logprobs() -> None:
    assert fused_linear_logprobs({"use_fused_linear_logprobs": True}) is True
    assert fused_linear_logprobs({"use_fused_linear_logprobs": False}) is False
    assert fused_linear_logprobs({}) is False


@pytest.mark.parametrize(
    ("megatron", "generation", "expected"),
    [
        ({}, {"temperature": 0.0}, None),
        ({"use_fused_linear_logprobs": False, "fused_linear_logprobs_chunk_size": 8}, None, None),
        ({"use_fused_linear_logprobs": True}, None, (None, 1.0)),
        ({"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": None}, {}, (None, 1.0)),
        ({"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 8}, {"temperature": 2}, (8, 2.0)),
    ],
)
def test_settings_of_fused_linear_logprobs(megatron: dict[str, Any], generation: Any, expected: Any) -> None:
    assert fused_linear_logprobs_settings(policy(**megatron) | {"generation": generation}) == expected


def test_fused_linear_logprobs_cannot_divide_by_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"policy\.generation\.temperature is 0\.0: must be above 0, because policy\.m"
    ):
        fused_linear_logprobs_settings(policy(use_fused_linear_logprobs=True) | {"generation": {"temperature": 0.0}})
