"""What a setup's report says, as a table and as JSON, and what a stage notes in it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from megasetup.model.report import SetupReport, Stage
from megasetup.model.stages import Stages


def test_the_table_of_one_rank() -> None:
    report = SetupReport(weights="pretrained, /a", stages=[Stage("model", 2.0, 4_000_000_000), Stage("load", 0.5)])
    assert str(report).splitlines() == [
        "set up in 2.50 s; weights: pretrained, /a",
        "  stage     s       MB  GB/s",
        "  model  2.00  4,000.0   2.0",
        "  load   0.50        -     -",
    ]


def test_the_table_of_several_ranks_names_the_slowest() -> None:
    report = SetupReport(rank=1, world_size=3, stages=[Stage("model", 1.0), Stage("load", 1.0)])
    report.set_slowest({0: {"model": 1.0, "load": 9.0}, 1: {"model": 1.0, "load": 1.0}, 2: {"model": 3.5}})
    assert str(report).splitlines() == [
        "set up in 2.00 s on rank 1 of 3; weights: as initialised",
        "  stage     s  MB  GB/s  slowest rank  s there",
        "  model  1.00   -     -             2     3.50",
        "  load   1.00   -     -             0     9.00",
    ]


def test_json(tmp_path: Path) -> None:
    report = SetupReport(stages=[Stage("model", 2.0, 8, 0, 2.0)])
    file = tmp_path / "new" / "report.json"
    report.write_json(file)
    assert json.loads(file.read_text()) == {
        "rank": 0,
        "world_size": 1,
        "weights": "as initialised",
        "seconds": 2.0,
        "stages": [{"name": "model", "seconds": 2.0, "bytes": 8, "slowest_rank": 0, "slowest_seconds": 2.0}],
        "sync": None,
        "ensure": None,
        "audit": None,
    }


def test_a_stage_is_timed_and_notes_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    report = SetupReport()
    with (
        caplog.at_level(logging.INFO, logger="megasetup"),
        Stages("setup", report) as stages,
        stages.stage("model", "nothing") as stage,
    ):
        stage.bytes = 12
    (entry,) = report.stages
    assert (entry.name, entry.bytes) == ("model", 12)
    assert 0 < entry.seconds < 1
    assert caplog.records[-1].getMessage() == f"setup: {report}"


def test_a_failure_keeps_its_type_and_gains_place_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    report = SetupReport()
    with (
        pytest.raises(KeyError, match="lost") as caught,
        Stages("setup", report) as stages,
        stages.stage("load", "look for it"),
    ):
        raise KeyError("lost")
    note = "setup failed on rank 0 in stage 'load': KeyError: 'lost'. To try: look for it"
    assert caught.value.__notes__ == [note]
    assert note in caplog.text
    assert report.stages == []
