"""The model's dtype, the pipeline's, and whether model and optimizer agree with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bridge_providers import policy, provider

from megasetup.compat.bridge import import_bridge
from megasetup.config.dtypes import to_dtype
from megasetup.config.precision import apply_precision_config, policy_dtype, validate_dtype_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_precision_names_a_dtype(name: str, dtype: torch.dtype) -> None:
    assert policy_dtype({"precision": name}) is dtype


@pytest.mark.parametrize("value", ["bf16", "fp8", "", None, torch.bfloat16, 16])
def test_another_precision_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"policy\.precision is .*: must be one of float32, bfloat16, float16"):
        policy_dtype({"precision": value})


def test_no_precision_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        policy_dtype({})


@pytest.mark.parametrize(
    ("dtype", "bf16", "fp16"), [("bfloat16", True, False), ("float16", False, True), ("float32", False, False)]
)
def test_the_dtype_sets_flags_and_params_dtype(dtype: str, bf16: bool, fp16: bool) -> None:
    model_cfg = provider()
    model_cfg.bf16 = model_cfg.fp16 = True
    apply_precision_config(model_cfg, policy(), DTYPES[dtype])
    assert (model_cfg.bf16, model_cfg.fp16, model_cfg.params_dtype) == (bf16, fp16, DTYPES[dtype])


def test_pipeline_dtype_has_its_own_key() -> None:
    model_cfg = provider()
    before = model_cfg.pipeline_dtype
    apply_precision_config(model_cfg, policy(), torch.bfloat16)
    assert model_cfg.pipeline_dtype == before
    apply_precision_config(model_cfg, policy(pipeline_dtype="float32"), torch.bfloat16)
    assert model_cfg.pipeline_dtype is torch.float32
    apply_precision_config(model_cfg, policy(pipeline_dtype=None), torch.bfloat16)
    assert model_cfg.pipeline_dtype is None


def test_a_pipeline_dtype_that_is_none_of_torch_s_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.pipeline_dtype is 'half': must be one of float32,"):
        apply_precision_config(provider(), policy(pipeline_dtype="half"), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        ("fp32", torch.float32),
        ("fp8", torch.uint8),
        (torch.float32, torch.float32),
        (None, None),
    ],
)
def test_names_of_dtypes(name: Any, dtype: torch.dtype | None) -> None:
    assert to_dtype(name, "key") is dtype


def _configs(dtype: torch.dtype, **optimizer: Any) -> tuple[Any, Any]:
    model_cfg = provider()
    apply_precision_config(model_cfg, policy(), dtype)
    return model_cfg, import_bridge("megatron.bridge.training.config").OptimizerConfig(**optimizer)


class TestDtypeCheck:
    """Flags agree with the precision; the optimizer's count when it is precision-aware, or for float32."""

    @pytest.mark.parametrize(
        ("dtype", "optimizer"),
        [
            (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
            (torch.float16, {"fp16": True, "use_precision_aware_optimizer": True}),
            (torch.float32, {"use_precision_aware_optimizer": True}),
            (torch.float32, {}),
            # Not precision-aware: the optimizer's flags do not count.
            (torch.bfloat16, {}),
            (torch.float16, {"bf16": True}),
        ],
    )
    def test_agreement_passes(self, dtype: torch.dtype, optimizer: dict[str, Any]) -> None:
        validate_dtype_config(dtype, *_configs(dtype, **optimizer))

    @pytest.mark.parametrize(
        ("dtype", "optimizer", "message"),
        [
            (torch.bfloat16, {"use_precision_aware_optimizer": True}, r"optimizer\.bf16 is False: must be True"),
            (torch.float16, {"use_precision_aware_optimizer": True}, r"optimizer\.fp16 is False: must be True"),
            (
                torch.bfloat16,
                {"bf16": True, "fp16": True, "use_precision_aware_optimizer": True},
                r"optimizer\.fp16 is True: must be False, because policy\.precision is bfloat16",
            ),
            (
                torch.float32,
                {"bf16": True},
                r"optimizer\.bf16 is True: must be False, because policy\.precision is float32",
            ),
            (torch.float32, {"fp16": True}, r"optimizer\.fp16 is True: must be False"),
        ],
    )
    def test_a_flag_of_the_optimizer_that_disagrees(
        self, dtype: torch.dtype, optimizer: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(AssertionError, match=message) as raised:
            validate_dtype_config(dtype, *_configs(dtype, **optimizer))
        assert isinstance(raised.value, ValueError)

    def test_flags_of_the_model_that_disagree_come_together(self) -> None:
        model_cfg, optimizer_cfg = _configs(torch.float16)
        with pytest.raises(AssertionError, match="2 problems") as raised:
            validate_dtype_config(torch.bfloat16, model_cfg, optimizer_cfg)
        assert "the provider's bf16 is False: must be True" in str(raised.value)
        assert "the provider's fp16 is True: must be False" in str(raised.value)
