"""Chunked log-probabilities need deferred FP32 logits."""

from __future__ import annotations

from typing import Any

import pytest
from bridge_providers import policy

from megasetup.config.logprobs import fused_linear_logprobs, validate_chunking_config


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
