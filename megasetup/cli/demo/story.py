"""The demo's course, the same for CPU shards and for real optimizers: stale, refreshed, exact, broken, named, repaired.

Each step checks that what it shows is so and fails the command otherwise, so the demo is also a test of the machine it
runs on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from megasetup.cli import per_tensor
from megasetup.cli.console import amount, bandwidth, duration, percent, table, times
from megasetup.cli.errors import CommandError
from megasetup.cli.timing import seconds_of
from megasetup.masters import AuditReport, Repair, SyncPlan, SyncReport, WeightCopies, audit_plan

_REPEATS = 7
_LISTED = 6


class Story:
    """Tells the demo's steps on a console and keeps what they found.

    Args:
        console: where to print.
        plan: of the weights and copies in play.
        repair: rewrites those of the copies that are stale, and says which.
        device: where the weights lie.
        first_step: the number of the first step told here.
    """

    def __init__(
        self,
        console: Console,
        plan: SyncPlan,
        repair: Callable[[], Sequence[Repair]],
        device: torch.device,
        first_step: int,
    ) -> None:
        self._console, self._plan, self._mend, self._device = console, plan, repair, device
        self._step = first_step
        self.found: dict[str, Any] = {}

    @torch.no_grad()
    def tell(self) -> None:
        """All steps, in order.

        Raises:
            CommandError: something is not as it ought to be.
        """
        self._stale_after_load()
        self._sync()
        broken = self._break_one()
        self._audit_names_it(broken)
        self._repair(broken)
        self._compare()

    def _title(self, text: str) -> None:
        self._console.print(f"\n[bold]{self._step}. {text}[/bold]")
        self._step += 1

    def _audit(self, key: str) -> AuditReport:
        report = audit_plan(self._plan)
        self.found[key] = report.to_dict()
        self._console.print(_audit_table(report))
        return report

    def _stale_after_load(self) -> None:
        self._title("A fine-tuning load wrote the model alone. What do the optimizer's FP32 copies hold?")
        report = self._audit("audit_after_load")
        if report.ok:
            raise CommandError("the audit finds no stale copy, though none has been refreshed yet")
        self._console.print(
            f"{len(report.stale):,} of {len(report.copies):,} copies are [red]stale[/red]: the first optimizer step "
            "would write them over the loaded model."
        )

    def _sync(self) -> None:
        self._title("Every copy is refreshed from the model's BF16 weights, and audited again")
        report = self._plan.run()
        self.found["sync"] = report.to_dict()
        self._console.print(_sync_table(report))
        audit = self._audit("audit_after_sync")
        if any(copy.state != "exact" for copy in audit.copies):
            raise CommandError("after a sync every copy ought to be exact")
        self._console.print("Every copy is the widened weight, [green]bit for bit[/green].")

    def _break_one(self) -> WeightCopies:
        """Break one clone, and move another as training would; returns the broken weight's entry."""
        entries = [entry for entry in self._plan.copies if entry.source.numel() > 1000]
        broken, trained = entries[len(entries) // 2], entries[0]
        level, copy = broken.levels[-1]
        index = copy.numel() // 3
        flat = copy.view(-1)
        before = float(flat[index])
        flat[index] += 0.5
        self._title("One clone is broken on purpose, and another is moved as an optimizer step moves it")
        self._console.print(
            f"broken: element {index:,} of {broken.name}, level {level}: {before:.6f} became {float(flat[index]):.6f}"
        )
        trained_level, master = trained.levels[-1]
        # Less than BF16 resolves: its values are 2^-8 apart, relative to their size, or more.
        master.mul_(1 + 2**-12)
        self._console.print(
            f"moved:  all of {trained.name}, level {trained_level}, by a 4096th: more precise than the model, not wrong"
        )
        self.found["broken"] = {"name": broken.name, "level": level, "index": index}
        self.found["trained"] = {"name": trained.name, "level": trained_level}
        return broken

    def _audit_names_it(self, broken: WeightCopies) -> None:
        report = self._audit("audit_of_broken")
        self._console.print(_list_table(report))
        if [copy.name for copy in report.stale] != [broken.name]:
            raise CommandError(f"the audit ought to name {broken.name} and nothing else as stale")
        self._console.print(f"The audit names it: [red]{broken.name}[/red].")

    def _repair(self, broken: WeightCopies) -> None:
        self._title("What is stale is repaired; what is merely more precise keeps its bits (ensure_master_weights)")
        repairs = self._mend()
        self.found["repairs"] = [repair._asdict() for repair in repairs]
        rows = table(("rewritten", "level", "was", "from"), text_columns=4)
        for repair in repairs:
            rows.add_row(repair.name, str(repair.level), repair.was, repair.source)
        self._console.print(rows)
        audit = self._audit("audit_after_repair")
        if broken.name not in {repair.name for repair in repairs} or not audit.ok:
            raise CommandError(f"the repair ought to have rewritten {broken.name}")
        self._console.print("[green]Nothing is stale.[/green]")

    def _compare(self) -> None:
        self._title("The same refresh, tensor by tensor as trainers do it today, and by the plan")
        elements = sum(entry.source.numel() for entry in self._plan.copies)
        today, ours = [], []
        for _ in range(_REPEATS):
            today.append(sum(per_tensor.refresh(self._plan.copies, self._device).values()))
            ours.append(seconds_of(self._plan.run, self._device)[0])
        one, other = statistics.median(today), statistics.median(ours)
        rows = table(("way", "time", "G elements/s", "faster"))
        rows.add_row("per tensor", duration(one), f"{elements / one / 1e9:.2f}", "1")
        rows.add_row("megasetup", duration(other), f"{elements / other / 1e9:.2f}", times(one / other))
        self._console.print(rows)
        self.found["comparison"] = {"per_tensor_seconds": today, "plan_seconds": ours, "times_faster": one / other}
        self._console.print(
            f"{amount(elements)} elements are little; `megasetup bench sync --shapes qwen2.5-7b` shows a model's size."
        )


def _audit_table(report: AuditReport) -> Any:
    rows = table(("audit", "exact", "consistent", "stale", "time"))
    for index, (level, states) in enumerate(report.counts().items()):
        stale = f"[red]{states['stale']:,}[/red]" if states["stale"] else "0"
        spent = duration(report.seconds) if index == 0 else ""
        rows.add_row(f"level {level}", f"{states['exact']:,}", f"{states['consistent']:,}", stale, spent)
    return rows


def _list_table(report: AuditReport) -> Any:
    rows = table(("copy", "level", "state", "differ", "of", "first at"), text_columns=3)
    others = [copy for copy in report.copies if copy.state == "consistent"]
    for copy in _first(report.stale, others):
        # A consistent copy differs in bits but not in value as BF16 sees it.
        differ = copy.rounded_differences or copy.exact_differences
        rows.add_row(
            copy.name, str(copy.level), copy.state, f"{differ:,}", f"{copy.elements:,}", f"{copy.first_index:,}"
        )
    return rows


def _first(*groups: Sequence[Any]) -> list[Any]:
    return [copy for group in groups for copy in group][:_LISTED]


def _sync_table(report: SyncReport) -> Any:
    rows = table(("sync", "copies", "elements", "written", "time", "bandwidth", "of the wire"))
    for level in report.levels:
        rows.add_row(
            f"level {level.level}",
            f"{level.tensors:,}",
            amount(level.elements),
            f"{level.bytes / 1e6:.1f} MB",
            duration(level.seconds),
            bandwidth(level.bandwidth),
            percent(level.wire_share),
        )
    return rows
