"""How the parameters that the CPU optimizer steps are grouped, and in which pieces their values travel.

A bucket is what is stepped at a time, several short parameters or a slice of a long one, so that the wire brings the
gradients of the next buckets and takes back the parameters of the last ones meanwhile. Its masters lie one after
another in one run of host memory, and so do its gradients: thousands of small tensors then cross in a few long copies.
A chunk is what crosses at once, which bounds the GPU memory that conversion takes. Sizes are in elements throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# What is stepped at a time: long against what a step costs in Python and in waiting for the last of its threads, short
# enough that the gradients that came over the wire, and the masters that are about to leave over it, may still be in
# the processor's last cache. A quarter of it is 1.2 to 1.5 times slower.
BUCKET_ELEMENTS = 16 * 1024 * 1024
# Buckets whose gradients are on their way while one is stepped. The wire is three times as fast as the CPU's Adam, and
# each takes a buffer.
BUCKETS_AHEAD = 2
# What crosses the wire at a time; as FP32 it takes 64 MiB of GPU memory each way.
CHUNK_ELEMENTS = 16 * 1024 * 1024
# From here on a tensor is a chunk of its own: a copy of 4 MiB keeps the wire busy without company.
LONE_ELEMENTS = 1024 * 1024

_SLICE_STEP = 64  # elements
_ALIGNMENT = 64  # bytes, a cache line: no two tensors share one, and vector loads are aligned


class Part(NamedTuple):
    """A run of one row: its elements [first, last), which lie at `offset` of the chunk."""

    row: int
    first: int
    last: int
    offset: int


class Chunk(NamedTuple):
    """A run [start, end) of a bucket's memory and what lies in it."""

    start: int
    end: int
    parts: tuple[Part, ...]


class Places(NamedTuple):
    """Where each row of a bucket starts, and how long the whole is."""

    starts: tuple[int, ...]
    elements: int


def ring_elements(counts: Sequence[int]) -> int:
    """Elements of the gradient buffers that offloaded tensors of these lengths pass through."""
    runs = [
        last - first
        for indices in group(counts)
        for first, last in slices(sum(counts[index] for index in indices))
        if last > first
    ]
    ordered = large_in_the_middle(runs, lambda run: run)
    return sum(max(ordered[slot :: BUCKETS_AHEAD + 1], default=0) for slot in range(BUCKETS_AHEAD + 1))


def group(counts: Sequence[int], limit: int = BUCKET_ELEMENTS) -> list[list[int]]:
    """Indices of tensors in buckets of at most `limit` elements; a tensor that is longer has a bucket of its own."""
    buckets: list[list[int]] = []
    opened: list[int] = []
    room = 0
    for index, count in enumerate(counts):
        if count > limit:
            buckets.append([index])
            continue
        if not opened or count > room:
            opened = []
            buckets.append(opened)
            room = limit
        opened.append(index)
        room -= count
    return buckets


def slices(count: int, limit: int = BUCKET_ELEMENTS) -> list[tuple[int, int]]:
    """Runs [first, last) of a tensor, about equally long and at most `limit` (rounded up to 64), each from a multiple
    of 64: Adam's vector loop then meets each element as it does in the whole tensor."""
    many = max(1, -(-count // limit))
    step = max(1, -(-count // (many * _SLICE_STEP))) * _SLICE_STEP
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def large_in_the_middle[Item](items: Sequence[Item], size: Callable[[Item], int]) -> list[Item]:
    """The items with the smallest first and last and the largest in between.

    Nothing hides the way of the first bucket to the host and of the last one back.
    """
    ascending = sorted(items, key=size)
    return ascending[0::2] + ascending[1::2][::-1]


def place(counts: Sequence[int], dtype: torch.dtype) -> Places:
    """Lay tensors one after another, each from a 64-byte boundary."""
    step = _ALIGNMENT // dtype.itemsize
    starts, end = [], 0
    for count in counts:
        starts.append(end)
        end += -(-count // step) * step
    return Places(tuple(starts), end)


def cut(counts: Sequence[int], places: Places, whole: Sequence[bool], limit: int = CHUNK_ELEMENTS) -> list[Chunk]:
    """The chunks of a bucket: short tensors together, long ones alone and in pieces.

    Args:
        counts: elements of each row.
        places: where they lie.
        whole: for each row whether it must not be cut, nor share a chunk.
        limit: elements of a chunk, at most; a whole row may exceed it.
    """
    chunks: list[Chunk] = []
    together: list[Part] = []

    def close() -> None:
        if together:
            last = together[-1]
            start = places.starts[together[0].row]
            chunks.append(Chunk(start, start + last.offset + last.last - last.first, tuple(together)))
            together.clear()

    for row, (count, start, entire) in enumerate(zip(counts, places.starts, whole, strict=True)):
        if not count:
            continue
        if entire or count >= LONE_ELEMENTS:
            close()
            step = count if entire else limit
            for first in range(0, count, step):
                last = min(first + step, count)
                chunks.append(Chunk(start + first, start + last, (Part(row, first, last, 0),)))
            continue
        if together and start + count - places.starts[together[0].row] > limit:
            close()
        base = places.starts[together[0].row] if together else start
        together.append(Part(row, 0, count, start - base))
    close()
    return chunks
