"""Starts a worker script as several ranks, as torchrun would, and collects what they print.

torchrun itself takes seconds to start; the variables that it sets are all that a rank sees of it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")


class Ended(NamedTuple):
    """One rank that ended: its exit status, and stdout and stderr together."""

    status: int
    output: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def bare_environment() -> dict[str, str]:
    """This process's environment without any launcher's variables, with the tests importable."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS), str(TESTS.parent), *filter(None, [environment.get("PYTHONPATH")])]
    )
    return environment


def launch(
    script: Path, world: int, *arguments: str, timeout: float = 120, environment: dict[str, str] | None = None
) -> list[Ended]:
    """Run `python script *arguments` as `world` ranks of one host, and wait for all of them.

    Raises:
        TimeoutError: some rank was still running after `timeout` seconds; all output so far is in the message.
    """
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=bare_environment()
            | {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            | (environment or {}),
        )
        for rank in range(world)
    ]
    outputs: list[str] = []
    late = False
    for process in ranks:
        try:
            outputs.append(process.communicate(timeout=timeout)[0])
        except subprocess.TimeoutExpired:
            late = True
            for other in ranks:
                other.kill()
            outputs.append(process.communicate()[0])
    if late:
        raise TimeoutError("\n".join(f"--- rank {rank}\n{output}" for rank, output in enumerate(outputs)))
    return [Ended(process.returncode, output) for process, output in zip(ranks, outputs, strict=True)]
