"""A rank that fails takes the others with it, at once and with its reason. Real processes, real gloo groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch

WORKER = Path(__file__).with_name("failure_worker.py")
REASON = "setup failed on rank 1 in stage 'second': FileNotFoundError: /nowhere. To try: mount the folder"


def test_every_rank_fails_with_the_one_that_failed() -> None:
    first, failed, third = launch(WORKER, 3, "fails")
    assert f"own: FileNotFoundError; {REASON}" in failed.output
    for peer in (first, third):
        assert peer.status == 0, peer.output
        assert f"peer: {REASON}" in peer.output
        seconds = int(peer.output.split("after ")[1].split(" s")[0])
        assert seconds <= 5, peer.output


def test_a_process_that_nothing_can_wake_ends_with_the_reason() -> None:
    blocked, failed = launch(WORKER, 2, "blocked")
    assert "own: FileNotFoundError" in failed.output
    assert blocked.status == 1
    assert REASON in blocked.output
    assert "CRITICAL rank 0 is still blocked" in blocked.output


def test_an_exit_in_a_stage_is_a_failure() -> None:
    first, failed = launch(WORKER, 2, "exits")
    expected = (
        "own: RuntimeError; setup failed on rank 1 in stage 'second': RuntimeError: the process was asked to end, "
        "with status 3"
    )
    assert expected in failed.output
    assert "peer: setup failed on rank 1" in first.output


def test_a_rank_that_is_done_waits_for_the_others() -> None:
    first, failed = launch(WORKER, 2, "last")
    assert "own: ValueError; setup failed on rank 1 in stage 'third'" in failed.output
    assert "peer: setup failed on rank 1 in stage 'third': ValueError: only here. To try: try again" in first.output


def test_all_is_well() -> None:
    ranks = launch(WORKER, 3, "well")
    for rank, (status, output) in enumerate(ranks):
        assert status == 0, output
        assert f"s on rank {rank} of 3; weights: as initialised" in output
        assert "slowest: [True, True]" in output
    tables = [output.count("INFO setup: set up in") for _, output in ranks]
    assert tables == [2, 0, 0]


@pytest.mark.parametrize("case", ["well"])
def test_one_rank_needs_no_watch(case: str) -> None:
    ((status, output),) = launch(WORKER, 1, case)
    assert status == 0, output
    assert "rank 0 of" not in output
