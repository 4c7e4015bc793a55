"""The demo from the models on disk to the last comparison, and what is left behind in the folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from megasetup.cli import machine
from megasetup.cli import plan as planning
from megasetup.cli.console import amount, table
from megasetup.cli.demo import imported, model, plot, policy, shards
from megasetup.cli.demo.story import Story
from megasetup.cli.errors import CommandError
from megasetup.compat import transformer_engine
from megasetup.masters import Repair, SyncPlan, WeightCopies, ensure_master_weights, plan_sync

_RANK, _RANKS = 1, 4
_LISTED = 5
_STEPS = 3
# A model that was taught its batch stays below, and one that was lost is far above.
_KEPT_BELOW, _LOST_ABOVE = 0.1, 1.0


def run(console: Console, out: Path, device: torch.device) -> None:
    """`megasetup demo`; see app.py for the options.

    Raises:
        CommandError: a package is missing, or a step did not show what it ought to.
    """
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    demo = _Demo(console, out.resolve(), device)
    with imported.converted_in(demo.out / "converted"):
        demo.tell()
    file = out / "demo.json"
    file.write_text(json.dumps({"environment": machine.environment(), **demo.found}, indent=1) + "\n")
    console.print(f"\nAll of this as data: {escape(str(file))}", soft_wrap=True)


@dataclass
class _Demo:
    console: Console
    out: Path
    device: torch.device
    kinds: tuple[str, ...] = ("dense", "moe")
    found: dict[str, Any] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    checkpoints: dict[str, Path] = field(default_factory=dict)
    _step: int = 1

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def tell(self) -> None:
        if self._on_gpu and not transformer_engine.is_installed():
            self.kinds = ("dense",)
            self.console.print(
                "Transformer Engine is not installed, which a model with experts needs to train: no MoE.\n"
            )
        self._make()
        self._convert()
        self._check_and_plan()
        if self._on_gpu:
            self._train()
            self._story_on_gpu()
        else:
            self._story_on_cpu()

    def _title(self, text: str) -> None:
        self.console.print(f"{'' if self._step == 1 else chr(10)}[bold]{self._step}. {text}[/bold]")
        self._step += 1

    def _make(self) -> None:
        taught = " and taught one batch" if self._on_gpu else ""
        self._title(f"Small Hugging Face models, made on the spot{taught}")
        for kind in self.kinds:
            made = model.build(kind)
            count = sum(weight.numel() for weight in made.parameters())
            said = f"{kind}: {type(made).__name__}, {amount(count)} parameters"
            if self._on_gpu:
                made = made.to(self.device)
                steps, loss = model.teach(made, self.device)
                self.found.setdefault("taught", {})[kind] = {"steps": steps, "loss": loss}
                said += f", taught in {steps} steps: loss {loss:.4f}"
            folder = self.out / kind
            model.save(made, folder)
            self.policies[kind] = policy.write(folder, self.out / f"{kind}.yaml")
            self.console.print(f"{said}; {escape(str(folder))}", soft_wrap=True)

    def _convert(self) -> None:
        self._title("Imported to Megatron, as a trainer's first run does")
        with contextlib.ExitStack() as stack:
            if self._on_gpu:
                from megasetup.cli.demo import training

                stack.enter_context(training.one_rank(self.policies[self.kinds[0]], self.device))
            for kind, config in self.policies.items():
                # A demo before this one may have left the checkpoint of a model that was taught something else.
                again = {**config, "megatron_cfg": {**config["megatron_cfg"], "force_reconvert_from_hf": True}}
                self.checkpoints[kind] = imported.convert(self.console, kind, again)

    def _check_and_plan(self) -> None:
        self._title("The configs checked, and a run planned (megasetup check, megasetup plan)")
        self.found["check"] = {
            kind: imported.check(self.console, kind, self.out / f"{kind}.yaml") for kind in self.kinds
        }
        kind = self.kinds[-1]
        self.console.print(f"\n{kind} on {_RANKS} GPUs:")
        fits = planning.run(
            self.console,
            self.out / f"{kind}.yaml",
            (),
            gpus=_RANKS,
            nodes=None,
            gpu_memory=None,
            host_memory=None,
            measure=False,
            json_file=None,
        )
        if not fits:
            raise CommandError("a model this small ought to fit")

    def _train(self) -> None:
        from megasetup.cli.demo import training

        losses: dict[str, dict[str, list[float]]] = {}
        for kind in self.kinds:
            self._title(f"{kind}: set up and trained without the refresh, then with it")
            stock = policy.write(self.out / kind, self.out / f"{kind}-without.yaml", fast=False)
            with training.one_rank(stock, self.device):
                setup = training.set_up(stock, refresh=False)
                audit = training.audit(setup)
                counted = f"{len(audit.stale):,} of {len(audit.copies):,} FP32 copies"
                self.console.print(f"without: after the load {counted} are [red]stale[/red]\n")
                without = training.train(setup, self.device, _STEPS)
                del setup
            with training.one_rank(self.policies[kind], self.device):
                setup = training.set_up(self.policies[kind], refresh=True)
                report = setup.report
                self.console.print(str(report), markup=False, soft_wrap=True)
                losses[kind] = {"without": without, "with": training.train(setup, self.device, _STEPS)}
                del setup
            self.found.setdefault("setup", {})[kind] = report.to_dict()
            self._show_losses(losses[kind])
        self.found["losses"] = losses
        if plot.draw(losses, self.out / "losses.png"):
            self.console.print(f"Drawn: {escape(str(self.out / 'losses.png'))}", soft_wrap=True)
        for kind, ways in losses.items():
            if max(ways["with"]) > _KEPT_BELOW or ways["without"][0] > _KEPT_BELOW:
                raise CommandError(f"{kind}: the loss ought to stay that of the taught model: {ways}")
            if max(ways["without"]) < _LOST_ABOVE:
                raise CommandError(f"{kind}: without the refresh the model ought to be lost: {ways}")

    def _show_losses(self, ways: dict[str, list[float]]) -> None:
        rows = table(("loss", *(f"step {step}" for step in range(1, _STEPS + 1)), "after"))
        for way, colour in (("without", "red"), ("with", "green")):
            first, *rest = (f"{loss:.4f}" for loss in ways[way])
            rows.add_row(f"{way} the refresh", first, *(f"[{colour}]{loss}[/{colour}]" for loss in rest))
        self.console.print(rows)

    def _story_on_gpu(self) -> None:
        from megasetup.cli.demo import training

        kind = self.kinds[0]
        config = policy.write(self.out / kind, self.out / f"{kind}-without.yaml", fast=False)
        with training.one_rank(config, self.device):
            setup = training.set_up(config, refresh=False)
            plan = plan_sync(setup.optimizer, [setup.model])
            copies = sum(len(entry.levels) for entry in plan.copies)
            self.console.print(
                f"\n{torch.cuda.get_device_name(self.device)}: the {kind} model once more without the refresh: "
                f"{len(plan.copies)} weights with {copies} copies"
            )

            def repair() -> Sequence[Repair]:
                return ensure_master_weights(setup.optimizer, [setup.model]).repairs

            self._tell_story(plan, repair)

    def _story_on_cpu(self) -> None:
        self._title(f"What data-parallel rank {_RANK} of {_RANKS} holds of the imported weights")
        weights = imported.weights_of(self.checkpoints["dense"])
        held = shards.hold(weights, _RANK, _RANKS)
        self._show_shards(weights, held)
        self.console.print(
            "No GPU is used here, so the copies are CPU tensors, and the demo ends where Megatron's training begins."
        )
        plan = SyncPlan.from_copies(held)
        self._tell_story(plan, lambda: shards.repair_stale(plan))

    def _tell_story(self, plan: SyncPlan, repair: Any) -> None:
        story = Story(self.console, plan, repair, self.device, first_step=self._step)
        story.tell()
        self.found |= story.found

    def _show_shards(self, weights: dict[str, torch.Tensor], held: list[WeightCopies]) -> None:
        parts = [entry for entry in held if entry.source.numel() < weights[entry.name].numel()]
        others = [entry for entry in held if entry.source.numel() == weights[entry.name].numel()]
        rows = table(("weight", "elements held", "of", "from"))
        for entry in [*parts, *others][:_LISTED]:
            count = weights[entry.name].numel()
            rows.add_row(entry.name, f"{entry.source.numel():,}", f"{count:,}", f"{entry.offset:,}")
        rows.add_row("...", "", "", "")
        rest = len(weights) - len(held)
        self.console.print(f"{len(others)} weights whole, {len(parts)} in part, {rest} not at all:")
        self.console.print(rows)
