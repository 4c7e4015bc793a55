"""Where a conversion is built and how it gets to its place: whole, or not at all.

It is built in a folder beside the place and renamed when it is complete, with its mark. A conversion that is killed
leaves that folder, which the next one removes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megasetup.checkpoint.converting import Conversion
from megasetup.checkpoint.marks import MARK, what_is_missing, write_mark

_logger = logging.getLogger("megasetup")

_ABANDONED_SECONDS = 3600.0


def identity(target: Path) -> str | None:
    """What tells one conversion at a place from the next: None where there is none of ours."""
    try:
        return str(json.loads((target / MARK).read_text())["identity"])
    except (OSError, ValueError, KeyError):
        return None


def _prefix(target: Path) -> str:
    return f".{target.name}.importing-"


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """A fresh folder beside the target, gone afterwards unless it was moved into place."""
    _remove_abandoned(target)
    folder = target.parent / f"{_prefix(target)}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(target: Path) -> None:
    """Remove what conversions of this target left when they were killed.

    The lock is held, so none should be running. Where it does not reach other machines one may be, so what does not
    come from a dead process of this machine is left until nothing has been written to it for an hour.
    """
    here = f"{_prefix(target)}{socket.gethostname()}-"
    for folder in target.parent.glob(f"{_prefix(target)}*"):
        own = folder.name.removeprefix(here).split("-")[0] if folder.name.startswith(here) else ""
        if (own.isdigit() and not _alive(int(own))) or _age(folder) > _ABANDONED_SECONDS:
            _logger.info("removing %s, left by a conversion that was killed", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _age(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return time.time() - max(times)


def put_in_place(conversion: Conversion, folder: Path, target: Path) -> None:
    """Mark the finished checkpoint and move it to its place, over what is there."""
    write_mark(
        folder,
        {
            "identity": uuid.uuid4().hex,
            "hf_model_name": _lasting(conversion.hf_model_name),
            "hf_config_overrides": dict(conversion.overrides),
            "made_with": {name: _version(name) for name in ("megatron-bridge", "megatron-core", "transformers")},
        },
    )
    if target.exists():
        aside = target.parent / f"{_prefix(target)}{socket.gethostname()}-{os.getpid()}-replaced"
        os.rename(target, aside)
        os.rename(folder, target)
        shutil.rmtree(aside, ignore_errors=True)
        return
    try:
        os.rename(folder, target)
    except OSError:
        # Another process, which the lock did not reach, was faster: its checkpoint is as good.
        if what_is_missing(target) is not None:
            raise


def _lasting(hf_model_name: str) -> str:
    """The name by which the model is found from any folder."""
    return os.path.abspath(hf_model_name) if os.path.exists(hf_model_name) else hf_model_name


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
