"""Resume of real DistributedOptimizers over distributed checkpoints, with and without Transformer Engine's path.

On a stand-in for a GPU (cpu_as_gpu.py), so that all is stepped on the host; test_hybrid_gpu.py has the same on GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from resume_cases import OF_TWO_RANKS, SYNCHRONOUS, Case
from resume_runs import assert_resumed, run

pytestmark = [
    pytest.mark.filterwarnings("ignore", "error:megasetup"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_hybrid_gpu.py has the same on it"),
]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("plain"), 1, "resume_cpu_worker.py", "plain")


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("te"), 2, "resume_cpu_worker.py", "te")


@pytest.mark.parametrize("case", SYNCHRONOUS, ids=lambda case: case.name)
def test_without_transformer_engine(case: Case, of_one_rank: Path) -> None:
    assert_resumed(of_one_rank, case, 1)


@pytest.mark.parametrize("case", OF_TWO_RANKS, ids=lambda case: case.name)
def test_with_expert_parallelism(case: Case, of_two_ranks: Path) -> None:
    assert_resumed(of_two_ranks, case, 2)
