"""From options to results: what the three benchmark commands share, and how they end.

Every command resolves its options, runs its measurement, prints tables, writes JSON with the environment it ran in, and
fails when a value was wrong.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megasetup import kernels
from megasetup.cli import machine, shapes
from megasetup.cli.bench import expert_bias, host, pinning, plot, ranks, step, sync, tables
from megasetup.cli.bench.workload import LEVELS
from megasetup.cli.console import steps
from megasetup.cli.errors import CommandError
from megasetup.cli.output import write_json


def resolve_device(name: str | None) -> torch.device:
    """The device asked for, or a GPU if there is one.

    Raises:
        CommandError: no such device here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CommandError(f"--device {name!r} is no device: use cuda, cuda:1 or cpu") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise CommandError("--device cuda: no GPU is usable here (see `megasetup doctor`); use --device cpu")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.type != "cpu":
        raise CommandError(f"--device {name!r} is not supported: use cuda, cuda:1 or cpu")
    return device


def _numbers(option: str, text: str | None) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise CommandError(f"{option} {text!r}: give whole numbers with commas between, as in 1,2") from error
    if any(number < 1 for number in numbers):
        raise CommandError(f"{option} {text!r}: every number must be at least 1")
    return numbers


def _modes(mode: str) -> list[str]:
    if mode == "both":
        return list(LEVELS)
    if mode not in LEVELS:
        raise CommandError(f"--mode {mode!r}: choose from {', '.join(LEVELS)}, both")
    return [mode]


def _shape_sets(names: str, folder: Path | None, scale: float) -> list[shapes.Shapes]:
    try:
        if folder is not None:
            return [shapes.of_safetensors(folder)]
        return [shapes.named(name.strip(), scale) for name in names.split(",")]
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error


def _write(benchmark: str, data: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        write_json(json_file, {"benchmark": benchmark, "environment": machine.environment(), **data})


def _finish(benchmark: str, data: dict[str, Any], verified: bool, json_file: Path | None, console: Console) -> None:
    _write(benchmark, data, json_file)
    if json_file is not None:
        console.print(f"Written: {json_file}")
    if not verified:
        raise CommandError("values were wrong (see above): the timings count for nothing")


def run_sync(
    console: Console,
    *,
    shape_names: str,
    folder: Path | None,
    scale: float,
    mode: str,
    levels: str | None,
    threads: str | None,
    repeat: int,
    baseline_repeat: int,
    rank_count: int,
    device_name: str | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """`bench sync`; see app.py for the options.

    Raises:
        CommandError: an option that cannot be followed, missing memory or packages, or wrong values.
    """
    if plot_file is not None:
        plot.check(plot_file)
    device, sets, modes = resolve_device(device_name), _shape_sets(shape_names, folder, scale), _modes(mode)
    thread_counts = _numbers("--threads", threads)
    if rank_count > 1:
        if len(sets) > 1 or len(modes) > 1 or len(thread_counts) > 1 or folder or levels or plot_file:
            raise CommandError(
                "--ranks takes one named shape set, one mode and at most one --threads, and neither --levels, "
                "--safetensors nor --plot"
            )
        wanted = thread_counts[0] if thread_counts else None
        found = ranks.measure(ranks.Options(sets[0], modes[0], wanted, repeat, device.type, rank_count))
        tables.show_ranks(found, console)
        _finish("sync, several ranks", found, found["verified"], json_file, console)
        return
    options = sync.Options(
        shapes=sets,
        folder=folder,
        modes=modes,
        levels=_numbers("--levels", levels) or None,
        threads=thread_counts,
        repeat=repeat,
        baseline_repeat=baseline_repeat,
        device=device,
    )
    for one in modes:
        if not options.levels_of(one):
            possible = ",".join(map(str, LEVELS[one]))
            raise CommandError(f"--levels {levels}: {one} mode has levels {possible}")
    with steps(options.steps) as progress:
        found = sync.measure(options, progress)
    tables.show_sync(found, console)
    _finish("sync", found, all(result["verified"] for result in found["results"]), json_file, console)
    if plot_file is not None:  # after the figures are safe
        plot.draw(found, plot_file)
        console.print(f"Drawn: {plot_file}")


def run_step(
    console: Console,
    *,
    shape_name: str,
    scale: float,
    mode: str,
    overlap: str,
    fraction: float,
    step_count: int,
    device_name: str | None,
    json_file: Path | None,
) -> None:
    """`bench step`.

    Raises:
        CommandError: no GPU, no Megatron, options that make no sense, or a measurement that failed or differs.
    """
    (chosen,) = _shape_sets(shape_name.replace(",", " "), None, scale)
    overlaps = {"both": [False, True], "yes": [True], "no": [False]}.get(overlap)
    if overlaps is None:
        raise CommandError(f"--overlap {overlap!r}: choose from yes, no, both")
    modes = _modes(mode)
    if importlib.util.find_spec("megatron") is None:
        raise CommandError("bench step times Megatron's optimizer and megatron-core is not installed")
    device = resolve_device(device_name)
    if device.type != "cuda":
        raise CommandError("bench step needs a GPU: the hybrid optimizer moves values between it and the host")
    options = step.Options(chosen, modes, overlaps, fraction, step_count, device)

    def report(known: dict[str, Any]) -> None:
        # A run of minutes that is cut off has shown and written what it had measured.
        tables.show_latest_step(known, console)
        _write("step", known, json_file)

    with steps(2 * len(options.pairs) + 2) as progress:
        found = step.measure(options, progress, report)
    tables.show_step(found, console)
    _finish("step", found, found["verified"], json_file, console)


def run_expert_bias(
    console: Console, *, routers: int, experts: int, repeat: int, device_name: str | None, json_file: Path | None
) -> None:
    """`bench expert-bias`.

    Raises:
        CommandError: no such device, or wrong values.
    """
    found = expert_bias.measure(routers, experts, repeat, resolve_device(device_name))
    tables.show_expert_bias(found, console)
    _finish("expert-bias", found, found["verified"], json_file, console)


def run_host(
    console: Console,
    *,
    elements: int,
    threads: str | None,
    repeat: int,
    pin_bytes: int,
    pin_shapes: str,
    pin_shards: int,
    json_file: Path | None,
) -> None:
    """`bench host`.

    Raises:
        CommandError: not enough memory, memory that cannot be pinned, or wrong values.
    """
    counts = _numbers("--threads", threads) or [kernels.get_num_threads()]
    (shards_of,) = _shape_sets(pin_shapes, None, 1.0)
    sizes = {
        "one block": [pin_bytes // 4],
        f"{shards_of.name}, one of {pin_shards} shards": pinning.shard_elements(shards_of, pin_shards),
    }
    pinned = []
    with steps(len(counts) * host.FUNCTIONS + len(sizes)) as progress:
        results = host.measure(elements, counts, repeat, progress)
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            for name, wanted in sizes.items():
                progress.next(f"pinning {name}")
                pinned.append({"name": name, **pinning.measure(wanted, device)})
    verified = all(result.pop("verified", True) for result in results)
    found = {
        "elements": elements,
        "instruction_set": kernels.native_status().cpu_instruction_set,
        "results": results,
        "pinning": pinned,
        "verified": verified,
    }
    tables.show_host(found, console)
    _finish("host", found, verified, json_file, console)
