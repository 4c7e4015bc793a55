"""The FP32 copies of the weights that Megatron's optimizers keep: planned, refreshed, audited, repaired."""

from megasetup.masters.audit import AuditReport, CopyAudit, audit_master_weights, audit_plan
from megasetup.masters.layout import Untouched, WeightCopies
from megasetup.masters.plan import PlanError, SyncPlan, plan_sync
from megasetup.masters.report import LevelReport, SyncReport
from megasetup.masters.sync import EnsureReport, Repair, ensure_master_weights, sync_master_weights

__all__ = [
    "AuditReport",
    "CopyAudit",
    "EnsureReport",
    "LevelReport",
    "PlanError",
    "Repair",
    "SyncPlan",
    "SyncReport",
    "Untouched",
    "WeightCopies",
    "audit_master_weights",
    "audit_plan",
    "ensure_master_weights",
    "plan_sync",
    "sync_master_weights",
]
