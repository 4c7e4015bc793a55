"""How many bytes of a checkpoint this process reads, counted where they are read.

What a load reads is decided in many places: whose share a rank loads for others, what the optimizer asks for, what a
checkpoint lacks. torch's reader of distributed checkpoints sees all of it, as parts of files.

Needed for as long as no version of torch or Megatron says what a load read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.filesystem import FileSystemReader


@dataclass
class Reads:
    """What has been read so far.

    Attributes:
        bytes: bytes on disk, each counted as often as it was read.
    """

    bytes: int = 0


@contextmanager
def counting_reads() -> Iterator[Reads]:
    """Count what FileSystemReader, and Megatron's readers that are made of it, read while the block runs.

    It holds for the whole process, so no other thread should be loading meanwhile.
    """
    reads = Reads()
    read_data = FileSystemReader.read_data

    def counted(self: Any, plan: Any, planner: Any) -> Any:
        reads.bytes += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return read_data(self, plan, planner)

    with mock.patch.object(FileSystemReader, "read_data", counted):
        yield reads
