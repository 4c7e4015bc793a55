"""The names and signatures of nemo_rl.models.megatron.setup, for use in its place.

Code that calls those functions finds them here unchanged, positional order and keyword names included; what they do
stands in the packages below.
"""

from __future__ import annotations

import logging
from typing import Any

from megasetup.masters import sync_master_weights

_logger = logging.getLogger("megasetup")


def _force_sync_optimizer_fp32_from_model(optimizer: Any, model: Any) -> None:
    """Write the model's weights into every FP32 copy that an offloading optimizer keeps of them.

    To be called right after a fine-tuning load, on every rank. Sub-optimizers without a HybridDeviceOptimizer are left
    untouched. What was done is logged at info level.

    Args:
        optimizer: the Megatron optimizer, or None where the setup made none: there is nothing to refresh then.
        model: the model's chunks, a module or a list of modules; used for names.

    Raises:
        PlanError: the copies do not fit their weights; a ValueError that lists all that is wrong. Nothing was written.
        TypeError: not a Megatron optimizer, or not a model.
        RuntimeError: a CUDA call failed.
    """
    if optimizer is None:
        _logger.info("no optimizer, so there are no FP32 copies to refresh")
        return
    _logger.info("%s", sync_master_weights(optimizer, model))
