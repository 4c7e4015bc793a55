"""`megasetup plan`: what a run will hold on each GPU and node, whether it fits, and how long a sync takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape

from megasetup import host
from megasetup.cli import machine
from megasetup.cli.bench import host as bench_host
from megasetup.cli.configs import load, policy_of, quiet_libraries
from megasetup.cli.console import amount, duration, facts, gigabytes, steps, table, title
from megasetup.cli.errors import CommandError
from megasetup.cli.output import write_json
from megasetup.cli.wire import measure_device_copy, measure_wire
from megasetup.planning import Limits, PlanningError, RankPlan, Rates, RunPlan, plan_policy
from megasetup.planning.memory import Where

if TYPE_CHECKING:
    from megasetup.config.load import Loaded

_NOT_COUNTED = (
    "Not counted: activations, the CUDA context (about 0.5 GB), NCCL's and cuBLAS's buffers, what the allocator cannot "
    "use for fragmentation, and on the host the processes themselves."
)
# More than any cache, and quick.
_WIDEN_ELEMENTS = 128_000_000


def run(
    console: Console,
    path: Path,
    overrides: Sequence[str],
    *,
    gpus: int,
    nodes: int | None,
    gpu_memory: float | None,
    host_memory: float | None,
    measure: bool,
    json_file: Path | None,
) -> bool:
    """Plan, print, and write JSON. Says whether the run fits.

    Raises:
        CommandError: the config is wrong, or cannot be planned.
    """
    loaded = _examined(path, overrides)
    limits, rates = _limits(gpu_memory, host_memory), measured_rates() if measure else Rates()
    plan = _plan(loaded, path, gpus, nodes, limits, rates)
    show(console, plan)
    if json_file is not None:
        asked = {"config": str(path), "overrides": list(overrides), "environment": machine.environment()}
        write_json(json_file, {**asked, **plan.to_dict()})
        console.print(f"Written: {escape(str(json_file))}")
    return plan.fits


def _examined(path: Path, overrides: Sequence[str]) -> Loaded:
    """The config, read and found right as far as it can be judged by itself."""
    from megasetup.config.errors import ConfigError
    from megasetup.config.validate import examine_file

    try:
        loaded = load(path, overrides)
        examine_file(loaded.config, locate=loaded.located).raise_any()
    except (ConfigError, OSError) as error:
        raise CommandError(str(error)) from error
    return loaded


def _plan(loaded: Loaded, path: Path, gpus: int, nodes: int | None, limits: Limits, rates: Rates) -> RunPlan:
    from megasetup.config.errors import ConfigError

    policy = policy_of(loaded.config, path)
    try:
        with quiet_libraries():
            return plan_policy(policy, gpus=gpus, nodes=nodes, limits=limits, rates=rates)
    except ImportError as error:
        raise CommandError(f"a plan needs megatron-core and megatron-bridge: {error}") from error
    except ConfigError as error:
        raise CommandError(str(type(error)(*map(loaded.located, error.problems)))) from error
    except (PlanningError, OSError, ValueError) as error:
        raise CommandError("\n".join([str(error), *getattr(error, "__notes__", ())])) from error


def _limits(gpu_memory: float | None, host_memory: float | None) -> Limits:
    """What the options say, else this machine where it has a GPU, else a DGX H200."""
    limits = Limits()
    found = machine.gpus()
    if found:
        limits = Limits(
            min(gpu.memory for gpu in found), host.memory().total, f"this machine: {found[0].name}, its host's memory"
        )
    given: list[str] = []
    if gpu_memory is not None:
        limits = replace(limits, gpu=int(gpu_memory * 1e9))
        given.append("--gpu-memory")
    if host_memory is not None:
        limits = replace(limits, host=int(host_memory * 1e9))
        given.append("--host-memory")
    if not given:
        return limits
    source = " and ".join(given)
    return replace(limits, source=source if len(given) == 2 else f"{source}, else {limits.source}")


def measured_rates() -> Rates:
    """What bounds a sync on this machine: its wire and its GPU's memory, where it has one, and its cores.

    Raises:
        CommandError: the memory that measuring needs is not there.
    """
    cores = machine.allowed_cores()
    with steps(bench_host.FUNCTIONS) as progress:
        timed = bench_host.measure(_WIDEN_ELEMENTS, [cores], 3, progress)
    widen = next(result for result in timed if result["function"] == "widen")["megasetup"]["median_seconds"]
    rates = Rates(host=_WIDEN_ELEMENTS / widen, source=f"measured here: {cores} cores widen from memory to memory")
    if not torch.cuda.is_available():
        return replace(rates, source=f"{rates.source}; no GPU here, so wire and GPU as on an H200")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        wire, copied = measure_wire(device), measure_device_copy(device)
    except RuntimeError as error:
        raise CommandError(f"--measure cannot measure the wire: {error}. Free memory, or leave it out") from error
    return replace(rates, wire=wire.device_to_host, device=copied, source=f"{rates.source}; wire and GPU too")


def show(console: Console, plan: RunPlan) -> None:
    """Print the plan."""
    _show_run(console, plan)
    _show_stages(console, plan)
    _show_rank(console, plan.heaviest)
    _show_verdict(console, plan)


def _show_run(console: Console, plan: RunPlan) -> None:
    sizes, optimizer = plan.sizes, plan.optimizer
    title(console, "Run")
    rows = facts()
    rows.add_row("parameters", f"{plan.parameters:,} ({amount(plan.parameters)})")
    nodes = "1 node" if len(plan.nodes) == 1 else f"{len(plan.nodes)} nodes, {plan.nodes[0].ranks} each"
    rows.add_row("GPUs", f"{sizes.gpus} on {nodes}")
    split = f"tensor {sizes.tensor}, pipeline {sizes.pipeline}, context {sizes.context}, data {sizes.data}"
    rows.add_row("split", split + (f", virtual {sizes.virtual}" if sizes.virtual else ""))
    if sizes.expert > 1 or sizes.expert_tensor != sizes.tensor:
        rows.add_row("experts' split", f"expert {sizes.expert}, tensor {sizes.expert_tensor}, data {sizes.expert_data}")
    mode = "precision-aware" if optimizer.precision_aware else "standard"
    where = f"{optimizer.fraction:.0%} offloaded" if optimizer.offload else "on the GPU"
    rows.add_row("optimizer", f"{mode}, {where}")
    console.print(rows)
    console.print()


def _show_stages(console: Console, plan: RunPlan) -> None:
    stages = plan.heaviest_of_stages()
    if len(stages) == 1:
        return
    title(console, "Pipeline stages, each by its heaviest rank")
    rows = table(["stage", "rank", "parameters", "GPU", "host", "of it pinned", "sync"])
    for rank in stages:
        rows.add_row(
            str(rank.place.stage),
            str(rank.place.rank),
            amount(rank.parameters),
            gigabytes(rank.gpu),
            gigabytes(rank.host),
            gigabytes(rank.pinned),
            duration(rank.sync.seconds),
        )
    console.print(rows)


def _show_rank(console: Console, rank: RankPlan) -> None:
    place = rank.place
    where = f"stage {place.stage}, tensor {place.tensor}, expert {place.expert}, data shard {place.shard}"
    title(console, f"Heaviest rank: {place.rank} ({where}; node {rank.node})")
    rows = table(["item", "GPU", "host, pinned", "host, pageable"])
    names = list(dict.fromkeys(item.name for item in rank.items))
    places: tuple[Where, ...] = ("GPU", "host, pinned", "host")
    sizes = {(item.name, item.where): item.bytes for item in rank.items}
    for name in names:
        rows.add_row(name, *(gigabytes(sizes[name, spot]) if (name, spot) in sizes else "" for spot in places))
    rows.add_section()
    rows.add_row("all", gigabytes(rank.gpu), gigabytes(rank.pinned), gigabytes(rank.host - rank.pinned))
    console.print(rows)


def _show_verdict(console: Console, plan: RunPlan) -> None:
    node, sync, limits = plan.heaviest_node, plan.slowest_sync, plan.limits
    title(console, "Does it fit")
    rows = facts()
    rows.add_row("GPU", _share(plan.heaviest.gpu, limits.gpu, plan.fits_gpu, "for activations and the rest"))
    rows.add_row(
        f"node {node.node}, {node.ranks} ranks", _share(node.host, limits.host, plan.fits_host, "of host memory")
    )
    rows.add_row("held against", escape(limits.source))
    if sync.bound:
        bound = {"wire": "the wire", "host": "the host's cores and memory", "device": "the GPU's memory"}[sync.bound]
        rows.add_row("sync of every copy", f"{duration(sync.seconds)}, bound by {bound}")
        rows.add_row("by rates", f"{escape(plan.rates.source)}")
    console.print(rows)
    for note in (*plan.notes, _NOT_COUNTED):
        console.print(f"[dim]{escape(note)}[/dim]")


def _share(used: int, there: int, fits: bool, what: str) -> str:
    if fits:
        return f"[green]yes[/green]: {gigabytes(used)} of {gigabytes(there)}, {gigabytes(there - used)} left {what}"
    return f"[red]NO[/red]: {gigabytes(used)} of {gigabytes(there)}, {gigabytes(used - there)} too much"
