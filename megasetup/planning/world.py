"""A pretended run of any size in one process, so that Megatron itself says which rank holds what.

Megatron reads a model's sharding from its process groups. torch has a backend whose groups have any size and send
nothing; on it parallel_state builds the groups of one rank of 512 in a tenth of a second, and model code that asks them
is answered as on that rank. Nothing here touches a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megasetup.config.environment import environment_restored


class PlanningError(ValueError):
    """What was asked cannot be planned: the message names the setting, its value and the remedy."""


@dataclass(frozen=True)
class ParallelSizes:
    """How a run is split over its GPUs. Names and meaning are Megatron's.

    Attributes:
        gpus: the world size.
        tensor, pipeline, context: the sizes of those groups.
        virtual: model chunks a pipeline rank, None without interleaving.
        expert, expert_tensor: the same for expert layers.
        optimizer_instances: num_distributed_optimizer_instances.
        pipeline_last: ranks are ordered with the pipeline outermost (Bridge's use_tp_pp_dp_mapping is off).
    """

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int | None = None
    expert: int = 1
    expert_tensor: int = 1
    optimizer_instances: int = 1
    pipeline_last: bool = True

    @classmethod
    def of(
        cls, provider: Any, gpus: int, *, optimizer_instances: int = 1, use_tp_pp_dp_mapping: bool = False
    ) -> ParallelSizes:
        """The sizes that a model provider is set to."""
        tensor = provider.tensor_model_parallel_size
        return cls(
            gpus=gpus,
            tensor=tensor,
            pipeline=provider.pipeline_model_parallel_size,
            context=provider.context_parallel_size,
            virtual=provider.virtual_pipeline_model_parallel_size,
            expert=provider.expert_model_parallel_size or 1,
            expert_tensor=provider.expert_tensor_parallel_size or tensor,
            optimizer_instances=optimizer_instances,
            pipeline_last=not use_tp_pp_dp_mapping,
        )

    @property
    def order(self) -> str:
        """The order of the ranks' axes, innermost first, as parallel_state takes it."""
        return "tp-cp-ep-dp-pp" if self.pipeline_last else "tp-cp-ep-pp-dp"

    @property
    def data(self) -> int:
        """Replicas of the dense layers, context parallelism not counted in."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Replicas of the expert layers."""
        return self.gpus // (self.expert_tensor * self.expert * self.pipeline)

    def check(self) -> None:
        """Raise PlanningError unless the sizes divide the number of GPUs."""
        if self.gpus < 1:
            raise PlanningError(f"gpus is {self.gpus}: it must be at least 1")
        dense = self.tensor * self.pipeline * self.context
        experts = self.expert_tensor * self.expert * self.pipeline
        for what, size in (
            (f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context}", dense),
            (f"expert tensor {self.expert_tensor} x expert {self.expert} x pipeline {self.pipeline}", experts),
        ):
            if self.gpus % size:
                raise PlanningError(
                    f"{self.gpus} GPUs cannot be split into model-parallel groups of {size} ({what}): "
                    f"give a multiple of {size}, or change those sizes"
                )
        for what, size in (("data parallel", self.data * self.context), ("expert data parallel", self.expert_data)):
            if size % self.optimizer_instances:
                raise PlanningError(
                    f"num_distributed_optimizer_instances is {self.optimizer_instances}: it must divide the "
                    f"{what} size {size}"
                )


class Place(NamedTuple):
    """Where a rank stands.

    Attributes:
        rank: of the whole run.
        stage: its pipeline stage.
        tensor: its place in its tensor-parallel group.
        shard: which shard of the dense layers' optimizer state is its own.
        expert: its place in its expert-parallel group.
        expert_shard: which shard of the expert layers' optimizer state is its own.
    """

    rank: int
    stage: int
    tensor: int
    shard: int
    expert: int
    expert_shard: int


def places(sizes: ParallelSizes) -> list[Place]:
    """Where each rank stands, by rank, from Megatron's own rank generator."""
    from megatron.core.parallel_state import RankGenerator

    sizes.check()
    dense = RankGenerator(tp=sizes.tensor, ep=1, dp=sizes.data, pp=sizes.pipeline, cp=sizes.context, order=sizes.order)
    experts = RankGenerator(
        tp=sizes.expert_tensor, ep=sizes.expert, dp=sizes.expert_data, pp=sizes.pipeline, cp=1, order=sizes.order
    )
    stage, tensor = _index_in_group(dense, "pp"), _index_in_group(dense, "tp")
    data, expert, expert_data = (
        _index_in_group(dense, "dp-cp"),
        _index_in_group(experts, "ep"),
        _index_in_group(experts, "dp"),
    )
    shards = sizes.data * sizes.context // sizes.optimizer_instances
    expert_shards = sizes.expert_data // sizes.optimizer_instances
    return [
        Place(rank, stage[rank], tensor[rank], data[rank] % shards, expert[rank], expert_data[rank] % expert_shards)
        for rank in range(sizes.gpus)
    ]


def _index_in_group(generator: Any, token: str) -> dict[int, int]:
    return {rank: index for group in generator.get_ranks(token) for index, rank in enumerate(group)}


@contextmanager
def _fake_process_groups(store: Any, gpus: int, rank: int) -> Iterator[None]:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=gpus)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextmanager
def pretended_world(sizes: ParallelSizes, rank: int) -> Iterator[None]:
    """Be one rank of a run while the block runs; afterwards there are no process groups again.

    Raises:
        PlanningError: the sizes do not divide the number of GPUs.
        RuntimeError: this process is a rank of a real run already.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes.check()
    if torch.distributed.is_initialized():
        raise RuntimeError(
            "this process has process groups already, and a plan pretends others: make it in a process of its own"
        )
    # Megatron sets variables when a model is built; a plan must not change what a run in this process would do.
    with environment_restored(), _fake_process_groups(FakeStore(), sizes.gpus, rank):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            num_distributed_optimizer_instances=sizes.optimizer_instances,
            order=sizes.order,
            create_gloo_process_groups=False,
        )
        yield
