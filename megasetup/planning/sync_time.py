"""How long a sync of every FP32 copy takes, from the bandwidths that bound it.

Three things bound it, and the slowest decides: the wire, which carries an offloaded 16-bit element in 2 bytes; the
host, whose memory and cores the ranks of a node share; and the GPU's memory, which level 1 is written to. The defaults
are figures of one H200 host and of two ranks on it (benchmarks/); a plan for another machine measures them there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Of the wire's limit, what the pipeline reaches on large tensors (benchmarks/results/sync-h200.txt).
_WIRE_SHARE = 0.955


@dataclass(frozen=True)
class Rates:
    """What bounds a sync.

    Attributes:
        wire: bytes a second from a GPU into pinned host memory.
        host: elements a second that all ranks of one node together widen into memory.
        device: bytes a second, read and written together, of the GPU's memory.
        source: where these figures come from, for the reader.
    """

    wire: float = 55.4e9
    host: float = 35e9
    device: float = 3.83e12
    source: str = "measured on H200 hosts (PCIe 5 x16)"


class SyncTime(NamedTuple):
    """An estimate.

    Attributes:
        seconds: of the rank's whole sync.
        bound: what decides it: "wire", "host" or "device"; "" when there is nothing to do.
    """

    seconds: float
    bound: str


def sync_time(*, wire_bytes: int, host_elements: int, device_elements: int, ranks: int, rates: Rates) -> SyncTime:
    """Time of a rank's sync while every rank of its node runs its own.

    Args:
        wire_bytes: bytes that cross to the host: 2 an offloaded 16-bit element, 4 an FP32 one.
        host_elements: offloaded elements.
        device_elements: elements of the FP32 GPU shards: 2 bytes read and 4 written each.
        ranks: of the node.
        rates: what bounds it.
    """
    if not host_elements and not device_elements:
        return SyncTime(0.0, "")
    bounds = {
        "wire": wire_bytes / (rates.wire * _WIRE_SHARE),
        "host": host_elements * ranks / rates.host,
        "device": device_elements * 6 / rates.device,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    return SyncTime(bounds[bound], bound)
