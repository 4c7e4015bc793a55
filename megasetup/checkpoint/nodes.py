"""What the machines of one process group see of a folder, and a conversion on each that sees one of its own.

Ranks agree in short rounds, so that no rank waits in one collective for as long as a conversion takes: the process
group would take that for a rank that hangs.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasetup.checkpoint.converting import Conversion
from megasetup.checkpoint.marks import what_is_missing

_logger = logging.getLogger("megasetup")

_ROUND_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0  # for a network file system to show a file that another machine has just made
# What a launcher tells its processes: a conversion in a process of its own is none of them.
_LAUNCHERS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class NodeError(RuntimeError):
    """Something failed on another rank, or a machine does not see what another one wrote."""


def from_first[Result](work: Callable[[], Result]) -> Result:
    """Do something on rank 0 and give every rank its result, or its exception.

    Raises:
        NodeError: it failed; on rank 0 the exception itself is raised.
    """
    outcome: list[Any] = [None, None]
    failure: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            failure = error
            outcome[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise NodeError(f"rank 0 failed: {outcome[1]}")
    return outcome[0]  # type: ignore[no-any-return]


def all_see(folder: Path) -> bool:
    """Whether all ranks see one folder at this path. It is made where it is missing.

    Raises:
        NodeError: the folder cannot be made on some rank.
    """
    if dist.get_world_size() == 1:
        return True
    probe = Path(from_first(lambda: str(_make_probe(folder))))
    own = _try(lambda: folder / probe.name if _appears(folder / probe.name) else None)
    answers = _gather(own)
    if dist.get_rank() == 0:
        probe.unlink(missing_ok=True)
    for rank, (_, failure) in enumerate(answers):
        if failure:
            raise NodeError(f"rank {rank} cannot use {folder}: {failure}")
    return all(seen is not None for seen, _ in answers)


def check_all_see(target: Path) -> None:
    """Make sure that every rank sees a whole checkpoint.

    Raises:
        NodeError: some do not, with their ranks and machines.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    missing = what_is_missing(target)
    while missing is not None and time.monotonic() < deadline:
        time.sleep(_ROUND_SECONDS)
        missing = what_is_missing(target)
    answers = _gather((f"rank {dist.get_rank()} on {socket.gethostname()}: {missing}" if missing else None, None))
    blind = [answer for answer, _ in answers if answer is not None]
    if blind:
        raise NodeError(
            f"{target} was converted, and {len(blind)} of {len(answers)} ranks do not see all of it "
            f"({'; '.join(blind[:4])}). Put HF_HOME, or MEGASETUP_CHECKPOINT_DIR, on storage that all machines share"
        )


def import_on_each(conversion: Conversion, target: Path, *, force: bool) -> bool:
    """Convert once on every machine, for ranks whose machines do not share the folder.

    The first rank of each machine (LOCAL_RANK or SLURM_LOCALID 0) converts in a child process, alone and on the CPU.

    Returns:
        Whether this rank's child converted.

    Raises:
        NodeError: a conversion failed, on every rank.
        ValueError: a hook or a layer spec cannot be sent to a child.
    """
    leads = _leads_its_machine()
    _logger.warning(
        "not all machines of this process group share %s, so each converts %s for itself: put HF_HOME, or "
        "MEGASETUP_CHECKPOINT_DIR, on storage that all machines share to do it once, with all ranks",
        target.parent,
        conversion.hf_model_name,
    )
    child = _try(lambda: _Child(conversion, target, force) if leads else None)
    while True:
        running = child[0] is not None and child[0].runs(_ROUND_SECONDS)
        if child[0] is None:
            time.sleep(_ROUND_SECONDS)
        failure = child[1] or (child[0].failure if child[0] else None)
        answers = _gather((running, failure))
        if not any(answer[0] for answer in answers):
            break
    failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer[1]]
    if failures:
        raise NodeError(f"converting {conversion.hf_model_name} failed: {'; '.join(failures)}")
    check_all_see(target)
    return child[0] is not None and child[0].converted


class _Child:
    """A conversion in a process of its own."""

    def __init__(self, conversion: Conversion, target: Path, force: bool) -> None:
        try:
            job = pickle.dumps((conversion, target, force))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                "a hook or layer spec of this conversion cannot be sent to another process, which machines that do not "
                f"share {target.parent} need: make it a function of a module, or share the folder ({error})"
            ) from error
        environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megasetup.checkpoint.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        if self._process.stdin is not None:
            with self._process.stdin as stdin:
                stdin.write(job)
        self.converted = False
        self.failure: str | None = None

    def runs(self, seconds: float) -> bool:
        """Wait for a while; whether it still runs then."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        said = b"" if self._process.stdout is None else self._process.stdout.read()
        self.converted = said.strip().endswith(b"converted")
        if code:
            self.failure = (
                f"the converting process on {socket.gethostname()} ended with status {code} (see its messages)"
            )
        return False


def _make_probe(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    probe.touch()
    return probe


def _appears(file: Path) -> bool:
    file.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_ROUND_SECONDS)
        os.listdir(file.parent)  # (makes NFS look again)
    return True


def _leads_its_machine() -> bool:
    names = _gather((socket.gethostname(), None))
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        if variable in os.environ:
            return os.environ[variable] == "0"
    return [name for name, _ in names].index(socket.gethostname()) == dist.get_rank()


def _try(work: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return work(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _gather(own: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, own)
    return answers
