"""Gradients to the host and parameters back, chunk by chunk, beside the CPU optimizer.

The CPU Adam is bound by host memory: it reads and writes 28 bytes an element (weight, gradient and two moments read;
weight and moments written). What the traffic adds to that, in bytes of host memory an element and a direction:

    FP32 over the wire, converted on the GPU: 4, the copy engine's write or read
    16-bit over the wire, converted on the CPU: 8, 2 by the copy engine, 2 + 4 by the conversion

So values cross as FP32 and the GPU converts, both ways, although the wire then carries twice the bytes: it moves 13.8 G
elements/s, three times what Adam can step. In all 36 bytes an element, 1.29 times the Adam alone. Less comes from
memory where the copy engine's write and Adam's read meet in the processor's last cache, and Adam's write and the copy
engine's read: the gradients of all buckets pass through the same few short buffers.

Each direction has a stream and one staging buffer on the GPU, which the stream's own order protects: conversion into
it, copy out of it, the next conversion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megasetup import kernels
from megasetup.masters.hybrid_buckets import Chunk
from megasetup.masters.hybrid_slices import SlicedMaster

_CONVERTED = (torch.bfloat16, torch.float16, torch.float32)


class Row(NamedTuple):
    """A parameter that is stepped on the host, or the slice of one that is stepped in one bucket.

    Attributes:
        param: the hybrid optimizer's parameter, whole, any shape.
        master: what the CPU optimizer holds for it: on the host, the same shape; the parameter itself where that lies
            on the host and needs no copy.
        first, last: the elements of both that this is.
        stepped: the tensor that is stepped: the master, or a flat slice of it.
        grad: the gradient buffer, the shape and dtype of `stepped`; None where the master is the parameter itself.
    """

    param: torch.Tensor
    master: torch.Tensor
    first: int
    last: int
    stepped: torch.Tensor
    grad: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Bucket:
    """What is stepped at a time.

    Attributes:
        rows: the parameters.
        chunks: how their values travel; none where masters are the parameters themselves.
        masters, grads: the runs of host memory in which the rows' masters and gradient buffers lie, flat.
        lane: what moves them.
        optimizer: the sub-optimizer that holds the masters.
        sliced: what steps the one row in place of the optimizer, where it is a slice.
    """

    rows: tuple[Row, ...]
    chunks: tuple[Chunk, ...]
    masters: torch.Tensor
    grads: torch.Tensor
    lane: Lane
    optimizer: torch.optim.Optimizer
    sliced: SlicedMaster | None = None


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient to step with: Megatron's precision-aware mode keeps it beside .grad, in the dtype it was reduced."""
    decoupled: torch.Tensor | None = getattr(param, "decoupled_grad", None)
    return param.grad if decoupled is None else decoupled


