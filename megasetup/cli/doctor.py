"""`megasetup doctor`: what this machine offers, measured where it can be, and what to do about what is missing.

examine() gathers plain data, advise() turns it into a list of things to do, and show() prints both. Only a package
that cannot work at all (a kernel that gives wrong values) makes the command fail: everything else has a slower way.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megasetup import host, kernels
from megasetup.cli import machine
from megasetup.cli.console import amount, facts, gigabytes, title
from megasetup.cli.wire import measure_wire

_WIRE_BYTES = 256_000_000
# Below this share of what the link should carry, something is wrong with the slot, the node or a neighbour.
_GOOD_WIRE_SHARE = 0.7


def _kernel_problem(device: torch.device) -> str:
    """Widen every BF16 pattern, narrow it back and compare; "" when all values are right, else what went wrong."""
    patterns = torch.arange(1 << 16, dtype=torch.int32, device=device)
    weight = patterns.to(torch.int16).view(torch.bfloat16)
    wide = torch.empty(1 << 16, dtype=torch.float32, device=device)
    back = torch.empty_like(weight)
    numbers = ~weight.isnan()
    try:
        kernels.widen([weight], [wide])
        kernels.narrow([wide], [back])
        (comparison,) = kernels.compare([weight], [wide])
        expected = (patterns << 16)[numbers]
        widened = bool((wide.view(torch.int32)[numbers] == expected).all())
        narrowed = bool((back.view(torch.int16)[numbers] == weight.view(torch.int16)[numbers]).all())
    except RuntimeError as error:
        return f"a kernel on {device} failed: {error}"
    if not widened or not narrowed or comparison.exact_differences:
        return f"a kernel on {device} gives wrong values"
    return ""


def _measured_wire(device: torch.device) -> dict[str, float] | str:
    try:
        return asdict(measure_wire(device, _WIRE_BYTES, repeats=3))
    except RuntimeError as error:
        return f"not measured: {error}"


def examine() -> dict[str, Any]:
    """Everything that doctor knows, as plain data (see the keys below)."""
    with warnings.catch_warnings():
        # The status says what the warning would say.
        warnings.simplefilter("ignore", RuntimeWarning)
        status = kernels.native_status()
        gpus = machine.gpus()
        devices = [torch.device("cpu"), *(torch.device("cuda", gpu.index) for gpu in gpus)]
        problems = [problem for problem in map(_kernel_problem, devices) if problem]
        threads = kernels.get_num_threads()
    memory = host.memory()
    return {
        "versions": machine.versions(),
        "kernels": {**asdict(status), "problems": problems},
        "driver": machine.driver(),
        "gpus_of_driver": len(machine.nvidia_smi()),
        "gpus": [
            {
                **asdict(gpu),
                "link_bandwidth": gpu.link.bandwidth if gpu.link else None,
                "wire": _measured_wire(torch.device("cuda", gpu.index)),
            }
            for gpu in gpus
        ],
        "processor": machine.processor(),
        "cores": machine.allowed_cores(),
        "processor_quota": machine.processor_quota(),
        "local_ranks": machine.local_ranks(),
        "threads": threads,
        "threads_setting": os.environ.get("MEGASETUP_NUM_THREADS", ""),
        "huge_pages": machine.huge_pages(),
        "memory": {**asdict(memory), "usable": memory.usable},
    }


def _advise_packages(found: dict[str, Any]) -> list[str]:
    versions, status = found["versions"], found["kernels"]
    advice = [f"{problem}: rebuild with `pip install --force-reinstall .`" for problem in status["problems"]]
    if not status["cpu"]:
        advice.append(
            "The compiled module is absent, so everything runs in plain torch, much slower: run `pip install .` in the "
            "source tree (needs a C++ compiler; nvcc as well for the GPU half)."
        )
    elif not status["gpu"] and found["gpus"]:
        advice.append(
            f"The GPU half cannot be used ({status['why']}): rebuild with `pip install .` where nvcc is on PATH, or "
            "name it with CUDACXX."
        )
    if not versions["megatron-core"]:
        advice.append("megatron-core is not installed; reading an optimizer needs it: `pip install megatron-core`.")
    if not versions["transformers"] or not versions["safetensors"]:
        advice.append(
            "transformers or safetensors is not installed; the demo needs both: `pip install 'megasetup[demo]'`."
        )
    if not versions["matplotlib"]:
        advice.append("matplotlib is not installed; `bench --plot` needs it: `pip install 'megasetup[plot]'`.")
    return advice


def _advise_gpus(found: dict[str, Any]) -> list[str]:
    if not found["gpus"]:
        if found["gpus_of_driver"]:
            return [
                f"The driver ({found['driver']}) sees {found['gpus_of_driver']} GPUs but torch cannot use them (its "
                f"CUDA is {found['versions']['torch CUDA']}): check CUDA_VISIBLE_DEVICES, and that the driver is new "
                "enough for torch's CUDA."
            ]
        return ["No GPU is usable here, so the wire cannot be measured; CPU kernels, `make demo` and tests still work."]
    advice = []
    for gpu in found["gpus"]:
        who = f"GPU {gpu['index']}"
        if isinstance(gpu["wire"], str):
            advice.append(f"{who}'s wire was {gpu['wire']}. Free GPU or host memory, or raise the container's limit.")
        elif gpu["link_bandwidth"]:
            slowest = min(gpu["wire"].values())
            if slowest < _GOOD_WIRE_SHARE * gpu["link_bandwidth"]:
                advice.append(
                    f"{who}'s wire carries {slowest / 1e9:.1f} GB/s of the {gpu['link_bandwidth'] / 1e9:.0f} that its "
                    "link should: look for other traffic, for a process on the wrong NUMA node, or for a slot with "
                    "fewer lanes."
                )
        if gpu["numa_cores"] == 0:
            advice.append(
                f"No core of {who}'s NUMA node {gpu['numa_node']} is allowed to this process: start it with "
                f"`numactl --cpunodebind={gpu['numa_node']} --membind={gpu['numa_node']}`."
            )
    return advice


def _advise_host(found: dict[str, Any]) -> list[str]:
    advice = []
    setting = found["threads_setting"].strip()
    if setting and not (setting.isdecimal() and int(setting)):
        advice.append(
            f"MEGASETUP_NUM_THREADS is {setting!r}, which is no whole number from 1 on, and {found['threads']} worker "
            "threads are used: put it right, or unset it."
        )
    cores = min(found["cores"], found["processor_quota"] or found["cores"])
    if cores / found["local_ranks"] < 2:
        advice.append(
            f"{cores:g} cores for {found['local_ranks']} local ranks: the CPU, not the wire, will bound a sync; give "
            "the container more cores."
        )
    if found["huge_pages"] == "never":
        advice.append(
            "Transparent huge pages are off, so pinning memory is slow: as root, "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`."
        )
    memory = found["memory"]
    if memory["container_limit"] and memory["container_limit"] < memory["total"] / 4:
        advice.append(
            f"The container may use {gigabytes(memory['container_limit'])} of the machine's "
            f"{gigabytes(memory['total'])}: offloaded clones need 4 bytes a parameter (and Adam 8 more); raise the "
            "limit if the model does not fit."
        )
    if found["gpus"] and memory["lock_limit"] is not None and memory["lock_limit"] < memory["total"] / 2:
        advice.append(
            f"The locked-memory limit is {gigabytes(memory['lock_limit'])}. CUDA's pinned memory is usually not "
            "counted against it, InfiniBand's is: `ulimit -l unlimited` (docker: `--ulimit memlock=-1`) if NCCL or "
            "pinning complains."
        )
    return advice


def advise(found: dict[str, Any]) -> list[str]:
    """What to do about what examine() found missing or slow, most important first; empty when nothing is."""
    return [*_advise_packages(found), *_advise_gpus(found), *_advise_host(found)]


def _versions_table(found: dict[str, Any]) -> Any:
    rows = facts()
    for name, version in found["versions"].items():
        rows.add_row(name, version or "[dim]not installed[/dim]")
    return rows


def _kernels_table(found: dict[str, Any]) -> Any:
    status = found["kernels"]
    rows = facts()
    rows.add_row("CPU", {"torch": "plain torch"}.get(status["cpu_instruction_set"], status["cpu_instruction_set"]))
    built_for = status["gpu_architectures"]
    rows.add_row("GPU", f"native ({built_for})" if status["gpu"] else f"[yellow]none[/yellow]: {escape(status['why'])}")
    rows.add_row("values checked", "; ".join(status["problems"]) or "right, for all 65,536 BF16 patterns")
    rows.add_row("worker threads", f"{found['threads']} (MEGASETUP_NUM_THREADS changes this)")
    return rows


def _gpus_table(found: dict[str, Any]) -> Any:
    rows = facts()
    rows.add_row("driver", found["driver"] or "[dim]none[/dim]")
    if not found["gpus"]:
        rows.add_row("GPUs", "[yellow]none that torch can use[/yellow]")
    for gpu in found["gpus"]:
        node = "unknown" if gpu["numa_node"] is None else f"{gpu['numa_node']} ({gpu['numa_cores']} cores allowed)"
        rows.add_row(f"GPU {gpu['index']}", f"{gpu['name']}, {gigabytes(gpu['memory'])}, NUMA node {node}")
        link = gpu["link"]
        if link and link["generation_max"]:
            rows.add_row(
                "  link, as reported",
                f"PCIe {link['generation_max']} x{link['width_max']} "
                f"(now {link['generation']} x{link['width']}; virtual machines may report anything)",
            )
        else:
            rows.add_row("  link, as reported", "[dim]the driver does not say[/dim]")
        wire = gpu["wire"]
        if isinstance(wire, str):
            rows.add_row("  wire, measured", f"[yellow]{escape(wire)}[/yellow]")
        else:
            down, up = wire["device_to_host"] / 1e9, wire["host_to_device"] / 1e9
            rows.add_row(
                "  wire, measured", f"{down:.1f} GB/s to the host, {up:.1f} GB/s to the GPU (pinned, one way at a time)"
            )
    return rows


# Of an offloaded element: Adam's moments and the clone, which is pinned.
_OFFLOADED_BYTES, _PINNED_BYTES = 12, 4


def _offload(memory: dict[str, Any]) -> str:
    """How many elements of an optimizer the free memory holds, and whether their clones may be pinned."""
    elements = memory["usable"] / _OFFLOADED_BYTES
    text = f"room for {amount(int(elements))} elements, {_OFFLOADED_BYTES} bytes each, {_PINNED_BYTES} of them pinned"
    lock = memory["lock_limit"]
    if lock is not None and lock < _PINNED_BYTES * elements:
        text += f"; the locked-memory limit, where the driver counts, allows {amount(lock // _PINNED_BYTES)}"
    return text


def _host_table(found: dict[str, Any]) -> Any:
    rows, memory = facts(), found["memory"]
    quota = f", quota {found['processor_quota']:g}" if found["processor_quota"] else ""
    rows.add_row("processor", found["processor"])
    rows.add_row("cores allowed", f"{found['cores']}{quota}; {found['local_ranks']} local ranks")
    rows.add_row("memory", f"{gigabytes(memory['total'])}, {gigabytes(memory['available'])} available")
    limit = memory["container_limit"]
    in_use = f"{gigabytes(limit)}, {gigabytes(memory['container_used'])} used" if limit else "none"
    rows.add_row("container memory limit", in_use)
    lock = memory["lock_limit"]
    rows.add_row("locked-memory limit", "unlimited" if lock is None else gigabytes(lock))
    rows.add_row("offloaded optimizer", _offload(memory))
    rows.add_row("huge pages", found["huge_pages"] or "unknown")
    return rows


def show(found: dict[str, Any], advice: list[str], console: Console) -> None:
    """Print the facts, then what to do."""
    sections = {
        "Versions": _versions_table,
        "Kernels in use": _kernels_table,
        "GPUs": _gpus_table,
        "Host": _host_table,
    }
    for name, rows_of in sections.items():
        title(console, name)
        console.print(rows_of(found))
        console.print()
    if not advice:
        console.print("[bold green]Nothing is missing.[/bold green]")
        return
    title(console, "What to do")
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(justify="right")
    rows.add_column()
    for number, line in enumerate(advice, start=1):
        rows.add_row(f"{number}.", escape(line))
    console.print(rows)


def healthy(found: dict[str, Any]) -> bool:
    """Whether the package can work here at all."""
    return not found["kernels"]["problems"]
