"""Transfer: one list of copy jobs, checked and prepared once, run or audited any number of times.

A job takes one weight to its copies: a target on the weight's own device (an FP32 GPU shard) and a target on the host
(the clone that the CPU optimizer steps against). With GPU weights and the compiled module this is the pipeline of
csrc/transfer/: each weight is read once, 16-bit values cross the wire, and CPU threads widen them while the next chunk
travels; when the CPU is behind, chunks cross as FP32 straight into pinned targets instead.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megasetup.kernels import native, plain
from megasetup.kernels.convert import Comparison, compare, widen
from megasetup.kernels.rows import kind_of


class CopyJob(NamedTuple):
    """One weight and where its copies lie.

    Attributes:
        source: the weight: contiguous bfloat16, float16 or float32, on the transfer's device.
        device_target: a contiguous copy (float32 or the source's dtype, same element count) on that device, or None.
        host_target: the same on the CPU, pinned or not, for a source on a GPU, or None. A CPU source has none.
    """

    source: torch.Tensor
    device_target: torch.Tensor | None
    host_target: torch.Tensor | None


@dataclass(frozen=True)
class TransferStats:
    """What one run moved, and how.

    Attributes:
        seconds: wall time from the call to the last write.
        device_seconds: from the start until the last device target was written.
        staged_elements: elements that crossed the wire in the weight's own dtype and were converted by the CPU.
        staged_wire_bytes: the bytes of those on the wire.
        direct_elements: elements that the GPU's copy engine wrote into host targets as they are there.
        direct_wire_bytes: the bytes of those on the wire.
        wire_bandwidth: bytes a second that the wire moved, device to host, when the transfer was prepared;
            0.0 where there is no wire (CPU weights) or it was not measured (plain torch).
        threads: CPU threads that converted.
    """

    seconds: float
    device_seconds: float
    staged_elements: int
    staged_wire_bytes: int
    direct_elements: int
    direct_wire_bytes: int
    wire_bandwidth: float
    threads: int


@dataclass(frozen=True)
class ComparisonStats:
    """Which way the elements of host targets went in a comparison; each counts once.

    Attributes:
        digested_elements: read by CPU threads and held against the GPU's digests: no weight crossed the wire for them.
        returned_elements: brought to the GPU by the copy engine and compared there.
        staged_elements: compared by the CPU with weights that crossed the wire: their digests left them in doubt.
    """

    digested_elements: int
    returned_elements: int
    staged_elements: int


class JobComparison(NamedTuple):
    """How one job's copies compare with its weight; None where the job has no such target."""

    device: Comparison | None
    host: Comparison | None


class Transfer:
    """Copy jobs of one device, ready to run.

    Args:
        jobs: any number of jobs whose sources all lie on `device`. The caller has checked them (see masters/plan.py).
        device: where the sources lie; a CUDA device or the CPU.
        chunk_elements: elements that cross the wire at a time. The default suits PCIe 5.

    Attributes:
        comparison_stats: which way the last compare() went; None before the first, and without the compiled pipeline.

    Raises:
        TypeError: a dtype pair that no copy can have.
        RuntimeError: staging memory cannot be had, with the CUDA runtime's reason.
    """

    def __init__(self, jobs: Sequence[CopyJob], device: torch.device, *, chunk_elements: int = 4 * 1024 * 1024) -> None:
        self._jobs = list(jobs)
        self._device = device
        self._pipeline: Any = None
        self.comparison_stats: ComparisonStats | None = None
        module = native.for_device(device)
        if module is None or device.type != "cuda":
            for source, *targets in self._jobs:
                for target in targets:
                    if target is not None:
                        kind_of(source.dtype, target.dtype)
        else:
            rows: array[int] = array("q")
            for source, near, far in self._jobs:
                if near is not None and far is not None and near.dtype != far.dtype:
                    # One row converts one way; copies of different dtypes take a row each.
                    rows.extend(self._row(source, near, None))
                    rows.extend(self._row(source, None, far))
                else:
                    rows.extend(self._row(source, near, far))
            self._pipeline = module.transfer.Pipeline(device.index, rows, chunk_elements)

    @staticmethod
    def _row(source: torch.Tensor, near: torch.Tensor | None, far: torch.Tensor | None) -> tuple[int, ...]:
        copy = near if near is not None else far
        return (
            kind_of(source.dtype, source.dtype if copy is None else copy.dtype),
            source.data_ptr(),
            0 if near is None else near.data_ptr(),
            0 if far is None else far.data_ptr(),
            source.numel(),
        )

    def run(self) -> TransferStats:
        """Write every target. Returns when the last byte is written.

        Raises:
            RuntimeError: a CUDA call failed; targets are then partly written and the run may be repeated.
            KeyboardInterrupt: Ctrl-C; the same holds.
        """
        if self._pipeline is not None:
            stream = int(torch.cuda.current_stream(self._device).cuda_stream)
            return TransferStats(**self._pipeline.run(stream))
        start = time.perf_counter()
        near = [(job.source, job.device_target) for job in self._jobs if job.device_target is not None]
        widen([source for source, _ in near], [target for _, target in near])
        far = [(job.source, job.host_target) for job in self._jobs if job.host_target is not None]
        plain.widen([source for source, _ in far], [target for _, target in far])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        elements = sum(target.numel() for _, target in far)
        wire = sum(target.numel() * target.element_size() for _, target in far)
        return TransferStats(seconds, seconds, 0, 0, elements, wire, 0.0, native.get_num_threads())

    def compare(self) -> list[JobComparison]:
        """Compare every target with its weight, and write nothing.

        A healthy host target is read by the CPU alone and held against digests that the GPU makes of its weight, while
        the copy engine brings other targets, pinned ones, to the GPU. Counts and indices are exact. Among 4,096
        elements of a 16-bit weight, one or two that differ are never missed; more of them with a probability below
        2^-26 (docs/audit.md has the argument).

        Returns:
            One JobComparison a job, in order.

        Raises:
            RuntimeError: a CUDA call failed.
            KeyboardInterrupt: Ctrl-C.
        """
        if self._pipeline is not None:
            return self._compare_in_pipeline()
        near = [(job.source, job.device_target) for job in self._jobs if job.device_target is not None]
        near_results = iter(compare([source for source, _ in near], [target for _, target in near]))
        return [
            JobComparison(
                None if job.device_target is None else next(near_results),
                None if job.host_target is None else Comparison(*plain.compare_one(job.source, job.host_target)),
            )
            for job in self._jobs
        ]

    def _compare_in_pipeline(self) -> list[JobComparison]:
        stream = int(torch.cuda.current_stream(self._device).cuda_stream)
        rows, ways = self._pipeline.compare(stream)
        self.comparison_stats = ComparisonStats(**ways)
        results = iter(rows)  # a (device, host) pair of results a row
        comparisons = []
        for job in self._jobs:
            near, far = next(results)
            near_target, far_target = job.device_target, job.host_target
            if near_target is not None and far_target is not None and near_target.dtype != far_target.dtype:
                _, far = next(results)
            comparisons.append(
                JobComparison(
                    None if job.device_target is None else Comparison(*near),
                    None if job.host_target is None else Comparison(*far),
                )
            )
        return comparisons
