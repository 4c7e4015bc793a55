"""How data-parallel ranks exchange gradients and weights.

What the optimizer and the model decide is derived and not asked for twice: Megatron reads these flags in two or three
places, and a run whose places disagree gathers stale weights or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.compat.bridge import import_bridge
from megasetup.config.build import BRIDGE_CONFIG, Derivation, Derived, build_from_section
from megasetup.config.errors import ConfigAssertionError, Problems, config_error
from megasetup.config.fields import MEGATRON, megatron_cfg, section
from megasetup.config.logprobs import FUSED_KEY, fused_linear_logprobs

_DDP = f"{MEGATRON}.distributed_data_parallel_config"


def overlaps_param_gather(config: Mapping[str, Any]) -> bool:
    """Whether weights are gathered while the forward pass runs."""
    settings = section(megatron_cfg(config), "distributed_data_parallel_config", path=MEGATRON)
    return bool(settings.get("overlap_param_gather"))


def validate_data_parallel_config(config: Mapping[str, Any]) -> None:
    """Check that nothing reads weights before they are gathered.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: overlap_param_gather together with fused linear logprobs, which read the output layer's
            weight outside its forward pass.
    """
    if overlaps_param_gather(config) and fused_linear_logprobs(megatron_cfg(config)):
        raise config_error(
            f"{_DDP}.overlap_param_gather", True, f"must be false, because {FUSED_KEY} is true", ConfigAssertionError
        )


def create_ddp_config(config: Mapping[str, Any], derived: Derived, problems: Problems) -> Any:
    """Megatron-Bridge's DistributedDataParallelConfig from policy.megatron_cfg.distributed_data_parallel_config.

    average_in_collective is False, because the loss is computed per token; check_for_nan_in_grad is True.

    Args:
        config: the policy config.
        derived: further fields that follow from other settings (`build_from_section`).
        problems: takes what is wrong with the section.

    Returns:
        The DistributedDataParallelConfig; settings with problems are left out of it.
    """
    settings = section(megatron_cfg(config), "distributed_data_parallel_config", path=MEGATRON)
    fixed = {
        "average_in_collective": Derivation(False, "because the loss is computed per token"),
        "check_for_nan_in_grad": Derivation(True, "always"),
    }
    return build_from_section(
        import_bridge(BRIDGE_CONFIG).DistributedDataParallelConfig, settings, _DDP, fixed | dict(derived), problems
    )
