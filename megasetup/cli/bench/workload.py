"""The tensors of one benchmark: BF16 weights, their FP32 copies, and the two ways to refresh them.

Weights are views of one flat buffer with 64-element starts, as Megatron's parameter buffer holds them. In standard
mode each has an FP32 shard beside it (level 1) and a pinned clone on the host (level 2). In precision-aware mode there
is no level 1, and the clone, which is pageable there, is both level 2 and level 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from megasetup import host
from megasetup.cli import host_memory
from megasetup.cli.console import gigabytes
from megasetup.cli.errors import CommandError
from megasetup.cli.shapes import Shapes
from megasetup.cli.timing import wait_for
from megasetup.masters import WeightCopies
from megasetup.masters.layout import Level

STANDARD, PRECISION_AWARE = "standard", "precision-aware"
LEVELS: dict[str, tuple[Level, ...]] = {STANDARD: (1, 2), PRECISION_AWARE: (2, 3)}

_ALIGNMENT = 64  # elements, as in Megatron's parameter buffer
_PIECE = 1 << 26  # elements checked at a time, which bounds the check's temporaries at half a GB
# Random values are drawn once for this many elements (a prime, so that no aligned shift maps the pattern onto itself).
_DRAWN = 67_108_859


def padded(count: int) -> int:
    """Elements that a tensor takes in a flat buffer."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def flat_elements(shapes: Shapes) -> int:
    """Elements of a flat buffer that holds the set."""
    return sum(map(padded, shapes.counts))


def cut(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """Views of a flat buffer, one a tensor, each from a 64-element start."""
    views, start = [], 0
    for (_, shape), count in zip(shapes.tensors, shapes.counts, strict=True):
        views.append(flat[start : start + count].view(shape))
        start += padded(count)
    return views


def check_memory(elements: int, mode: str, device: torch.device, *, ranks: int = 1) -> None:
    """Say before anything is allocated when it cannot fit.

    Args:
        elements: of the largest shape set, on each rank.
        ranks: processes that share the host's memory, each with a GPU of its own.

    Raises:
        CommandError: with what is needed, what is there, and the scale that fits.
    """
    on_device = elements * (6 if mode == STANDARD else 2)
    on_host = elements * 4
    spare = 4_000_000_000 if device.type == "cuda" else 200_000_000
    checks = [("host memory", (on_host + spare / 2) * ranks, host.memory().usable)]
    if device.type == "cuda":
        checks.append((f"memory on {device}", on_device + spare, torch.cuda.mem_get_info(device)[0]))
    else:
        checks = [("host memory", on_host + on_device + spare, host.memory().usable)]
    for what, needed, there in checks:
        if needed > there:
            scale = max(0.01, int(there / needed * 90) / 100)
            raise CommandError(
                f"{mode} mode needs {gigabytes(needed)} of {what} and {gigabytes(there)} is there: "
                f"choose smaller --shapes, or --scale {scale:g}, which keeps that share of the layers"
            )


def _random(flat: torch.Tensor) -> None:
    drawn = flat[:_DRAWN].normal_(std=0.02)
    for start in range(len(drawn), len(flat), len(drawn)):
        piece = flat[start : start + len(drawn)]
        piece.copy_(drawn[: len(piece)])


class Buffers:
    """The flat buffers of one mode, large enough for every shape set of a run.

    Args:
        elements: of the largest set.
        mode: STANDARD or PRECISION_AWARE.
        device: where the weights lie, a GPU or the CPU.

    Raises:
        CommandError: the host memory cannot be pinned.
    """

    def __init__(self, elements: int, mode: str, device: torch.device) -> None:
        self.mode, self.device = mode, device
        if mode == STANDARD and device.type == "cuda":
            self.clones = host_memory.pinned(elements, device)
        else:
            self.clones = host_memory.pageable(elements)
        self.weights = torch.empty(elements, dtype=torch.bfloat16, device=device)
        _random(self.weights)
        self.shards = torch.zeros(elements, dtype=torch.float32, device=device) if mode == STANDARD else None

    def pinned_for_checking(self) -> AbstractContextManager[None]:
        """Pin pageable clones for the duration of a check, which then runs at the wire's speed."""
        if self.device.type == "cuda" and not self.clones.is_pinned():
            return host_memory.registered(self.clones, self.device)
        return nullcontext()


@dataclass(frozen=True)
class Workload:
    """One shape set in one mode's buffers."""

    shapes: Shapes
    buffers: Buffers
    sources: list[torch.Tensor]
    shards: list[torch.Tensor] | None
    clones: list[torch.Tensor]

    @classmethod
    def build(cls, shapes: Shapes, buffers: Buffers) -> Workload:
        """Cut the set out of the buffers."""
        return cls(
            shapes,
            buffers,
            cut(buffers.weights, shapes),
            None if buffers.shards is None else cut(buffers.shards, shapes),
            cut(buffers.clones, shapes),
        )

    def target(self, level: Level) -> list[torch.Tensor]:
        """The tensors of a level (levels 2 and 3 are the same ones in precision-aware mode)."""
        if level == 1:
            if self.shards is None:
                raise CommandError("precision-aware mode has no level 1: its levels are 2 and 3")
            return self.shards
        return self.clones

    def copies(self, levels: Sequence[Level]) -> list[WeightCopies]:
        """What there is to refresh, as a plan takes it."""
        targets = [(level, self.target(level)) for level in levels]
        return [
            WeightCopies(name, self.sources[index], tuple((level, tensors[index]) for level, tensors in targets))
            for index, (name, _) in enumerate(self.shapes.tensors)
        ]

    def poison(self, levels: Sequence[Level]) -> None:
        """Fill the levels with NaN, which no weight is, so that a value that was not written shows."""
        for flat in {id(flat): flat for flat in map(self._flat, levels)}.values():
            flat.fill_(float("nan"))
        wait_for(self.buffers.device)

    def _flat(self, level: Level) -> torch.Tensor:
        shards = self.buffers.shards
        return shards if level == 1 and shards is not None else self.buffers.clones

    def wrong(self, levels: Sequence[Level]) -> list[str]:
        """Names, with their level, of the copies that are not the widened weight bit for bit (checked by torch)."""
        found = []
        with self.buffers.pinned_for_checking():
            for level in levels:
                for (name, _), source, target in zip(
                    self.shapes.tensors, self.sources, self.target(level), strict=True
                ):
                    if not all(same for same in _pieces_equal(source.view(-1), target.view(-1))):
                        found.append(f"{name} (level {level})")
        return found


def _pieces_equal(source: torch.Tensor, target: torch.Tensor) -> Iterator[bool]:
    for start in range(0, len(source), _PIECE):
        expected = source[start : start + _PIECE].float()
        actual = target[start : start + _PIECE].to(source.device)
        yield torch.equal(expected.view(torch.int32), actual.view(torch.int32))


def load_safetensors(folder: Path, workload: Workload) -> None:
    """Replace the random values by those of a checkpoint folder, rounded to BF16 where they are wider.

    Raises:
        CommandError: the safetensors package is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CommandError("--safetensors needs the safetensors package: pip install 'megasetup[demo]'") from error
    targets = {name: tensor for (name, _), tensor in zip(workload.shapes.tensors, workload.sources, strict=True)}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt", device=str(workload.buffers.device)) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if name in targets:
                    targets[name].copy_(opened.get_tensor(name))
