"""Two data-parallel ranks on two GPUs, each with its own shard, synced at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multigpu

WORKER = Path(__file__).with_name("two_gpus_worker.py")


@pytest.mark.parametrize("mode", ["standard", "precision_aware"])
def test_two_ranks(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    # NVLink multicast is not to be had on every shared host, and nothing here needs it.
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path / "store"), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"rank {rank}: ok" in output
