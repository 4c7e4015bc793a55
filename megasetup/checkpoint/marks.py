"""What makes a converted checkpoint count as whole.

A conversion that died half-way leaves a folder that looks like a checkpoint. Ours are built beside their place and
moved there when they are whole, with a list of their files and sizes; that list also notices a copy that broke off.
Caches without a list, as Bridge and NeMo-RL make them, are judged by what Bridge writes, in its order: the tensors,
their metadata, and last of all run_config.yaml.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

FIRST_ITERATION = "iter_0000000"
RUN_CONFIG = "run_config.yaml"
TRACKER = "latest_checkpointed_iteration.txt"
MARK = "megasetup_import.json"


def write_mark(folder: Path, facts: dict[str, Any]) -> None:
    """List every file below a folder with its size, and facts about its making, in the folder's mark.

    Args:
        folder: the root of a converted checkpoint.
        facts: what else to keep, as JSON holds it.
    """
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MARK
    }
    (folder / MARK).write_text(json.dumps({**facts, "files": sizes}, indent=1) + "\n")


def what_is_missing(folder: str | os.PathLike[str]) -> str | None:
    """Why a converted checkpoint does not count as whole.

    Args:
        folder: its root, the folder that holds iter_0000000.

    Returns:
        The first thing found wrong, as the end of a sentence, or None when it is whole.
    """
    root = Path(folder)
    iteration = root / FIRST_ITERATION
    if not iteration.is_dir():
        return f"it has no {FIRST_ITERATION}"
    mark = root / MARK
    if mark.is_file():
        return _against_mark(root, mark)
    for name in (".metadata", "metadata.json", RUN_CONFIG):
        file = iteration / name
        if not file.is_file() or file.stat().st_size == 0:
            return f"{FIRST_ITERATION}/{name} is missing or empty"
    shards = list(iteration.glob("*.distcp"))
    if not shards:
        return f"{FIRST_ITERATION} has no tensors (*.distcp)"
    for shard in shards:
        if shard.stat().st_size == 0:
            return f"{FIRST_ITERATION}/{shard.name} is empty"
    # Bridge writes its sections in alphabetical order, several after "model": a text that broke off has none of them,
    # or ends within a line.
    text = (iteration / RUN_CONFIG).read_text(errors="replace")
    sections = re.findall(r"^(\w+):", text, re.MULTILINE)
    in_order = sections == sorted(sections)
    if not text.endswith("\n") or "model" not in sections or (in_order and sections[-1] == "model"):
        return f"{FIRST_ITERATION}/{RUN_CONFIG} breaks off"
    return None


def stranger(folder: str | os.PathLike[str]) -> str | None:
    """What shows that something is no broken checkpoint, which a conversion may replace, but another's.

    Args:
        folder: what is where a checkpoint shall be, without being a whole one.

    Returns:
        As the end of a sentence: that it is a file, or the first of its entries that no conversion makes. None for a
        folder that is empty or holds only what conversions begin with.
    """
    root = Path(folder)
    if not root.is_dir():
        return "it is a file"
    for entry in sorted(root.iterdir()):
        # (Bridge's own files of a root all begin with latest_; a network file system adds hidden ones)
        if not entry.name.startswith(("iter_", "latest_", ".")) and entry.name != MARK:
            return f"it holds {entry.name}"
    return None


def _against_mark(root: Path, mark: Path) -> str | None:
    try:
        files: dict[str, int] = json.loads(mark.read_text())["files"]
    except (ValueError, KeyError):
        return f"{MARK} cannot be read"
    for name, size in files.items():
        file = root / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            return f"{name} is {'missing' if found is None else f'{found} bytes long'} and should have {size} bytes"
    return None
