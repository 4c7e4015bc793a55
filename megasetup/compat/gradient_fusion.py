"""A provider's default for gradient_accumulation_fusion that can be built.

Bridge switches the fusion on where Transformer Engine is installed, whose layers do it themselves. Megatron's own
output layer does it with an extension of APEX, and refuses to be made without: on a machine with Transformer Engine and
no APEX, as most are, Bridge's default cannot be built at all.

Needed with megatron-bridge 0.6 and megatron-core 0.19; may go when the output layer is Transformer Engine's, or Bridge
looks for both.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

logger = logging.getLogger("megasetup")

_EXTENSION = "fused_weight_gradient_mlp_cuda"


def gradient_fusion_can_be_built() -> bool:
    """Whether the extension that Megatron's own layers need is installed."""
    return importlib.util.find_spec(_EXTENSION) is not None


def without_missing_gradient_fusion(model_cfg: Any) -> None:
    """Switch a provider's default off where it cannot be built.

    Args:
        model_cfg: the model provider, changed in place. Not for a value that the user gave: that is honoured.
    """
    if getattr(model_cfg, "gradient_accumulation_fusion", False) and not gradient_fusion_can_be_built():
        model_cfg.gradient_accumulation_fusion = False
        logger.info(
            "gradient_accumulation_fusion is off: Megatron's output layer needs APEX's %s for it, which is not "
            "installed",
            _EXTENSION,
        )
