"""The process group made and unmade: alone, as several ranks, again and again, with what earlier runs left behind."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ended, bare_environment, free_port, launch

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

from megasetup.config.environment import VARIABLES
from megasetup.model.distributed import destroy_parallel_state, setup_distributed

WORKER = Path(__file__).with_name("distributed_worker.py")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo is for machines without a GPU")


def result_of(ended: Ended) -> dict[str, Any]:
    assert ended.status == 0, ended.output
    result: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    return result


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that nothing launched, and nothing initialised before or after."""
    before = dict(os.environ)
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    yield
    destroy_parallel_state()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@no_gpu
def test_one_process_twice_in_a_row(bare: None) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="its process group is gloo"):
            setup_distributed({})
        assert dist.get_backend() == "gloo"
        assert dist.get_world_size() == 1
        parallel_state.initialize_model_parallel()
    destroy_parallel_state()
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    destroy_parallel_state()


@no_gpu
def test_two_ranks_again_and_again() -> None:
    for ended in launch(WORKER, 2, "again"):
        assert result_of(ended) == {
            "sums": [3.0] * 5,
            "sizes": [1, 2, 1, 2, 1],
            "initialized": False,
            "megatron": False,
            "warned": 1,
        }


@no_gpu
def test_several_ranks() -> None:
    for rank, ended in enumerate(launch(WORKER, 4, "ready")):
        assert result_of(ended) == {
            "backend": "gloo",
            "rank": rank,
            "world": 4,
            "sum": 10.0,
            "cache": False,
            "allocator": "0",
            "warned": 1,
        }


@no_gpu
def test_two_nodes_under_slurm() -> None:
    """Slurm's variables alone, two tasks on each of two nodes; the nodes are this machine twice."""
    environment = bare_environment() | {"SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "127.0.0.1"}
    environment["SLURM_JOB_ID"] = str(70_000 + free_port() % 10_000)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "ready"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment
            | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % 2), "SLURM_NODEID": str(task // 2)},
        )
        for task in range(4)
    ]
    for rank, process in enumerate(ranks):
        output = process.communicate(timeout=120)[0]
        result = result_of(Ended(process.returncode, output))
        assert (result["rank"], result["world"], result["sum"]) == (rank, 4, 10.0)


@no_gpu
def test_under_torchrun_again_and_again() -> None:
    """torchrun's store outlives the process group, with all its keys."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*torchrun, str(WORKER), "again"],
        capture_output=True,
        text=True,
        timeout=150,
        env=bare_environment() | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # (Two ranks write to one pipe, so that a line may hold both.)
    results = [json.loads(found) for found in re.findall(r"\{.*?\}", done.stdout)]
    assert [result["sums"] for result in results] == [[3.0] * 5] * 2


@no_gpu
def test_a_rank_that_died_does_not_keep_the_other(tmp_path: Path) -> None:
    first, _ = launch(WORKER, 2, "dead")
    assert result_of(first)["initialized"] is False


def unfinished(queue: AsyncCallsQueue) -> None:
    """A save that is scheduled and not finalized. It has nothing to write, so that no writer process is started."""
    queue.schedule_async_request(AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[]))


def test_unfinished_saves_are_counted_and_the_queue_is_fresh(caplog: pytest.LogCaptureFixture) -> None:
    state = SimpleNamespace(_async_calls_queue=AsyncCallsQueue())
    queue = state._async_calls_queue
    unfinished(queue)
    unfinished(queue)
    with pytest.warns(UserWarning, match="2 asynchronous checkpoint saves were unfinished"):
        destroy_parallel_state(state)
    assert state._async_calls_queue is not queue
    assert state._async_calls_queue.call_idx == -1
    assert state._async_calls_queue.get_num_unfinalized_calls() == 0


def test_a_finished_queue_is_renewed_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    state = SimpleNamespace(_async_calls_queue=AsyncCallsQueue())
    state._async_calls_queue.call_idx = 7
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        destroy_parallel_state(state)
    assert state._async_calls_queue.call_idx == -1
    assert not caplog.records


def test_a_queue_that_will_not_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(AsyncCallsQueue):
        def close(self, abort: bool = False) -> None:
            raise OSError("the writer is gone")

    state = SimpleNamespace(_async_calls_queue=Broken())
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        destroy_parallel_state(state)
    assert "OSError: the writer is gone" in caplog.text
