"""The optimizer, its schedule, and what CPU offload needs.

The sections of the config go into Megatron's and Bridge's own classes field by field, so a field that a later version
adds needs no line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.compat.bridge import import_bridge
from megasetup.config.build import BRIDGE_CONFIG, Derived, build_from_section
from megasetup.config.errors import MISSING, ConfigAssertionError, Problems
from megasetup.config.fields import MEGATRON, megatron_cfg, section

_OPTIMIZER = f"{MEGATRON}.optimizer"
_OFFLOADABLE = ("adam", "sgd")


def validate_optimizer_config(config: Mapping[str, Any]) -> None:
    """Check what stepping on the CPU needs.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: optimizer_cpu_offload without 0 < optimizer_offload_fraction <= 1, without
            use_distributed_optimizer, or with another optimizer than adam and sgd; overlap_cpu_optimizer_d2h_h2d
            without optimizer_cpu_offload. Lists all that are so.
    """
    settings = section(megatron_cfg(config), "optimizer", path=MEGATRON)
    problems = Problems()

    def need(key: str, right: bool, remedy: str) -> None:
        if not right:
            problems.add(f"{_OPTIMIZER}.{key}", settings.get(key, MISSING), remedy, ConfigAssertionError)

    if settings.get("optimizer_cpu_offload"):
        because = f"because {_OPTIMIZER}.optimizer_cpu_offload is true"
        fraction = settings.get("optimizer_offload_fraction", 0.0)
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        need("optimizer_offload_fraction", number and 0 < fraction <= 1, f"must be above 0 and at most 1, {because}")
        need("use_distributed_optimizer", bool(settings.get("use_distributed_optimizer")), f"must be true, {because}")
        need(
            "optimizer",
            settings.get("optimizer", "adam") in _OFFLOADABLE,
            f"must be {' or '.join(_OFFLOADABLE)}, {because}",
        )
    else:
        need(
            "overlap_cpu_optimizer_d2h_h2d",
            not settings.get("overlap_cpu_optimizer_d2h_h2d"),
            f"must be false, unless {_OPTIMIZER}.optimizer_cpu_offload is true",
        )
    problems.raise_any()


def create_optimizer_config(config: Mapping[str, Any], derived: Derived, problems: Problems) -> Any:
    """Megatron-Bridge's OptimizerConfig from policy.megatron_cfg.optimizer.

    Args:
        config: the policy config.
        derived: fields that follow from other settings (`build_from_section`).
        problems: takes what is wrong with the section.

    Returns:
        The OptimizerConfig; settings with problems are left out of it.
    """
    settings = section(megatron_cfg(config), "optimizer", path=MEGATRON)
    return build_from_section(import_bridge(BRIDGE_CONFIG).OptimizerConfig, settings, _OPTIMIZER, derived, problems)


def create_scheduler_config(config: Mapping[str, Any], weight_decay: float, problems: Problems) -> Any:
    """Megatron-Bridge's SchedulerConfig from policy.megatron_cfg.scheduler.

    Args:
        config: the policy config.
        weight_decay: the optimizer's. Megatron's scheduler needs to know where weight decay starts and ends, and has no
            default for it; it stays here when the config says nothing.
        problems: takes what is wrong with the section.

    Returns:
        The SchedulerConfig; settings with problems are left out of it.
    """
    settings = section(megatron_cfg(config), "scheduler", path=MEGATRON)
    scheduler = build_from_section(
        import_bridge(BRIDGE_CONFIG).SchedulerConfig, settings, f"{MEGATRON}.scheduler", {}, problems
    )
    if scheduler.start_weight_decay is None:
        scheduler.start_weight_decay = weight_decay
    if scheduler.end_weight_decay is None:
        scheduler.end_weight_decay = weight_decay
    return scheduler
