"""What a plan says: of each rank, of each node, of the run, and whether that fits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

from megasetup.planning.memory import Item, OptimizerMemory, gpu_bytes, host_bytes
from megasetup.planning.sync_time import Rates, SyncTime
from megasetup.planning.world import ParallelSizes, Place


@dataclass(frozen=True)
class Limits:
    """What a rank and a node have, in bytes.

    Attributes:
        gpu: memory of one GPU.
        host: memory of one node.
        source: where these figures come from, for the reader.
    """

    gpu: int = 150_109_880_320
    host: int = 2_000_000_000_000
    source: str = "DGX H200: 150.1 GB a GPU, 2 TB a node"


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds.

    Attributes:
        place: where it stands.
        node: its node.
        parameters: elements of the parameters that it holds.
        items: what it holds, in order; names are unique per place in memory.
        sync: the time of its sync.
    """

    place: Place
    node: int
    parameters: int
    items: tuple[Item, ...]
    sync: SyncTime

    @property
    def gpu(self) -> int:
        """Bytes on its GPU."""
        return gpu_bytes(list(self.items))

    @property
    def host(self) -> int:
        """Bytes of its node's memory."""
        return host_bytes(list(self.items))

    @property
    def pinned(self) -> int:
        """Of `host`, what is pinned."""
        return host_bytes(list(self.items), pinned=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            **self.place._asdict(),
            "node": self.node,
            "parameters": self.parameters,
            "gpu_bytes": self.gpu,
            "host_bytes": self.host,
            "pinned_bytes": self.pinned,
            "sync_seconds": self.sync.seconds,
            "sync_bound": self.sync.bound,
            "items": [item._asdict() for item in self.items],
        }


@dataclass(frozen=True)
class NodePlan:
    """What one node's ranks hold together.

    Attributes:
        node: its number.
        ranks: how many it has.
        gpu, host, pinned: bytes; `gpu` over all its GPUs.
    """

    node: int
    ranks: int
    gpu: int
    host: int
    pinned: int


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        parameters: of the whole model, each counted once, without the vocabulary's padding.
        sizes: how the run is split.
        optimizer: what the optimizer's settings say about memory.
        ranks: of every rank, by rank.
        nodes: of every node.
        limits, rates: what they are held against.
        notes: what the reader should know: what is not counted, and why.
    """

    parameters: int
    sizes: ParallelSizes
    optimizer: OptimizerMemory
    ranks: tuple[RankPlan, ...]
    nodes: tuple[NodePlan, ...]
    limits: Limits
    rates: Rates
    notes: tuple[str, ...]

    @property
    def heaviest(self) -> RankPlan:
        """The rank with the most on its GPU; of equals, the most on its host, then the first."""
        return max(self.ranks, key=lambda rank: (rank.gpu, rank.host, -rank.place.rank))

    @property
    def heaviest_node(self) -> NodePlan:
        """The node with the most in its memory; of equals, the first."""
        return max(self.nodes, key=lambda node: (node.host, -node.node))

    @property
    def slowest_sync(self) -> SyncTime:
        """The sync that the others wait for."""
        return max((rank.sync for rank in self.ranks), key=lambda sync: sync.seconds)

    def heaviest_of_stages(self) -> list[RankPlan]:
        """The rank with the most on its GPU of each pipeline stage, by stage."""
        stages: dict[int, list[RankPlan]] = defaultdict(list)
        for rank in self.ranks:
            stages[rank.place.stage].append(rank)
        return [
            max(stages[stage], key=lambda rank: (rank.gpu, rank.host, -rank.place.rank)) for stage in sorted(stages)
        ]

    @property
    def fits_gpu(self) -> bool:
        """No rank holds more than a GPU has. Activations are not counted."""
        return self.heaviest.gpu <= self.limits.gpu

    @property
    def fits_host(self) -> bool:
        """No node's ranks hold more than it has."""
        return self.heaviest_node.host <= self.limits.host

    @property
    def fits(self) -> bool:
        return self.fits_gpu and self.fits_host

    def with_notes(self, *notes: str) -> RunPlan:
        """The same plan with more to know."""
        return replace(self, notes=(*self.notes, *notes))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: every node, and each stage's heaviest rank."""
        return {
            "parameters": self.parameters,
            "sizes": asdict(self.sizes),
            "optimizer": asdict(self.optimizer),
            "heaviest_rank": self.heaviest.to_dict(),
            "heaviest_rank_of_each_stage": [rank.to_dict() for rank in self.heaviest_of_stages()],
            "nodes": [asdict(node) for node in self.nodes],
            "heaviest_node": asdict(self.heaviest_node),
            "sync_seconds": self.slowest_sync.seconds,
            "sync_bound": self.slowest_sync.bound,
            "limits": asdict(self.limits),
            "rates": asdict(self.rates),
            "fits_gpu": self.fits_gpu,
            "fits_host": self.fits_host,
            "fits": self.fits,
            "notes": list(self.notes),
        }
