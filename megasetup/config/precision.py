"""In which dtype the model and its pipeline run, and whether the optimizer agrees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megasetup.config.dtypes import PRECISIONS, to_dtype
from megasetup.config.errors import MISSING, ConfigAssertionError, ConfigKeyError, Problems, config_error
from megasetup.config.fields import MEGATRON, POLICY, megatron_cfg, set_field

SETTINGS = {
    "bf16": f"{POLICY}.precision",
    "fp16": f"{POLICY}.precision",
    "params_dtype": f"{POLICY}.precision",
    "pipeline_dtype": f"{MEGATRON}.pipeline_dtype",
}
"""Full path of the setting by the provider field that it decides."""


def policy_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The training dtype that policy.precision names.

    Raises:
        ConfigKeyError: there is no precision.
        ConfigError: it is not "float32", "bfloat16" or "float16".
    """
    precision = config.get("precision", MISSING)
    remedy = f"must be one of {', '.join(PRECISIONS)}"
    if precision is MISSING:
        raise config_error(f"{POLICY}.precision", precision, remedy, ConfigKeyError)
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise config_error(f"{POLICY}.precision", precision, remedy)
    return PRECISIONS[precision]


def apply_precision_config(model_cfg: Any, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Set the model's dtype, and the dtype in which pipeline stages pass activations on.

    Args:
        model_cfg: the model provider, changed in place.
        config: the policy config; megatron_cfg.pipeline_dtype is optional.
        dtype: the training dtype: float32, bfloat16 or float16.

    Raises:
        ConfigError: pipeline_dtype names no dtype.
    """
    model_cfg.bf16 = dtype == torch.bfloat16
    model_cfg.fp16 = dtype == torch.float16
    model_cfg.params_dtype = dtype
    megatron = megatron_cfg(config)
    if "pipeline_dtype" in megatron:
        path = f"{MEGATRON}.pipeline_dtype"
        set_field(model_cfg, "pipeline_dtype", to_dtype(megatron["pipeline_dtype"], path), path)


def validate_dtype_config(dtype: torch.dtype, model_cfg: Any, optimizer_cfg: Any) -> None:
    """Check that the flags of model and optimizer agree with the training dtype.

    The optimizer's flags matter when the precision-aware optimizer is used, and when the training dtype is float32.

    Args:
        dtype: the training dtype.
        model_cfg: the model provider.
        optimizer_cfg: Megatron's OptimizerConfig.

    Raises:
        ConfigAssertionError: a flag disagrees; lists all that do.
    """
    wanted = {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    name = str(dtype).removeprefix("torch.")
    checked = [("the provider's {}", model_cfg)]
    if dtype == torch.float32 or optimizer_cfg.use_precision_aware_optimizer:
        checked.append((f"{MEGATRON}.optimizer.{{}}", optimizer_cfg))
    problems = Problems()
    for path, holder in checked:
        for flag, value in wanted.items():
            found = getattr(holder, flag)
            if bool(found) != value:
                problems.add(
                    path.format(flag),
                    found,
                    f"must be {value}, because {POLICY}.precision is {name}",
                    ConfigAssertionError,
                )
    problems.raise_any()
