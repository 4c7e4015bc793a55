"""Makes the whole plan: what every rank and every node of a run holds, and how long a sync takes.

Ranks of one pipeline stage hold the same buffers, and differ only in which share of the optimizer's state is theirs. So
each stage is built once, each share is counted once, and the hundreds of ranks are looked up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from megasetup.planning.buffers import Owned, StageBuffers, lay_out
from megasetup.planning.memory import (
    Item,
    OptimizerMemory,
    merged,
    model_items,
    optimizer_items,
    staging_items,
)
from megasetup.planning.result import Limits, NodePlan, RankPlan, RunPlan
from megasetup.planning.shapes import build_chunks, left_out, padded_vocabulary, plain_provider, whole_parameters
from megasetup.planning.sync_time import Rates, SyncTime, sync_time
from megasetup.planning.world import ParallelSizes, Place, PlanningError, places, pretended_world


def plan_run(
    provider: Any,
    optimizer_config: Any,
    ddp_config: Any,
    *,
    gpus: int,
    nodes: int | None = None,
    limits: Limits | None = None,
    rates: Rates | None = None,
    use_tp_pp_dp_mapping: bool = False,
    fast_hybrid_optimizer: bool = True,
) -> RunPlan:
    """Plan a run without a GPU, from the model's real shapes and Megatron's own sharding.

    Args:
        provider: Megatron-Bridge GPTModelProvider with the run's parallel sizes and dtype; left as it is.
        optimizer_config: Megatron's OptimizerConfig.
        ddp_config: Megatron's DistributedDataParallelConfig; use_distributed_optimizer must be on.
        gpus: how many the run has.
        nodes: on how many nodes. Default: 8 GPUs each.
        limits: what a GPU and a node have. Default: a DGX H200.
        rates: what bounds a sync. Default: figures of H200 hosts.
        use_tp_pp_dp_mapping: as in Bridge's DistributedInitConfig.
        fast_hybrid_optimizer: offloading is done by our hybrid optimizer, not by Megatron's own.

    Raises:
        PlanningError: what was asked cannot be planned.
        RuntimeError: this process is a rank of a real run.
    """
    _check_kind(optimizer_config, ddp_config)
    nodes = _node_count(gpus, nodes)
    limits, rates = limits or Limits(), rates or Rates()
    sizes = ParallelSizes.of(
        provider,
        gpus,
        optimizer_instances=ddp_config.num_distributed_optimizer_instances,
        use_tp_pp_dp_mapping=use_tp_pp_dp_mapping,
    )
    where = places(sizes)
    settings = OptimizerMemory.of(optimizer_config, fast_hybrid=fast_hybrid_optimizer)
    parameters, stages = _build_stages(provider, optimizer_config, ddp_config, sizes, where)
    shares = _Shares(stages, settings)
    per_node = gpus // nodes
    ranks = tuple(
        RankPlan(
            place=place,
            node=place.rank // per_node,
            parameters=stages[place.stage].parameters,
            items=shares.items(place.stage, place.shard, place.expert_shard),
            sync=_sync_of(shares.work(place.stage, place.shard, place.expert_shard), per_node, rates),
        )
        for place in where
    )
    return RunPlan(
        parameters=parameters,
        sizes=sizes,
        optimizer=settings,
        ranks=ranks,
        nodes=tuple(_node(number, ranks[number * per_node : (number + 1) * per_node]) for number in range(nodes)),
        limits=limits,
        rates=rates,
        notes=tuple(left_out(provider)),
    )


def _check_kind(optimizer_config: Any, ddp_config: Any) -> None:
    if optimizer_config.optimizer not in ("adam", "sgd"):
        raise PlanningError(f"optimizer is {optimizer_config.optimizer!r}: a plan knows adam and sgd")
    if not ddp_config.use_distributed_optimizer:
        raise PlanningError(
            "use_distributed_optimizer is off: a plan is made for Megatron's distributed optimizer, which CPU offload "
            "needs too; set it"
        )
    if getattr(ddp_config, "use_megatron_fsdp", False):
        raise PlanningError("use_megatron_fsdp is on: a plan is made for DistributedDataParallel; turn it off")


def _node_count(gpus: int, nodes: int | None) -> int:
    if gpus < 1:
        raise PlanningError(f"gpus is {gpus}: it must be at least 1")
    if nodes is None:
        nodes = max(1, gpus // 8)
    if nodes < 1 or gpus % nodes:
        raise PlanningError(f"{gpus} GPUs cannot be spread evenly over {nodes} nodes: give a divisor of {gpus}")
    return nodes


def _build_stages(
    provider: Any, optimizer_config: Any, ddp_config: Any, sizes: ParallelSizes, where: list[Place]
) -> tuple[int, list[StageBuffers]]:
    plain = plain_provider(provider)
    vocabulary = padded_vocabulary(provider)
    padding = vocabulary - int(provider.vocab_size)
    parameters = 0
    stages = []
    for stage in range(sizes.pipeline):
        rank = next(place.rank for place in where if place.stage == stage)
        with pretended_world(sizes, rank):
            chunks = build_chunks(plain, vocabulary, stage=stage, stages=sizes.pipeline)
            stages.append(lay_out(chunks, optimizer_config, ddp_config, stage=stage))
        parameters += whole_parameters(
            chunks,
            tensor=sizes.tensor,
            expert_tensor=sizes.expert_tensor,
            expert=sizes.expert,
            padding=padding,
        )
    return parameters, stages


class _Shares:
    """What each share of each stage holds, counted once."""

    def __init__(self, stages: list[StageBuffers], settings: OptimizerMemory) -> None:
        self._stages = stages
        self._settings = settings
        self._model = [model_items(stage) for stage in stages]
        self.items = lru_cache(maxsize=None)(self._items)
        self.work = lru_cache(maxsize=None)(self._work)
        self._owned = lru_cache(maxsize=None)(self._own)

    def _own(self, stage: int, shard: int, expert: bool) -> Owned:
        return self._stages[stage].owned(shard, expert=expert, fraction=self._settings.fraction)

    def _both(self, stage: int, shard: int, expert_shard: int) -> tuple[Owned, Owned]:
        return self._owned(stage, shard, False), self._owned(stage, expert_shard, True)

    def _items(self, stage: int, shard: int, expert_shard: int) -> tuple[Item, ...]:
        items = list(self._model[stage])
        for owned in self._both(stage, shard, expert_shard):
            items += optimizer_items(owned, self._settings)
        return tuple(merged(items + staging_items(self._settings.offload)))

    def _work(self, stage: int, shard: int, expert_shard: int) -> dict[str, int]:
        """What a sync of these shards moves."""
        wire = host = device = 0
        for owned in self._both(stage, shard, expert_shard):
            wide = owned.elements[owned.offloaded & ~owned.sixteen_bit].sum()
            narrow = owned.elements[owned.offloaded & owned.sixteen_bit].sum()
            wire += int(narrow) * 2 + int(wide) * 4
            host += int(narrow) + int(wide)
            if self._settings.offload and not self._settings.precision_aware:
                device += int(owned.elements[owned.sixteen_bit].sum())
        return {"wire_bytes": wire, "host_elements": host, "device_elements": device}


def _sync_of(work: dict[str, int], ranks: int, rates: Rates) -> SyncTime:
    return sync_time(**work, ranks=ranks, rates=rates)


def _node(number: int, ranks: tuple[RankPlan, ...]) -> NodePlan:
    return NodePlan(
        node=number,
        ranks=len(ranks),
        gpu=sum(rank.gpu for rank in ranks),
        host=sum(rank.host for rank in ranks),
        pinned=sum(rank.pinned for rank in ranks),
    )
