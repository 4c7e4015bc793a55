"""Refreshing the FP32 copies of the weights: all of them after a fine-tuning load, or only those that need it.

sync_master_weights overwrites every copy, which is right after a load that wrote the model alone and wrong after a
resume, whose masters hold more than the model does. ensure_master_weights looks first, and may follow any load.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch

from megasetup.masters.audit import AuditReport, report_findings, state_of
from megasetup.masters.layout import Levels, WeightCopies
from megasetup.masters.plan import Finding, SyncPlan, plan_sync
from megasetup.masters.report import SyncReport, shortened


def sync_master_weights(optimizer: Any, model: Any = None, *, levels: Levels = "offloaded") -> SyncReport:
    """Write the model's weights into every FP32 copy that the optimizer keeps of them.

    For right after a load that wrote only the model. Call it on every rank: each refreshes its own shards, and nothing
    is exchanged between ranks. To do it again and again on the same optimizer, keep the plan of plan_sync.

    Args:
        optimizer: a Megatron optimizer (DistributedOptimizer, ChainedOptimizer, Float16OptimizerWithFloat16Params,
            FP32Optimizer) or a bare HybridDeviceOptimizer.
        model: the model's chunks, for the weights' names. Default: the chunks that the optimizer knows.
        levels: "offloaded" leaves sub-optimizers without a hybrid optimizer untouched and reports them; "all" also
            refreshes their level 1.

    Returns:
        What was written, level by level, and what was not.

    Raises:
        PlanError: the copies do not fit their weights; a ValueError that lists all that is wrong. Nothing was written.
        TypeError: not a Megatron optimizer, or not a model.
        RuntimeError: a CUDA call failed; copies are partly written, and another call repairs them.
    """
    return plan_sync(optimizer, model, levels=levels).run()


class Repair(NamedTuple):
    """One copy that was rewritten.

    Attributes:
        name: the weight's name.
        level: the copy that was rewritten, whole.
        source: what it was rewritten from: "model", or "level 1" and so on when that copy held more than the model.
        elements: elements of the copy, all of which were written.
        was: the copy's state before, "stale" or "exact".
    """

    name: str
    level: int
    source: str
    elements: int
    was: str


@dataclass(frozen=True)
class EnsureReport:
    """What ensure_master_weights found and did.

    Attributes:
        audit: the state of every copy before the repair.
        repairs: the copies that were rewritten; every other copy keeps all its bits. Empty when all was well.
        seconds: wall time of audit and repair, planning included.
    """

    audit: AuditReport
    repairs: tuple[Repair, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for JSON."""
        return {
            "audit": self.audit.to_dict(),
            "repairs": [repair._asdict() for repair in self.repairs],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        lines = [str(self.audit), f"repaired {len(self.repairs):,} copies, {self.seconds * 1e3:,.1f} ms in all"]
        lines += shortened(
            [f"  {repair.name}, level {repair.level} ({repair.was}), from {repair.source}" for repair in self.repairs]
        )
        return "\n".join(lines)


def ensure_master_weights(optimizer: Any, model: Any = None, *, levels: Levels = "offloaded") -> EnsureReport:
    """Repair the FP32 copies that the model contradicts, and leave all others as they are, bit for bit.

    May follow any load, a resume included. A copy that is merely more precise than the model (it rounds to the model's
    weight) is never written. Where such a copy exists, it is what the weight's other copies are repaired from: on a
    resume in standard mode Megatron loads the precise masters into level 1 alone, and level 2 gets them from there.
    That holds also for a copy that is exact, such as the clone of a norm weight that still rounds to its initial
    value: it gains the bits it lacks, so that a resumed run continues as the saved one would have. Otherwise a stale
    copy is widened from the model.

    Args and errors are those of sync_master_weights.

    Returns:
        The state before, and what was rewritten from what.
    """
    start = time.perf_counter()
    plan = plan_sync(optimizer, model, levels=levels)
    audited = time.perf_counter()
    findings = plan.compare()
    audit = report_findings(plan, findings, time.perf_counter() - audited)

    repairs: list[Repair] = []
    jobs: list[WeightCopies] = []
    uploads: list[tuple[torch.Tensor, torch.Tensor]] = []
    for weight, group in groupby(findings, key=lambda finding: finding.weight):
        entry = plan.copies[weight]
        for source, origin, broken in _sources_for_repair(entry, list(group)):
            repairs += [
                Repair(entry.name, found.level, origin, found.copy.numel(), state_of(found.comparison))
                for found in broken
            ]
            here = []
            for found in broken:
                if source.device.type == "cpu" and found.copy.device.type != "cpu":
                    uploads.append((source, found.copy))
                else:
                    here.append((found.level, found.copy))
            if here:
                jobs.append(entry._replace(source=source, levels=tuple(here)))
    if jobs:
        SyncPlan.from_copies(jobs).run()
    _upload(uploads)
    return EnsureReport(audit, tuple(repairs), time.perf_counter() - start)


def _sources_for_repair(
    entry: WeightCopies, findings: Sequence[Finding]
) -> list[tuple[torch.Tensor, str, list[Finding]]]:
    """What the broken copies of one weight are to be rewritten from: (source, its name, the copies)."""
    states = [state_of(finding.comparison) for finding in findings]
    if "stale" not in states and "consistent" not in states:
        return []
    precise = next((finding for finding, state in zip(findings, states, strict=True) if state == "consistent"), None)
    from_precise: list[Finding] = []
    from_model: list[Finding] = []
    for finding, state in zip(findings, states, strict=True):
        if state == "consistent" or finding.copy.data_ptr() == entry.source.data_ptr():
            continue
        if precise is not None and finding.copy.dtype == precise.copy.dtype:
            from_precise.append(finding)
        elif state == "stale":
            from_model.append(finding)
    sources = []
    if precise is not None and from_precise:
        sources.append((precise.copy.detach().view(-1), f"level {precise.level}", from_precise))
    if from_model:
        sources.append((entry.source, "model", from_model))
    return sources


@torch.no_grad()
def _upload(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Host to GPU, the one way that a transfer does not go; rare enough for a copy a tensor."""
    for source, target in pairs:
        target.view(-1).copy_(source, non_blocking=True)
    for device in {target.device for _, target in pairs}:
        torch.cuda.synchronize(device)
