"""What `megasetup check` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from megasetup.cli.check import Check, ModelCheck
from megasetup.cli.console import facts, table, title
from megasetup.cli.differences import Difference

_PARTS = {
    "model": "the model",
    "optimizer": "the optimizer",
    "ddp": "data parallelism",
    "checkpoint": "checkpoints",
    "scheduler": "the scheduler",
}


def show(check: Check, console: Console) -> None:
    """Print what was found."""
    if check.problems:
        title(console, f"{len(check.problems)} problem{'s' if len(check.problems) > 1 else ''}")
        _show_lines(check.problems, "red", console)
    if check.warnings:
        title(console, "Warnings")
        _show_lines(check.warnings, "yellow", console)
    if check.ok:
        for model in check.models:
            _show_model(model, console)
        console.print("[bold green]Nothing is wrong.[/bold green]")
    for remark in check.remarks:
        console.print(f"[dim]{escape(remark)}[/dim]")


def _show_lines(lines: Sequence[str], colour: str, console: Console) -> None:
    for line in lines:
        console.print(f"  [{colour}]-[/{colour}] {escape(line)}", soft_wrap=True)
    console.print()


def _show_model(model: ModelCheck, console: Console) -> None:
    title(console, f"{model.name}: what will happen")
    for number, step in enumerate(model.steps, start=1):
        console.print(f"  {number}. {escape(step)}", soft_wrap=True)
    console.print()
    if model.flows:
        title(console, f"{model.name}: optional flows that are on")
        for flow in model.flows:
            console.print(f"  - {escape(flow)}", soft_wrap=True)
        console.print()
    title(console, f"{model.name}: what the setup works out")
    rows = facts()
    for name, value in model.facts.items():
        rows.add_row(name, escape(_text(value)))
    console.print(rows)
    console.print()
    for part, changed in model.settings.items():
        _show_settings(f"{model.name}: settings of {_PARTS[part]} that differ from its defaults", changed, console)


def _show_settings(heading: str, changed: Sequence[Difference], console: Console) -> None:
    title(console, heading)
    if not changed:
        console.print("  none\n")
        return
    rows = table(["setting", "default", "here"], text_columns=3)
    for row in changed:
        rows.add_row(row.field, escape(_text(row.default)), escape(_text(row.value)))
    console.print(rows)


def _text(value: Any) -> str:
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)
