"""What a setup did, stage by stage, as data and as a table to read.

A setup of minutes on hundreds of GPUs is worth knowing by its parts: which stage took the time, on which rank it took
longest, how many bytes it moved, and what the refresh of the FP32 copies found and did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasetup.masters import AuditReport, EnsureReport, SyncReport
from megasetup.masters.report import table


@dataclass
class Stage:
    """One stage of a setup on this rank.

    Attributes:
        name: what the stage does, in a word or two.
        seconds: its wall time, work that it left to the GPU included.
        bytes: bytes that it made, moved or compared on this rank; 0 where that says nothing.
        slowest_rank: the rank on which the stage took longest.
        slowest_seconds: its wall time there.
    """

    name: str
    seconds: float = 0.0
    bytes: int = 0
    slowest_rank: int = 0
    slowest_seconds: float = 0.0


@dataclass
class SetupReport:
    """What a setup did on this rank.

    Attributes:
        rank: this rank.
        world_size: how many ranks set up together.
        weights: where the weights came from ("pretrained checkpoint /a/b"), or "as initialised".
        stages: one Stage each, in the order in which they ran.
        sync: what the refresh of the FP32 copies wrote; None when it was not needed (a resume, no optimizer).
        ensure: what the check after a resume found and repaired; None after a fine-tuning load.
        audit: the state of every FP32 copy at the end; None without an optimizer.
    """

    rank: int = 0
    world_size: int = 1
    weights: str = "as initialised"
    stages: list[Stage] = field(default_factory=list)
    sync: SyncReport | None = None
    ensure: EnsureReport | None = None
    audit: AuditReport | None = None

    @property
    def seconds(self) -> float:
        """Wall time of all stages on this rank."""
        return sum(stage.seconds for stage in self.stages)

    def set_slowest(self, seconds_by_rank: Mapping[int, Mapping[str, float]]) -> None:
        """Note for each stage where it took longest.

        Args:
            seconds_by_rank: for each rank, the seconds of each of its stages by name.
        """
        for stage in self.stages:
            took = {rank: seconds[stage.name] for rank, seconds in seconds_by_rank.items() if stage.name in seconds}
            if took:
                stage.slowest_rank = max(took, key=lambda rank: took[rank])
                stage.slowest_seconds = took[stage.slowest_rank]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for JSON."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "weights": self.weights,
            "seconds": self.seconds,
            "stages": [vars(stage).copy() for stage in self.stages],
            "sync": None if self.sync is None else self.sync.to_dict(),
            "ensure": None if self.ensure is None else self.ensure.to_dict(),
            "audit": None if self.audit is None else self.audit.to_dict(),
        }

    def write_json(self, file: str | Path) -> None:
        """Write the report to a file, folders included."""
        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def __str__(self) -> str:
        several = self.world_size > 1
        who = f" on rank {self.rank} of {self.world_size}" if several else ""
        lines = [f"set up in {self.seconds:,.2f} s{who}; weights: {self.weights}"]
        rows: list[tuple[str, ...]] = [("stage", "s", "MB", "GB/s", "slowest rank", "s there")[: 6 if several else 4]]
        for stage in self.stages:
            rate = f"{stage.bytes / stage.seconds / 1e9:,.1f}" if stage.bytes and stage.seconds else "-"
            row = (stage.name, f"{stage.seconds:,.2f}", f"{stage.bytes / 1e6:,.1f}" if stage.bytes else "-", rate)
            rows.append((*row, str(stage.slowest_rank), f"{stage.slowest_seconds:,.2f}") if several else row)
        lines += table(rows)
        lines += [str(part) for part in (self.sync, self.ensure, self.audit) if part is not None]
        return "\n".join(lines)
