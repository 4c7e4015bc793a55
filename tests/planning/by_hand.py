"""Buffers small enough to be counted by hand."""

import torch

from megasetup.planning.buffers import Buffer, Owned, StageBuffers


def buffer_of(lengths, *, groups=None, dtype=torch.bfloat16, gradient=torch.float32, expert=False, shards=1) -> Buffer:
    """A buffer of one bucket whose parameters have these lengths, without padding."""
    ends = torch.tensor(lengths).cumsum(0)
    total = int(ends[-1])
    return Buffer(
        parameter_dtype=dtype,
        gradient_dtype=gradient,
        expert=expert,
        elements=total,
        shards=shards,
        start=ends - torch.tensor(lengths),
        end=ends,
        shard_start=torch.zeros(len(lengths), dtype=torch.int64),
        shard_size=torch.full((len(lengths),), total // shards),
        group=torch.tensor(groups or [0] * len(lengths)),
    )


def owned_of(*buffers, fraction, shard=0, expert=False) -> Owned:
    """What a stage of these buffers gives one rank."""
    return StageBuffers(tuple(buffers), 0, 0).owned(shard, expert=expert, fraction=fraction)
