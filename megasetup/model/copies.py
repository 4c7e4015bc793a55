"""The end of a setup: every FP32 copy of every weight is made true, and seen to be."""

from __future__ import annotations

from typing import Any

from megasetup.masters import AuditReport, audit_master_weights, ensure_master_weights, sync_master_weights
from megasetup.model.stages import Stages


def make_masters_true(stages: Stages, cfg: Any, chunks: list[Any], optimizer: Any, *, resumed: bool) -> None:
    """Refresh the FP32 copies, or after a resume repair only what contradicts the model, and see that none is stale.

    Args:
        stages: the setup's stages, whose report is told what was done and found.
        cfg: the ConfigContainer.
        chunks: the model's chunks, loaded.
        optimizer: Megatron's optimizer.
        resumed: whether its state was restored.

    Raises:
        RuntimeError: a copy is stale all the same.
    """
    report = stages.report
    remedy = "run `megasetup doctor`; audit_master_weights(optimizer, model) names every copy"
    # Master weights that came from the checkpoint hold more than the model does, and are not to be overwritten.
    if resumed or cfg.checkpoint.load_main_params_from_ckpt:
        with stages.stage("check masters", remedy) as stage:
            report.ensure = ensure_master_weights(optimizer, chunks, levels="all")
            stage.bytes = _audited_bytes(report.ensure.audit)
    else:
        with stages.stage("sync masters", remedy) as stage:
            report.sync = sync_master_weights(optimizer, chunks, levels="all")
            stage.bytes = report.sync.bytes
    with stages.stage("audit", remedy) as stage:
        report.audit = audit_master_weights(optimizer, chunks)
        stage.bytes = _audited_bytes(report.audit)
        if not report.audit.ok:
            raise RuntimeError(
                f"FP32 copies do not hold the model's weights, and training would lose it:\n{report.audit}"
            )


def _audited_bytes(audit: AuditReport) -> int:
    return 4 * sum(found.elements for found in audit.copies)
