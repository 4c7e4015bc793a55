"""What this machine is: versions, processors, memory limits and GPUs, read and never changed.

doctor shows these facts and every benchmark result carries them, so a figure can be traced to where it was measured.
Everything is read from /proc, /sys, nvidia-smi and package metadata; no heavy package is imported for its version.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

import megasetup
from megasetup.host import control_groups, memory, read

# Bytes a second of one PCI Express lane, by generation, after line coding.
_LANE_BANDWIDTH = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}

_DISTRIBUTIONS = (
    "torch",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "transformers",
    "safetensors",
    "matplotlib",
)


@dataclass(frozen=True)
class Link:
    """What the driver says of a GPU's PCI Express link; a virtual machine may be told anything.

    Attributes:
        generation, width: now; an idle GPU may lower its generation.
        generation_max, width_max: what card and slot can do together.
    """

    generation: int | None
    width: int | None
    generation_max: int | None
    width_max: int | None

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second each way at the highest generation and width, None where the driver does not say."""
        lane = _LANE_BANDWIDTH.get(self.generation_max or 0)
        return None if lane is None or not self.width_max else lane * self.width_max


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process can use.

    Attributes:
        index: torch's index.
        memory: bytes.
        numa_node: of its PCI device, None where the machine has one node or does not say.
        numa_cores: cores of that node that this process may use, None where the node is unknown.
        link: None where nvidia-smi is absent.
    """

    index: int
    name: str
    memory: int
    numa_node: int | None
    numa_cores: int | None
    link: Link | None


def versions() -> dict[str, str | None]:
    """Version of each package that matters here, None for one that is not installed."""
    found: dict[str, str | None] = {"megasetup": megasetup.__version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["torch CUDA"] = torch.version.cuda
    return found


def processor() -> str:
    """The processor's name."""
    for line in (read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def allowed_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def processor_quota() -> float | None:
    """Cores' worth of time that the control group grants, None for no limit."""
    for folder in control_groups():
        limit = read(folder / "cpu.max")
        if limit and not limit.startswith("max"):
            quota, period = limit.split()
            return int(quota) / int(period)
        quota_us, period_us = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        if quota_us and period_us and int(quota_us) > 0:
            return int(quota_us) / int(period_us)
    return None


def local_ranks() -> int:
    """How many ranks share this host, as torchrun or the scheduler says; 1 when nobody does."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def huge_pages() -> str | None:
    """The chosen word of /sys/kernel/mm/transparent_hugepage/enabled: always, madvise or never; None if unreadable."""
    text = read("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    return text.partition("[")[2].partition("]")[0] or None


_SMI_FIELDS = (
    "uuid",
    "name",
    "driver_version",
    "pci.bus_id",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)


def nvidia_smi() -> list[dict[str, str]]:
    """One mapping a GPU that the driver sees, by nvidia-smi's field names; empty where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [dict(zip(_SMI_FIELDS, row, strict=True)) for row in rows if len(row) == len(_SMI_FIELDS)]


def driver() -> str | None:
    """The NVIDIA driver's version, None without one."""
    cards = nvidia_smi()
    if cards:
        return cards[0]["driver_version"]
    loaded = read("/proc/driver/nvidia/version")
    words = loaded.splitlines()[0].split() if loaded else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _numa(bus_id: str) -> tuple[int | None, int | None]:
    # nvidia-smi writes the domain with eight digits, /sys with four.
    domain, _, rest = bus_id.lower().partition(":")
    node = read(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    if node is None or not node.isdigit():
        return None, None
    cores: set[int] = set()
    for part in (read(f"/sys/devices/system/node/node{node}/cpulist") or "").split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return int(node), len(cores & os.sched_getaffinity(0)) if cores else None


def gpus() -> list[Gpu]:
    """The GPUs that torch can use, in torch's order."""
    if not torch.cuda.is_available():
        return []
    cards = {card["uuid"].removeprefix("GPU-"): card for card in nvidia_smi()}
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        card = cards.get(str(getattr(properties, "uuid", "")).removeprefix("GPU-"))
        node, cores = _numa(card["pci.bus_id"]) if card else (None, None)
        link = None
        if card:
            link = Link(
                _number(card["pcie.link.gen.current"]),
                _number(card["pcie.link.width.current"]),
                _number(card["pcie.link.gen.max"]),
                _number(card["pcie.link.width.max"]),
            )
        found.append(Gpu(index, properties.name, properties.total_memory, node, cores, link))
    return found


def environment() -> dict[str, Any]:
    """Where, when, with what and by which command something was measured, as plain data."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["megasetup", *sys.argv[1:]]),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": allowed_cores(),
        "memory_bytes": memory().total,
        "huge_pages": huge_pages(),
        "gpus": [asdict(gpu) for gpu in gpus()],
        "driver": driver(),
        "versions": versions(),
    }
