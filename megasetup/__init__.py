"""megasetup sets a Megatron model up for fine-tuning with its optimizer on the CPU.

The public names stand here and are imported when first used, so that `import megasetup` loads torch and nothing
heavier: no Megatron, no Transformer Engine, no compiled module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch as _torch  # (the one heavy import that every user of this package already has)

__version__ = "0.1.0"

_HOMES = {
    "AuditReport": "megasetup.masters",
    "MoEFloat16Module": "megasetup.moe",
    "SyncPlan": "megasetup.masters",
    "SyncReport": "megasetup.masters",
    "audit_master_weights": "megasetup.masters",
    "ensure_master_weights": "megasetup.masters",
    "export_model_to_hf": "megasetup.checkpoint.exporting",
    "handle_model_import": "megasetup.checkpoint.importing",
    "import_model_from_hf": "megasetup.checkpoint.importing",
    "plan_sync": "megasetup.masters",
    "recast_expert_bias": "megasetup.moe",
    "sync_master_weights": "megasetup.masters",
    "use_in_megatron_bridge": "megasetup.compat.bridge_sync",
    "validate_model_paths": "megasetup.checkpoint.paths",
}

__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:
    from megasetup.checkpoint.exporting import export_model_to_hf
    from megasetup.checkpoint.importing import handle_model_import, import_model_from_hf
    from megasetup.checkpoint.paths import validate_model_paths
    from megasetup.compat.bridge_sync import use_in_megatron_bridge
    from megasetup.masters import (
        AuditReport,
        SyncPlan,
        SyncReport,
        audit_master_weights,
        ensure_master_weights,
        plan_sync,
        sync_master_weights,
    )
    from megasetup.moe import MoEFloat16Module, recast_expert_bias


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'megasetup' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
