"""From nothing to the story: the model on disk, its shards or optimizers, and what is left behind in the folder."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megasetup.cli import machine
from megasetup.cli.console import amount, gigabytes, table
from megasetup.cli.demo import model, shards
from megasetup.cli.demo.story import Story
from megasetup.masters import Repair, SyncPlan, WeightCopies, ensure_master_weights, plan_sync

_RANK, _RANKS = 1, 4
_LISTED = 5


def run(console: Console, out: Path, device: torch.device) -> None:
    """`megasetup demo`; see app.py for the options.

    Raises:
        CommandError: a package is missing, or a step did not show what it ought to.
    """
    torch.manual_seed(0)
    folder = out / "model"
    console.print("[bold]1. A small Hugging Face model, made on the spot[/bold]")
    model.save(folder, seed=0)
    weights = model.load(folder)
    total = sum(weight.numel() for weight in weights.values())
    size = gigabytes(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    console.print(f"{folder}: Qwen3, {len(weights)} tensors, {amount(total)} parameters, {size} of safetensors")
    found = _on_gpu(console, folder, device) if device.type == "cuda" else _on_cpu(console, weights)
    file = out / "demo.json"
    file.write_text(json.dumps({"environment": machine.environment(), **found}, indent=1) + "\n")
    console.print(f"\nAll of this as data: {file}")


def _on_cpu(console: Console, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    held = shards.hold(weights, _RANK, _RANKS)
    console.print(f"\n[bold]2. What data-parallel rank {_RANK} of {_RANKS} holds of it[/bold]")
    _show_shards(console, weights, held)
    console.print("No GPU is usable here, so the copies are CPU tensors; on a GPU this uses Megatron's own optimizers.")
    plan = SyncPlan.from_copies(held)
    story = Story(console, plan, lambda: shards.repair_stale(plan), torch.device("cpu"), first_step=3)
    story.tell()
    return story.found


def _on_gpu(console: Console, folder: Path, device: torch.device) -> dict[str, Any]:
    # Megatron's advice on settings that do not matter here would bury the tables.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megasetup.cli.demo import megatron

        with megatron.loaded(folder, device) as setup:
            plan = plan_sync(setup.optimizer, [setup.chunk])
            console.print("\n[bold]2. Real Megatron optimizers around it[/bold]")
            copies = sum(len(entry.levels) for entry in plan.copies)
            console.print(
                f"{torch.cuda.get_device_name(device)}: DistributedOptimizer over HybridDeviceOptimizer, everything "
                f"offloaded, {len(plan.copies)} weights with {copies} copies"
            )

            def repair() -> Sequence[Repair]:
                return ensure_master_weights(setup.optimizer, [setup.chunk]).repairs

            story = Story(console, plan, repair, device, first_step=3)
            story.tell()
    return story.found


def _show_shards(console: Console, weights: dict[str, torch.Tensor], held: list[WeightCopies]) -> None:
    parts = [entry for entry in held if entry.source.numel() < weights[entry.name].numel()]
    others = [entry for entry in held if entry.source.numel() == weights[entry.name].numel()]
    rows = table(("weight", "elements held", "of", "from"))
    for entry in [*parts, *others][:_LISTED]:
        count = weights[entry.name].numel()
        rows.add_row(entry.name, f"{entry.source.numel():,}", f"{count:,}", f"{entry.offset:,}")
    rows.add_row("...", "", "", "")
    console.print(f"{len(others)} weights whole, {len(parts)} in part, {len(weights) - len(held)} not at all:")
    console.print(rows)
