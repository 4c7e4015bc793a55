"""The files that a command is asked to write: found writable before it computes, and written one way.

A benchmark takes minutes, and a path that cannot be written is known before it begins. No folder is made on the way:
one that is not there is more often a slip than a wish.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megasetup.cli.errors import CommandError


def check_writable(option: str, file: Path | None) -> None:
    """Say that a file could not be written before the command has worked for nothing. Leaves everything as it was.

    Args:
        option: what names the file on the command line, as in "--json".
        file: the file, which may be there or not; None is right.

    Raises:
        CommandError: it is a folder, its folder is not there, or the system refuses to write it.
    """
    if file is None:
        return
    target = Path(os.path.realpath(file))
    try:
        if target.is_dir():
            raise CommandError(f"{option} {file} is a folder: give the path of a file")
        if not target.parent.is_dir():
            raise CommandError(
                f"{option} {file} cannot be written: there is no folder {target.parent}; make it, or give another path"
            )
        if target.exists() and not target.is_file():
            return  # a device or a pipe, whose reader would see it opened
        # Permission bits do not tell (root, read-only and virtual file systems), so it is opened, and left as it was.
        was_there = target.exists()
        target.open("ab").close()
        if not was_there:
            target.unlink()
    except OSError as error:
        raise _refused(option, file, error) from error


def write_json(file: Path, data: dict[str, Any]) -> None:
    """Write plain data to the file of --json.

    Raises:
        CommandError: the system refuses (a full disk, say).
    """
    text = json.dumps(data, indent=1) + "\n"
    try:
        file.write_text(text)
    except OSError as error:
        raise _refused("--json", file, error) from error


def _refused(option: str, file: Path, error: OSError) -> CommandError:
    return CommandError(f"{option} {file} cannot be written: {error.strerror or error}; give another path")
