"""Runs the processes of the resume tests, and compares what they came to."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch
from resume_cases import Case


def assert_same(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(ours[name], wanted[name])]
    assert different == []


def run(folder: Path, ranks: int, worker: str = "resume_worker.py", *arguments: str) -> Path:
    """The folder, when processes of a first and of a second time have done all cases in it.

    Args:
        folder: an empty one.
        ranks: processes at a time.
        worker: their file, beside this one.
        arguments: what they get before the arguments of resume_cases.main().
    """
    command = [sys.executable, str(Path(__file__).with_name(worker)), *arguments]
    for which in ("first", "second"):
        logs = [folder / f"log-{which}-{rank}.txt" for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                of_rank = [*command, which, str(folder), str(rank), str(ranks)]
                processes.append(subprocess.Popen(of_rank, stdout=output, stderr=subprocess.STDOUT))
        end = time.monotonic() + 120
        # One that fails leaves the others waiting for it.
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        statuses = [process.returncode for process in processes]
        said = "\n".join(log.read_text()[-3000:] for log in logs)
        assert statuses == [0] * ranks, f"{which} processes ended with {statuses}:\n{said}"
    return folder


def assert_resumed(folder: Path, case: Case, ranks: int) -> list[dict[str, torch.Tensor]]:
    """What the first process reached, a rank each."""
    place = folder / case.name
    problems = "\n".join(file.read_text() for file in sorted(place.glob("problem-*")))
    assert problems == ""
    found = []
    for rank in range(ranks):
        whole, saved, resumed = (
            torch.load(place / f"{what}-{rank}.pt") for what in ("uninterrupted", "saved", "resumed")
        )
        found.append(dict(saved))
        del saved["pinned"]
        assert_same(saved, whole)
        assert_same(resumed, whole)
    return found
