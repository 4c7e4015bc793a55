"""Lets people who call Megatron-Bridge's own setup have our refresh of the FP32 copies: one call before it.

Bridge 0.6 ends its setup with a sync of its own. It writes the model's 16-bit weights over every FP32 copy after each
load, a resume included, and so takes from every master the bits that training had given it. Ours looks first: after a
fine-tuning load every copy becomes exact, and after a resume none is touched that is merely more precise than the
model. It is faster too.

Needed with megatron-bridge 0.6; may go when Bridge's own sync leaves precise masters alone.
"""

from __future__ import annotations

import logging
from typing import Any

from megasetup.compat.bridge import import_bridge
from megasetup.masters import ensure_master_weights

_logger = logging.getLogger("megasetup")

_NAME = "sync_hybrid_device_optimizer_fp32_master_copies"
_HOLDERS = ("megatron.bridge.training.optim", "megatron.bridge.training.setup")


def _ensure(optimizer: Any) -> bool:
    """In the place of Bridge's sync: repair what the model contradicts. Returns whether anything is offloaded."""
    if optimizer is None:
        return False
    report = ensure_master_weights(optimizer)
    if not report.audit.copies:
        return False
    _logger.info("%s", report)
    return True


def use_in_megatron_bridge() -> None:
    """From here on Megatron-Bridge's own setup refreshes the FP32 copies with ensure_master_weights.

    Call it once, before `megatron.bridge`'s pretrain, finetune or setup. A second call changes nothing.

    Raises:
        ImportError: megatron-bridge is not installed.
        RuntimeError: this megatron-bridge has no sync of its own to replace.
    """
    holders = [import_bridge(name) for name in _HOLDERS]
    missing = [holder.__name__ for holder in holders if not hasattr(holder, _NAME)]
    if missing:
        raise RuntimeError(
            f"{' and '.join(missing)} of the installed megatron-bridge has no {_NAME}: call "
            "megasetup.ensure_master_weights(optimizer) after its setup instead"
        )
    for holder in holders:
        setattr(holder, _NAME, _ensure)
