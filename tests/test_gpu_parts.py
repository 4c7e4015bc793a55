"""Every test that needs a GPU is in a part of scripts/test_gpu.sh: one in none would never run, and nobody be told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "scripts" / "test_gpu.sh"


@pytest.mark.parametrize(("marker", "gpus"), [("gpu", 1), ("multigpu", 2)])
def test_each_file_with_gpu_tests_is_in_a_part(marker: str, gpus: int) -> None:
    parts = re.findall(rf"^[\w-]+ *\| {gpus} \| (.*)$", SCRIPT.read_text(), re.MULTILINE)
    places = [TESTS.parent / word for part in parts for word in part.split() if word.startswith("tests/")]
    assert places
    assert [str(place) for place in places if not place.exists()] == []
    marked = [file for file in TESTS.rglob("test_*.py") if re.search(rf"\bmark\.{marker}\b", file.read_text())]
    assert marked
    missing = [file for file in marked if not any(file.is_relative_to(place) for place in places)]
    assert [str(file.relative_to(TESTS.parent)) for file in missing] == []
