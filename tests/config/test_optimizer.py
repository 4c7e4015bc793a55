"""What CPU offload needs, and how the sections reach Bridge's OptimizerConfig and SchedulerConfig."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bridge_providers import policy

from megasetup.config.build import Derivation
from megasetup.config.errors import Problems
from megasetup.config.optimizer import create_optimizer_config, create_scheduler_config, validate_optimizer_config

OFFLOADING = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_distributed_optimizer": True}
KEY = r"policy\.megatron_cfg\.optimizer\."


@pytest.mark.parametrize(
    "settings",
    [
        {},
        OFFLOADING,
        OFFLOADING | {"optimizer": "adam", "optimizer_offload_fraction": 0.25},
        OFFLOADING | {"optimizer": "sgd", "optimizer_offload_fraction": 1},
        OFFLOADING | {"overlap_cpu_optimizer_d2h_h2d": True},
        # Without CPU offload the fraction and the rest do not matter.
        {"optimizer_cpu_offload": False, "optimizer_offload_fraction": 0.0, "optimizer": "muon"},
        {"optimizer_cpu_offload": False, "overlap_cpu_optimizer_d2h_h2d": False},
    ],
)
def test_what_is_right_passes(settings: dict[str, Any]) -> None:
    validate_optimizer_config(policy(optimizer=settings))


def test_no_optimizer_section_passes() -> None:
    validate_optimizer_config(policy())
    validate_optimizer_config(policy(optimizer=None))


@pytest.mark.parametrize("fraction", [0, 0.0, -0.5, 1.5, math.nan, None, "1.0", True])
def test_the_fraction_is_above_0_and_at_most_1(fraction: Any) -> None:
    config = policy(optimizer=OFFLOADING | {"optimizer_offload_fraction": fraction})
    with pytest.raises(
        AssertionError, match=KEY + "optimizer_offload_fraction is .*: must be above 0 and at most 1"
    ) as raised:
        validate_optimizer_config(config)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer_offload_fraction": ...}, "optimizer_offload_fraction is missing: must be above 0"),
        ({"use_distributed_optimizer": False}, "use_distributed_optimizer is False: must be true"),
        ({"use_distributed_optimizer": ...}, "use_distributed_optimizer is missing: must be true"),
        ({"optimizer": "muon"}, "optimizer is 'muon': must be adam or sgd"),
    ],
)
def test_what_cpu_offload_needs(settings: dict[str, Any], message: str) -> None:
    merged = {key: value for key, value in (OFFLOADING | settings).items() if value is not ...}
    with pytest.raises(AssertionError, match=KEY + message):
        validate_optimizer_config(policy(optimizer=merged))


@pytest.mark.parametrize("settings", [{}, {"optimizer_cpu_offload": False}])
def test_overlap_needs_cpu_offload(settings: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=KEY + "overlap_cpu_optimizer_d2h_h2d is True: must be false, unless"):
        validate_optimizer_config(policy(optimizer=settings | {"overlap_cpu_optimizer_d2h_h2d": True}))


def test_all_problems_come_together() -> None:
    with pytest.raises(ValueError, match="3 problems"):
        validate_optimizer_config(policy(optimizer={"optimizer_cpu_offload": True, "optimizer": "lion"}))


def test_the_section_reaches_the_optimizer_config_and_absent_keys_keep_megatron_s_default() -> None:
    problems = Problems()
    settings = {"lr": 2e-5, "bf16": True, "params_dtype": "float32", "exp_avg_dtype": "bf16", "clip_grad": 0.0}
    optimizer = create_optimizer_config(policy(optimizer=settings), {}, problems)
    problems.raise_any()
    assert (optimizer.lr, optimizer.bf16, optimizer.clip_grad) == (2e-5, True, 0.0)
    assert (optimizer.params_dtype, optimizer.exp_avg_dtype) == (torch.float32, torch.bfloat16)
    assert (optimizer.optimizer, optimizer.adam_beta2, optimizer.optimizer_cpu_offload) == ("adam", 0.999, False)


def test_unknown_fields_and_dtypes_come_together() -> None:
    problems = Problems()
    create_optimizer_config(policy(optimizer={"learning_rate": 1.0, "main_params_dtype": "half"}), {}, problems)
    with pytest.raises(AttributeError, match="2 problems") as raised:
        problems.raise_any()
    assert "policy.megatron_cfg.optimizer.learning_rate is 1.0: OptimizerConfig has no such field" in str(raised.value)
    assert "policy.megatron_cfg.optimizer.main_params_dtype is 'half': must be one of" in str(raised.value)


def test_a_derived_field_may_be_repeated_and_not_contradicted() -> None:
    derived = {"overlap_param_gather": Derivation(True, "from elsewhere")}
    problems = Problems()
    assert create_optimizer_config(policy(), derived, problems).overlap_param_gather is True
    repeated = create_optimizer_config(policy(optimizer={"overlap_param_gather": True}), derived, problems)
    assert repeated.overlap_param_gather is True
    assert not problems
    create_optimizer_config(policy(optimizer={"overlap_param_gather": False}), derived, problems)
    with pytest.raises(
        ValueError, match=KEY + "overlap_param_gather is False: must be True, from elsewhere: remove it"
    ):
        problems.raise_any()


def test_the_section_reaches_the_scheduler_config() -> None:
    problems = Problems()
    settings = {"lr_decay_style": "cosine", "lr_warmup_iters": 5, "start_weight_decay": 0.0, "end_weight_decay": 0.2}
    scheduler = create_scheduler_config(policy(scheduler=settings), 0.01, problems)
    problems.raise_any()
    assert (scheduler.lr_decay_style, scheduler.lr_warmup_iters) == ("cosine", 5)
    assert (scheduler.start_weight_decay, scheduler.end_weight_decay) == (0.0, 0.2)
    assert scheduler.lr_decay_iters is None


def test_weight_decay_stays_at_the_optimizer_s_where_the_schedule_says_nothing() -> None:
    problems = Problems()
    scheduler = create_scheduler_config(policy(), 0.05, problems)
    assert (scheduler.start_weight_decay, scheduler.end_weight_decay) == (0.05, 0.05)


def test_a_field_that_the_scheduler_computes_is_no_setting() -> None:
    problems = Problems()
    create_scheduler_config(policy(scheduler={"lr_decay_steps": 5}), 0.0, problems)
    with pytest.raises(AttributeError, match=r"policy\.megatron_cfg\.scheduler\.lr_decay_steps is 5"):
        problems.raise_any()
