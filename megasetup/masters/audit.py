"""Which FP32 copies are safe to train from, which are not, and what they are called.

Two invariants tell. Exact: the copy is the widened weight, bit for bit, as it is right after a fine-tuning load.
Consistent: the copy, rounded to the weight's dtype, is the weight, as it is at any moment of healthy training. Neither:
stale, and the next optimizer step would throw the model's weights away.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megasetup.kernels import Comparison
from megasetup.masters.layout import Levels, Untouched
from megasetup.masters.plan import Finding, SyncPlan, plan_sync
from megasetup.masters.report import remarks, shortened, table

State = Literal["exact", "consistent", "stale"]
_STATES: tuple[State, ...] = ("exact", "consistent", "stale")


def state_of(comparison: Comparison) -> State:
    """Which of the two invariants holds."""
    if comparison.rounded_differences:
        return "stale"
    return "consistent" if comparison.exact_differences else "exact"


class CopyAudit(NamedTuple):
    """The state of one copy of one weight on this rank.

    Attributes:
        label: the weight's name, or an object whose str() is it.
        level: 1, 2 or 3.
        elements: elements of this rank's shard.
        exact_differences: elements where the copy is not the widened weight, bit for bit.
        rounded_differences: elements where the copy, rounded to the weight's dtype, is not the weight.
        first_index: index within the shard of the first of rounded_differences, or if there is none, of the first of
            exact_differences; -1 when there is neither.
        offset: where the shard starts in the whole parameter, in elements.
        state: "exact", "consistent" or "stale".
    """

    label: object
    level: int
    elements: int
    exact_differences: int
    rounded_differences: int
    first_index: int
    offset: int
    state: State

    @property
    def name(self) -> str:
        return str(self.label)

    @property
    def first_index_in_parameter(self) -> int:
        """first_index counted from the start of the whole parameter, flattened; -1 when there is none."""
        return -1 if self.first_index < 0 else self.offset + self.first_index

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "level": self.level,
            "state": self.state,
            "elements": self.elements,
            "exact_differences": self.exact_differences,
            "rounded_differences": self.rounded_differences,
            "first_index": self.first_index,
            "first_index_in_parameter": self.first_index_in_parameter,
        }


@dataclass(frozen=True)
class AuditReport:
    """The state of every copy that an optimizer keeps on this rank.

    Attributes:
        copies: one CopyAudit a weight and level, in the optimizer's order. Copies that share memory are compared once
            and each reported; one that is the model's own memory is exact.
        seconds: wall time of the comparison.
        untouched: what was not audited, and why.
        quantised: names of quantised weights: their level 1 has no weight in the model to compare with.
        notes: (name, note) of weights about which there is something to know.
    """

    copies: tuple[CopyAudit, ...]
    seconds: float
    untouched: tuple[Untouched, ...]
    quantised: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """No copy is stale."""
        return not self.stale

    @property
    def stale(self) -> tuple[CopyAudit, ...]:
        """The stale copies, the one with the largest share of differing elements first."""
        found = [copy for copy in self.copies if copy.state == "stale"]
        return tuple(sorted(found, key=lambda copy: -copy.rounded_differences / copy.elements))

    def counts(self) -> dict[int, dict[State, int]]:
        """How many copies of each level are in each state."""
        tally = Counter((copy.level, copy.state) for copy in self.copies)
        return {
            level: {state: tally[level, state] for state in _STATES}
            for level in sorted({copy.level for copy in self.copies})
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for JSON."""
        return {
            "ok": self.ok,
            "seconds": self.seconds,
            "counts": {str(level): dict(states) for level, states in self.counts().items()},
            "copies": [copy.to_dict() for copy in self.copies],
            "untouched": [entry._asdict() for entry in self.untouched],
            "quantised": list(self.quantised),
            "notes": [list(entry) for entry in self.notes],
        }

    def __str__(self) -> str:
        stale = self.stale
        verdict = f"{len(stale):,} STALE" if stale else "none stale"
        lines = [f"audited {len(self.copies):,} copies in {self.seconds * 1e3:,.1f} ms: {verdict}"]
        rows: list[tuple[str, ...]] = [("level", *_STATES)]
        rows += [(str(level), *(f"{states[state]:,}" for state in _STATES)) for level, states in self.counts().items()]
        lines += table(rows)
        if stale:
            lines.append("stale, worst first (elements that do not round to the weight, of all in the shard):")
            lines += shortened(
                [
                    f"  {copy.name}, level {copy.level}: {copy.rounded_differences:,} of {copy.elements:,}, "
                    f"first at {copy.first_index:,} ({copy.first_index_in_parameter:,} in the parameter)"
                    for copy in stale
                ]
            )
        lines += remarks(self.untouched, self.quantised, self.notes)
        return "\n".join(lines)


def audit_master_weights(optimizer: Any, model: Any = None, *, levels: Levels = "all") -> AuditReport:
    """Compare every FP32 copy that an optimizer keeps with the model's weights. Writes nothing.

    Looks at this rank's shards only; on several ranks each audits its own.

    Args:
        optimizer: a Megatron optimizer (DistributedOptimizer, ChainedOptimizer, Float16OptimizerWithFloat16Params,
            FP32Optimizer) or a bare HybridDeviceOptimizer.
        model: the model's chunks, for the weights' names. Default: the chunks that the optimizer knows.
        levels: "all" also audits level 1 of sub-optimizers without a hybrid optimizer; "offloaded" leaves them out.

    Raises:
        PlanError: the copies do not fit their weights; a ValueError that lists all that is wrong.
        TypeError: not a Megatron optimizer, or not a model.
    """
    return audit_plan(plan_sync(optimizer, model, levels=levels))


def audit_plan(plan: SyncPlan) -> AuditReport:
    """Audit the copies of a plan, which stays as it is and may be run afterwards."""
    start = time.perf_counter()
    findings = plan.compare()
    return report_findings(plan, findings, time.perf_counter() - start)


def report_findings(plan: SyncPlan, findings: Sequence[Finding], seconds: float) -> AuditReport:
    """Comparisons that a plan made, as a report."""
    copies = []
    for weight, level, copy, comparison in findings:
        entry = plan.copies[weight]
        exact, rounded, first_exact, first_rounded = comparison
        copies.append(
            CopyAudit(
                entry.label,
                level,
                copy.numel(),
                exact,
                rounded,
                first_rounded if rounded else first_exact,
                entry.offset,
                state_of(comparison),
            )
        )
    layout = plan.layout
    return AuditReport(
        copies=tuple(copies),
        seconds=seconds,
        untouched=tuple(layout.untouched),
        quantised=tuple(map(str, layout.quantised)),
        notes=tuple((entry.name, entry.note) for entry in plan.copies if entry.note),
    )
