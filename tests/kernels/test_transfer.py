"""Transfer of weights that lie on the CPU: the same jobs, with no wire between."""

from __future__ import annotations

import pytest
import torch
from transfer_cases import check_written, flip_bits, random_jobs

from megasetup import kernels
from megasetup.kernels import Comparison, CopyJob, Transfer, plain

CPU = torch.device("cpu")
EQUAL = Comparison(0, 0, -1, -1)


@pytest.mark.parametrize("seed", range(5))
def test_random_jobs(seed: int) -> None:
    jobs = random_jobs(seed, "cpu")
    transfer = Transfer(jobs, CPU)
    for _ in range(2):
        stats = transfer.run()
        check_written(jobs)
        for job in jobs:
            if job.device_target is not None:
                job.device_target.fill_(7.0)
    assert 0.0 <= stats.device_seconds <= stats.seconds
    assert stats.staged_elements == stats.direct_elements == stats.staged_wire_bytes == stats.direct_wire_bytes == 0
    assert stats.wire_bandwidth == 0.0
    assert stats.threads == kernels.get_num_threads()
    transfer.run()
    assert all(result.device == EQUAL and result.host is None for result in transfer.compare())
    assert flip_bits(jobs, seed) > 0
    for job, result in zip(jobs, transfer.compare(), strict=True):
        assert job.device_target is not None
        assert result.device == Comparison(*plain.compare_one(job.source, job.device_target))


def test_no_jobs_and_jobs_without_targets() -> None:
    assert Transfer([], CPU).compare() == []
    Transfer([], CPU).run()
    transfer = Transfer([CopyJob(torch.ones(3), None, None)], CPU)
    transfer.run()
    assert transfer.compare() == [(None, None)]


def test_a_dtype_pair_that_no_copy_has_is_refused() -> None:
    target = torch.zeros(3, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"torch\.float16 cannot hold a weight of dtype torch\.bfloat16"):
        Transfer([CopyJob(torch.ones(3, dtype=torch.bfloat16), target, None)], CPU)
    assert not target.any()
