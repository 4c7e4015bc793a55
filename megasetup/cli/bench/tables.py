"""What the benchmarks print: the JSON's figures as tables a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from megasetup.cli.console import amount, bandwidth, duration, facts, gigabytes, percent, rate, table, times, title


def show_sync(data: dict[str, Any], console: Console) -> None:
    """Tables of `bench sync`."""
    for result in data["results"]:
        label = f"{result['shapes']}, {result['mode']}"
        title(console, f"{label}: {result['tensors']:,} tensors, {amount(result['parameters'])} elements")
        rows = table(("way", "time", "G elements/s", "faster", "of the BF16 wire", "copies"))
        way = result["per_tensor"]
        if way is not None:
            right = _verdict(result["wrong"].get("per-tensor", []))
            rows.add_row(
                "per tensor", duration(way["median_seconds"]), rate(way["elements_per_second"]), "1", "-", right
            )
        for way in result["plan"]:
            rows.add_row(
                f"megasetup, {_threads(way['threads'])}",
                duration(way["median_seconds"]),
                rate(way["elements_per_second"]),
                times(way["times_faster_than_per_tensor"]),
                percent(way["share_of_bf16_limit"]),
                _verdict(result["wrong"][f"plan, {way['threads']} threads"]),
            )
        console.print(rows)
        _show_details(result, console)
    wire = data["limits"]["wire"]
    if wire is not None:
        title(console, "Limits, measured in this run")
        limits = facts()
        limits.add_row("wire to the host", bandwidth(wire["device_to_host_bytes_per_second"]))
        limits.add_row("wire to the GPU", bandwidth(wire["host_to_device_bytes_per_second"]))
        bf16 = data["limits"]["bf16_limit_elements_per_second"]
        limits.add_row("  BF16 over the wire", f"{rate(bf16)} G elements/s")
        copied = data["limits"]["device_copy_bytes_per_second"]
        limits.add_row("copy within the GPU", f"{bandwidth(copied)}, read and written")
        console.print(limits)


def _show_details(result: dict[str, Any], console: Console) -> None:
    rows = facts()
    if result["per_tensor"] is not None:
        spent = result["per_tensor"]["median_run_seconds_by_level"]
        parts = [f"level {level} {duration(taken)}" for level, taken in spent.items()]
        rows.add_row("per tensor", " + ".join(parts))
    rows.add_row(
        "plan", f"made in {duration(result['planning_seconds'])}; its first run {duration(result['first_run_seconds'])}"
    )
    report = result["plan"][0]["report"]
    if report["wire_bytes"]:
        crossed = report["staged_elements"] + report["direct_elements"]
        rows.add_row(
            "over the wire",
            f"{gigabytes(report['wire_bytes'])}: {report['staged_elements'] / crossed:.0%} of the elements as BF16, "
            f"widened by the CPU; {report['direct_elements'] / crossed:.0%} as FP32",
        )
    audit = result["audit"]
    rows.add_row(
        "audit",
        f"{duration(audit['median_seconds'])}, {percent(audit['share_of_sync_time'])} of the sync; "
        f"{audit['reading_threads']} CPU threads read",
    )
    alone = result["level_1_alone"]
    if alone is not None:
        share = alone["share_of_device_copy"]
        of_copy = "" if share is None else f", {percent(share)} of a copy within the GPU"
        rows.add_row(
            "level 1 alone",
            f"{duration(alone['median_seconds'])}, {bandwidth(alone['bytes_per_second'])}{of_copy}",
        )
    relative = result["throughput_relative_to_first_shapes"]
    if relative != 1.0:
        rows.add_row("throughput", f"{percent(relative)} of the first shape set's")
    console.print(rows)
    console.print()
    for way, names in result["wrong"].items():
        if names:
            more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
            console.print(f"[bold red]Wrong after {way}:[/bold red] {', '.join(names[:5])}{more}")


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _verdict(wrong: Sequence[str]) -> str:
    return f"[red]{len(wrong):,} wrong[/red]" if wrong else "exact"


def show_ranks(data: dict[str, Any], console: Console) -> None:
    """The table of `bench sync --ranks`."""
    label = f"{data['shapes']}, {data['mode']}"
    title(console, f"{label}: {len(data['ranks'])} ranks, {amount(data['parameters_per_rank'])} elements each")
    rows = table(("rank", "alone, G elements/s", "together, G elements/s", "CPU threads", "copies"))
    for answer in data["ranks"]:
        rows.add_row(
            f"{answer['rank']} ({answer['device']})",
            rate(answer["alone_elements_per_second"]),
            rate(answer["together_elements_per_second"]),
            str(answer["threads"]),
            _verdict(answer["wrong"]),
        )
    rows.add_section()
    rows.add_row("sum", "", rate(data["median_sum_elements_per_second"]), "", "")
    console.print(rows)
    console.print(
        f"Together {times(data['sum_over_one_alone'])} the rate of the faster rank alone, and "
        f"{data['share_of_host_writes']:.0%} of what the host's memory takes from all ranks at once "
        f"({rate(data['host_write_bandwidth'] / 4)} G FP32 elements/s written, nothing read)."
    )


def show_latest_step(data: dict[str, Any], console: Console) -> None:
    """One line about what `bench step` has measured last."""
    if not data["results"]:
        console.print(f"The CPU's Adam alone: {duration(data['adam_alone_seconds'])} a step.")
        return
    result = data["results"][-1]
    parts = [
        f"{result['way']}, {result['mode']}, {'with' if result['overlap'] else 'without'} overlap: "
        f"made in {duration(result['made_seconds'])}",
        f"{times(result['pinned_over_needed'])} pinned against needed",
    ]
    if result["step_seconds"]:
        parts.append(
            f"first step {duration(result['step_seconds'][0])}, later {duration(result['later_step_seconds'])}"
        )
    if "same_bits" in result:
        parts.append("same bits" if result["same_bits"] else "other bits")
    console.print("; ".join(parts), soft_wrap=True)


def show_step(data: dict[str, Any], console: Console) -> None:
    """The tables of `bench step`."""
    label = f"{data['shapes']}, fraction {data['fraction']:g}"
    title(console, f"{label}: {data['tensors']:,} tensors, {amount(data['parameters'])} elements")
    rows = table(
        ("mode", "overlap", "way", "made in", "pinned", "/ needed", "first step", "later", "/ Adam", "GPU", "host"),
        text_columns=3,
    )
    for result in data["results"]:
        steps = result["step_seconds"]
        rows.add_row(
            result["mode"],
            "yes" if result["overlap"] else "no",
            result["way"],
            duration(result["made_seconds"]),
            gigabytes(result["pinned_bytes"]),
            times(result["pinned_over_needed"]),
            duration(steps[0]) if steps else "-",
            duration(result["later_step_seconds"]) if steps else "-",
            times(result.get("step_over_adam_alone")),
            gigabytes(result["peak_gpu_bytes"]),
            gigabytes(result["peak_host_bytes"]),
        )
        if "same_bits" in result:
            rows.add_row(
                "",
                "",
                "[green]same bits[/green]" if result["same_bits"] else "[red]other bits[/red]",
                times(result["made_times_faster"]),
                times(result["pinned_times_less"]),
                "",
                times(result["first_over_later"]) if steps else "-",
                times(result["step_times_faster"]) if steps else "-",
                "",
                "",
                "",
                end_section=True,
            )
    console.print(rows)
    console.print(
        "Under each pair: how much faster ours is made and steps, how much less it pins, and its first step against a "
        "later one. Needed are the tensors in use that are pinned."
    )
    if data["adam_alone_seconds"] is not None:
        console.print(f"The CPU's Adam alone: {duration(data['adam_alone_seconds'])} a step.")


def show_expert_bias(data: dict[str, Any], console: Console) -> None:
    """The table of `bench expert-bias`."""
    title(
        console, f"Recasting {data['routers']} buffers of {data['experts']} BF16 elements to FP32 on {data['device']}"
    )
    rows = table(("way", "time", "faster", "values"))
    one, ours = data["one_to_each"], data["recast_buffers"]
    rows.add_row("one .to(float32) each", duration(one["median_seconds"]), "1", "")
    verdict = "exact" if data["verified"] else "[red]wrong[/red]"
    rows.add_row("megasetup", duration(ours["median_seconds"]), times(data["times_faster"]), verdict)
    console.print(rows)


def show_host(data: dict[str, Any], console: Console) -> None:
    """The tables of `bench host`."""
    title(console, f"CPU kernels on {amount(data['elements'])} elements, {data['instruction_set']}")
    rows = table(
        ("function", "threads", "megasetup, G elements/s", "torch, G elements/s", "faster", "of what memory takes")
    )
    for result in data["results"]:
        share = result.get("share_of_host_writes")
        rows.add_row(
            result["function"],
            str(result["threads"]),
            rate(result["megasetup"]["elements_per_second"]),
            rate(result["torch"]["elements_per_second"]),
            times(result["times_faster"]),
            "" if share is None else f"{share:.0%}",
        )
    console.print(rows)
    if not data["verified"]:
        console.print("[bold red]The kernels' values differ from torch's.[/bold red]")
    if not data["pinning"]:
        console.print("Pinning was not timed: no GPU is usable here.")
    for result in data["pinning"]:
        _show_pinning(result, console)


def _show_pinning(result: dict[str, Any], console: Console) -> None:
    needed = result["needed_bytes"]
    title(console, f"Pinning {gigabytes(needed)} in {result['tensors']:,} tensors: {result['name']}")
    rows = table(("way", "time", "faster", "pinned", "of what is needed", "machine has less"))
    ways = (("torch's allocator", "torch", "1"), ("one arena", "arena", times(result["times_faster"])))
    for label, name, faster in ways:
        way = result[name]
        rows.add_row(
            label,
            duration(min(way["seconds"])),
            faster,
            gigabytes(way["pinned_bytes"]),
            f"{way['pinned_bytes'] / needed:.2f}",
            gigabytes(max(0, way["machine_bytes"])),
        )
    console.print(rows)
