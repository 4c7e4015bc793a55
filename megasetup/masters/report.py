"""What a sync did, as data and as a table to read.

Kept apart from the code that does it: a trainer logs the text, a benchmark stores the plain data, and neither should
depend on how the copies were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megasetup.masters.layout import Untouched

_SHOWN = 20  # names listed in a table before it says "and n more"


@dataclass(frozen=True)
class LevelReport:
    """What one run wrote into one level.

    Attributes:
        level: 1, 2 or 3.
        tensors: copies of this level, those that share memory included.
        elements: elements of those.
        bytes: bytes written for this level. A copy that shares its memory with another level is counted there, and one
            that is the model's own memory is counted nowhere.
        shared: how many of `tensors` are the same memory as a lower level or as the model, and so cost nothing.
        seconds: from the start of the run until this level's last byte was written.
        bandwidth: bytes / seconds, in bytes a second; 0.0 when nothing was written.
        wire_share: the part of the wire's measured bandwidth that the weights bound for this level would need if each
            element crossed in the weight's own dtype: 1.0 is the limit. None where nothing crosses a wire.
    """

    level: int
    tensors: int
    elements: int
    bytes: int
    shared: int
    seconds: float
    bandwidth: float
    wire_share: float | None


@dataclass(frozen=True)
class SyncReport:
    """What one run of a plan did.

    Attributes:
        levels: one LevelReport for each level that exists, lowest first.
        weights: weights that have a copy.
        elements: elements of those weights.
        bytes: bytes written in all.
        seconds: wall time of the run.
        planning_seconds: wall time of reading the optimizer and checking the plan, once for all its runs.
        staged_elements: elements that crossed the wire in the weight's own dtype and were widened by the CPU.
        direct_elements: elements that crossed as they are in the copy, written by the GPU's copy engine.
        wire_bytes: bytes that crossed the wire.
        wire_bandwidth: bytes a second that the wire was measured to move; 0.0 where there is none.
        threads: CPU threads that widened.
        untouched: what was not refreshed, and why.
        quantised: names of quantised weights: their level 1 stays as it was loaded.
        notes: (name, note) of weights about which there is something to know.
    """

    levels: tuple[LevelReport, ...]
    weights: int
    elements: int
    bytes: int
    seconds: float
    planning_seconds: float
    staged_elements: int
    direct_elements: int
    wire_bytes: int
    wire_bandwidth: float
    threads: int
    untouched: tuple[Untouched, ...]
    quantised: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for JSON."""
        data = asdict(self)
        data["levels"] = [asdict(level) for level in self.levels]
        data["untouched"] = [entry._asdict() for entry in self.untouched]
        data["quantised"] = list(self.quantised)
        data["notes"] = [list(entry) for entry in self.notes]
        return data

    def __str__(self) -> str:
        lines = [
            f"refreshed {self.weights:,} weights ({self.elements:,} elements) in {self.seconds * 1e3:,.1f} ms, "
            f"planned in {self.planning_seconds * 1e3:,.1f} ms"
        ]
        rows = [("level", "copies", "elements", "MB written", "ms", "GB/s", "of the wire")]
        for level in self.levels:
            share = "-" if level.wire_share is None else f"{level.wire_share:.1%}"
            copies = f"{level.tensors:,}" + (f" ({level.shared:,} shared)" if level.shared else "")
            rows.append(
                (
                    str(level.level),
                    copies,
                    f"{level.elements:,}",
                    f"{level.bytes / 1e6:,.1f}",
                    f"{level.seconds * 1e3:,.1f}",
                    f"{level.bandwidth / 1e9:,.1f}",
                    share,
                )
            )
        lines += table(rows)
        if self.wire_bytes:
            lines.append(
                f"over the wire: {self.staged_elements:,} elements widened by {self.threads} CPU threads, "
                f"{self.direct_elements:,} written by the copy engine, {self.wire_bytes / 1e6:,.1f} MB"
            )
        lines += remarks(self.untouched, self.quantised, self.notes)
        return "\n".join(lines)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as aligned lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def shortened(lines: Sequence[str], shown: int = _SHOWN) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - shown
    return list(lines) if more <= 0 else [*lines[:shown], f"  and {more:,} more"]


def remarks(untouched: Sequence[Untouched], quantised: Sequence[str], notes: Sequence[tuple[str, str]]) -> list[str]:
    """The lines below a table: what was left out, and what to know."""
    lines = [f"untouched: {entry.what}: {entry.reason}" for entry in untouched]
    if quantised:
        lines.append("quantised, level 1 left to the main parameters they were loaded with:")
        lines += shortened([f"  {name}" for name in quantised])
    if notes:
        lines.append("notes:")
        lines += shortened([f"  {name}: {note}" for name, note in notes])
    return lines