def can_be_cut(param: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether kernels may convert between the two as flat memory; torch copies what they may not."""
    return param.is_contiguous() and param.dtype in _CONVERTED and master.dtype == torch.float32


class Lane(Protocol):
    """Moves the values of one device's parameters."""

    def begin(self) -> None:
        """Get ready for a step; what the caller's stream has queued so far comes first."""

    def fetch(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> torch.cuda.Event | None:
        """Start to bring gradients (one a row, None for none) into the bucket's buffers; the event says when all came.

        None where they are there already.
        """

    def send(self, bucket: Bucket) -> None:
        """Start to write the bucket's masters into its parameters."""

    def end(self) -> None:
        """Make the caller's stream wait for all that was started."""

    def settle(self) -> None:
        """Wait until nothing is under way, so that host memory may be written; what has failed is over, too."""


def staging_for(buckets: Iterable[Bucket]) -> int:
    """Elements of the longest chunk that is converted on the GPU, or gathered there; FP32 tensors cross as they are."""
    longest = 0
    for bucket in buckets:
        for chunk in bucket.chunks:
            row = bucket.rows[chunk.parts[0].row]
            converted = row.param.dtype != row.master.dtype and can_be_cut(row.param, row.master)
            if converted or len(chunk.parts) > 1:
                longest = max(longest, chunk.end - chunk.start)
    return longest


def _run(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Elements [first, last) of a tensor, flat."""
    flat = tensor.reshape(-1)
    return flat if last - first == len(flat) else flat[first:last]


class HostLane:
    """Parameters that lie on the host: their values are converted by the CPU, at once."""

    def begin(self) -> None:
        pass

    def fetch(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
        sources, targets = [], []
        for row, gradient in zip(bucket.rows, gradients, strict=True):
            if gradient is None or row.grad is None:
                continue
            if can_be_cut(gradient, row.grad):
                sources.append(_run(gradient, row.first, row.last))
                targets.append(row.grad)
            else:
                row.grad.view(-1).copy_(_run(gradient, row.first, row.last))
        kernels.widen(sources, targets)

    def send(self, bucket: Bucket) -> None:
        sources, targets = [], []
        for row in bucket.rows:
            if row.master is row.param:
                continue
            if can_be_cut(row.param, row.master):
                sources.append(row.stepped)
                targets.append(_run(row.param.detach(), row.first, row.last))
            else:
                row.param.detach().copy_(row.master)
        kernels.narrow(sources, targets)

    def end(self) -> None:
        pass

    def settle(self) -> None:
        pass


class WireLane:
    """Parameters on a GPU.

    Args:
        device: the GPU.

    Attributes:
        staging_elements: elements of each direction's staging buffer; staging_for() says how many.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.staging_elements = 0
        self.to_host = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.to_device = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging_down = self._staging_up = torch.empty(0)

    def begin(self) -> None:
        # Taken from the allocator for one step: between steps nothing is held, and the next forward pass finds it free.
        self._staging_down = torch.empty(self.staging_elements, device=self.device)
        self._staging_up = torch.empty(self.staging_elements, device=self.device)
        caller = torch.cuda.current_stream(self.device)
        self.to_host.wait_stream(caller)
        self.to_device.wait_stream(caller)

    def fetch(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> torch.cuda.Event:
        with torch.cuda.stream(self.to_host):
            for chunk in bucket.chunks:
                self._fetch_chunk(bucket, chunk, gradients)
            event: torch.cuda.Event = self.to_host.record_event()
        return event

    def _fetch_chunk(self, bucket: Bucket, chunk: Chunk, gradients: Sequence[torch.Tensor | None]) -> None:
        sources, targets = [], []
        staging = self._staging_down
        is_staged = False
        alone = len(chunk.parts) == 1
        for part in chunk.parts:
            row, gradient = bucket.rows[part.row], gradients[part.row]
            if gradient is None or row.grad is None:
                continue
            run = _run(gradient, row.first + part.first, row.first + part.last)
            start, length = part.offset, part.last - part.first
            if (
                (alone and gradient.dtype == row.grad.dtype)
                or row.grad.dtype != torch.float32
                or chunk.end - chunk.start > len(staging)
            ):
                bucket.grads[chunk.start + start : chunk.start + start + length].copy_(run, non_blocking=True)
                continue
            is_staged = True
            if gradient.dtype in _CONVERTED:
                sources.append(run)
                targets.append(staging[start : start + length])
            else:
                staging[start : start + length].copy_(run)
        if is_staged:
            kernels.widen(sources, targets)
            bucket.grads[chunk.start : chunk.end].copy_(staging[: chunk.end - chunk.start], non_blocking=True)

    def send(self, bucket: Bucket) -> None:
        with torch.cuda.stream(self.to_device):
            for chunk in bucket.chunks:
                self._send_chunk(bucket, chunk)

    def _send_chunk(self, bucket: Bucket, chunk: Chunk) -> None:
        staging = self._staging_up
        first_row = bucket.rows[chunk.parts[0].row]
        if len(chunk.parts) == 1 and not can_be_cut(first_row.param, first_row.master):
            first_row.param.detach().copy_(first_row.master, non_blocking=True)
            return
        targets = []
        for part in chunk.parts:
            row = bucket.rows[part.row]
            targets.append(_run(row.param.detach(), row.first + part.first, row.first + part.last))
        masters = bucket.masters[chunk.start : chunk.end]
        if len(targets) == 1 and targets[0].dtype == masters.dtype:
            targets[0].copy_(masters, non_blocking=True)
        else:
            staging[: len(masters)].copy_(masters, non_blocking=True)
            kernels.narrow(
                [staging[part.offset : part.offset + part.last - part.first] for part in chunk.parts], targets
            )

    def end(self) -> None:
        caller = torch.cuda.current_stream(self.device)
        caller.wait_stream(self.to_host)
        caller.wait_stream(self.to_device)
        # Freed to the caller's stream, which now comes after both.
        self._staging_down = self._staging_up = torch.empty(0)

    def settle(self) -> None:
        for stream in (self.to_host, self.to_device):
            # A device that has failed moves nothing any more, and says so wherever it is used next.
            with contextlib.suppress(RuntimeError):
                stream.synchronize()
