"""Random copy jobs for the tests of Transfer, and what must stand in their targets afterwards."""

from __future__ import annotations

import random

import torch
from bits import random_bits, same_bits, widened

from megasetup.kernels import CopyJob

COUNTS = [0, 1, 2, 7, 33, 1000, 1023, 1024, 1025, 4097, 65_537, 300_001]


def place(count: int, dtype: torch.dtype, offset: int, *, device: str = "cpu", pinned: bool = False) -> torch.Tensor:
    """Memory of a target: `offset` elements into an allocation, filled with a value that no run writes."""
    memory = torch.full((count + offset,), 7.0, dtype=dtype, device=device, pin_memory=pinned)
    return memory[offset:]


def random_jobs(seed: int, device: str, *, jobs: int = 60) -> list[CopyJob]:
    """Weights of every dtype and their copies: FP32 or the weight's own dtype, on either side or both, at odd offsets,
    pinned or pageable."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(jobs):
        dtype = pick.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        count = pick.choice(COUNTS)
        source = place(count, dtype, pick.randrange(9), device=device)
        source.copy_(random_bits(count, dtype, generator))
        near = pick.random() < 0.6
        far = device != "cpu" and (not near or pick.random() < 0.7)
        made.append(
            CopyJob(
                source,
                place(count, pick.choice([dtype, torch.float32]), pick.randrange(9), device=device)
                if near or not far
                else None,
                place(count, pick.choice([dtype, torch.float32]), pick.randrange(9), pinned=pick.random() < 0.5)
                if far
                else None,
            )
        )
    return made


def check_written(jobs: list[CopyJob]) -> None:
    """Every target holds its weight, bit for bit."""
    for index, (source, *targets) in enumerate(jobs):
        for target in targets:
            if target is not None:
                expected = source if target.dtype == source.dtype else widened(source)
                where = f"job {index}: {source.dtype} into {target.dtype} on {target.device}"
                assert same_bits(target, expected), where


def flip_bits(jobs: list[CopyJob], seed: int) -> int:
    """Flip a few bits in about half the targets; returns how many targets."""
    pick = random.Random(seed)
    flipped = 0
    for _, *targets in jobs:
        for target in targets:
            if target is None or target.numel() == 0 or pick.random() < 0.5:
                continue
            integers = target.view(torch.int32 if target.element_size() == 4 else torch.int16)
            for _ in range(pick.randrange(1, 9)):
                integers[pick.randrange(target.numel())] ^= 1 << pick.randrange(8 * target.element_size() - 1)
            flipped += 1
    return flipped
