"""How data-parallel ranks exchange gradients and weights: what is always so, what is derived, what excludes what."""

from __future__ import annotations

from typing import Any

import pytest
from bridge_providers import policy

from megasetup.config.build import Derivation
from megasetup.config.data_parallel import create_ddp_config, overlaps_param_gather, validate_data_parallel_config
from megasetup.config.errors import Problems

SECTION = "policy.megatron_cfg.distributed_data_parallel_config"


def _ddp(**settings: Any) -> dict[str, Any]:
    return policy(distributed_data_parallel_config=settings)


def test_what_is_always_so_and_what_the_config_says() -> None:
    problems = Problems()
    config = _ddp(grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1000)
    ddp = create_ddp_config(config, {"use_distributed_optimizer": Derivation(True, "from elsewhere")}, problems)
    problems.raise_any()
    assert (ddp.average_in_collective, ddp.check_for_nan_in_grad) == (False, True)
    assert (ddp.grad_reduce_in_fp32, ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (True, True, True)
    assert (ddp.bucket_size, ddp.use_distributed_optimizer) == (1000, True)


def test_absent_keys_keep_megatron_s_default() -> None:
    ddp = create_ddp_config(policy(), {}, Problems())
    assert (ddp.grad_reduce_in_fp32, ddp.overlap_grad_reduce, ddp.bucket_size) == (False, False, None)
    assert overlaps_param_gather(policy()) is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"average_in_collective": True}, "average_in_collective is True: must be False, because the loss"),
        ({"check_for_nan_in_grad": False}, "check_for_nan_in_grad is False: must be True, always"),
        ({"fp8_param_gather": True}, "fp8_param_gather is True: must be False, from the fp8 settings"),
    ],
)
def test_what_is_no_choice_is_not_contradicted(settings: dict[str, Any], message: str) -> None:
    problems = Problems()
    create_ddp_config(_ddp(**settings), {"fp8_param_gather": Derivation(False, "from the fp8 settings")}, problems)
    with pytest.raises(ValueError, match=rf"{SECTION}\.{message}"):
        problems.raise_any()


def test_an_unknown_field_is_an_attribute_error() -> None:
    problems = Problems()
    create_ddp_config(_ddp(overlap=True), {}, problems)
    with pytest.raises(AttributeError, match=rf"{SECTION}\.overlap is True"):
        problems.raise_any()


def test_overlapped_gathering_excludes_fused_linear_logprobs() -> None:
    config = _ddp(overlap_param_gather=True)
    config["megatron_cfg"]["use_fused_linear_logprobs"] = True
    message = (
        rf"{SECTION}\.overlap_param_gather is True: must be false, because "
        r"policy\.megatron_cfg\.use_fused_linear_logprobs is true"
    )
    with pytest.raises(AssertionError, match=message) as raised:
        validate_data_parallel_config(config)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(("overlap", "fused"), [(True, False), (False, True), (False, False)])
def test_one_of_them_alone_passes(overlap: bool, fused: bool) -> None:
    config = _ddp(overlap_param_gather=overlap)
    config["megatron_cfg"]["use_fused_linear_logprobs"] = fused
    validate_data_parallel_config(config)
