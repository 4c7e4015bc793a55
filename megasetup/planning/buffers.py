"""Megatron's contiguous buffers and their shards: what DistributedDataParallel pads and DistributedOptimizer splits.

The layouts come from DistributedOptimizer itself, on the meta model's parameters. What one data-parallel rank owns of
each parameter is the overlap of two ranges, taken for all parameters of a buffer in one tensor operation, because a
plan asks it for every rank of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Buffer:
    """One buffer of one model chunk.

    Attributes:
        parameter_dtype, gradient_dtype: what its two halves hold.
        expert: its parameters belong to expert layers, which have data-parallel groups of their own.
        elements: with padding.
        shards: data-parallel ranks that it is split over.
        start, end: first element of each parameter and the one past its last, int64, in the buffer's order.
        shard_start, shard_size: of the parameter's bucket: where the first rank's share starts, and how long each
            rank's share is.
        group: index of each parameter's param group in its optimizer.
    """

    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    expert: bool
    elements: int
    shards: int
    start: torch.Tensor
    end: torch.Tensor
    shard_start: torch.Tensor
    shard_size: torch.Tensor
    group: torch.Tensor

    def owned(self, shard: int) -> torch.Tensor:
        """Elements of each parameter that lie in one data-parallel rank's share, in the buffer's order."""
        low = self.shard_start + shard * self.shard_size
        return (torch.minimum(self.end, low + self.shard_size) - torch.maximum(self.start, low)).clamp(min=0)


@dataclass(frozen=True)
class Owned:
    """One rank's shards within one optimizer, in the order in which Megatron offloads them.

    Attributes:
        elements: of each shard, int64; none is empty.
        sixteen_bit: of each, whether its parameter is 16-bit (and so has an FP32 copy).
        sixteen_bit_gradient: of each, whether the gradient buffer is (and so each step makes FP32 gradients).
        offloaded: of each, whether its optimizer state lies on the CPU.
    """

    elements: torch.Tensor
    sixteen_bit: torch.Tensor
    sixteen_bit_gradient: torch.Tensor
    offloaded: torch.Tensor


@dataclass(frozen=True)
class StageBuffers:
    """The buffers of one pipeline stage's rank, all chunks.

    Attributes:
        buffers: in Megatron's order.
        parameters: trained elements, padding not counted.
        frozen_bytes: bytes of parameters that take no gradient.
    """

    buffers: tuple[Buffer, ...]
    parameters: int
    frozen_bytes: int

    def owned(self, shard: int, *, expert: bool, fraction: float) -> Owned:
        """What the dense or the expert layers' optimizer holds on one rank.

        Args:
            shard: which share is the rank's own.
            expert: the expert layers' optimizer, or the dense layers'.
            fraction: optimizer_offload_fraction. Megatron offloads shards in the optimizer's order while less than
                this share of the elements is offloaded, so the last one may overshoot it.
        """
        buffers = [buffer for buffer in self.buffers if buffer.expert == expert]
        if not buffers:
            nothing = torch.empty(0, dtype=torch.int64)
            return Owned(nothing, nothing.bool(), nothing.bool(), nothing.bool())
        elements = torch.cat([buffer.owned(shard) for buffer in buffers])
        sixteen_bit, gradient = (
            torch.cat([torch.full_like(buffer.group, dtype.itemsize == 2).bool() for buffer, dtype in dtypes])
            for dtypes in (
                [(buffer, buffer.parameter_dtype) for buffer in buffers],
                [(buffer, buffer.gradient_dtype) for buffer in buffers],
            )
        )
        # Within a param group the FP32 parameters come first; a stable sort keeps the buffers' order otherwise.
        order = torch.argsort(torch.cat([buffer.group for buffer in buffers]) * 2 + sixteen_bit, stable=True)
        order = order[elements[order] > 0]
        elements = elements[order]
        before = elements.cumsum(0) - elements
        threshold = int(elements.sum()) * fraction
        return Owned(elements, sixteen_bit[order], gradient[order], before.double() < threshold)


def lay_out(chunks: Sequence[Any], optimizer_config: Any, ddp_config: Any, *, stage: int) -> StageBuffers:
    """Megatron's buffers for the model chunks of the pretended rank.

    Args:
        chunks: on the meta device, built in the pretended world that is still up.
        optimizer_config: OptimizerConfig.
        ddp_config: DistributedDataParallelConfig with use_distributed_optimizer.
        stage: this rank's pipeline stage.
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    data = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True).size()
    expert_data = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True).size()
    replicas = parallel_state.get_data_parallel_group().size()
    groups = _get_param_groups(list(chunks), optimizer_config, get_standard_config_overrides(optimizer_config))
    group_of = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}
    buffers: list[Buffer] = []
    parameters = frozen = 0
    for number, chunk in enumerate(chunks):
        trained = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
        parameters += sum(parameter.numel() for parameter in trained)
        frozen += sum(parameter.nbytes for parameter in chunk.parameters() if not parameter.requires_grad)
        if not trained:
            continue
        layout = DistributedOptimizer.compute_full_param_layout(
            trained,
            _bucket_size(ddp_config, replicas, first=stage == 0 and number == 0),
            data,
            ddp_config,
            expert_data_parallel_world_size=expert_data,
        )
        for key, part in layout.layouts.items():
            shards = expert_data if key.is_expert_parallel else data
            places = torch.tensor(list(part.param_index_map.values()), dtype=torch.int64)
            buckets = torch.tensor(part.bucket_indices, dtype=torch.int64)[places[:, 2]]
            buffers.append(
                Buffer(
                    parameter_dtype=key.param_dtype,
                    gradient_dtype=key.grad_dtype,
                    expert=key.is_expert_parallel,
                    elements=part.bucket_indices[-1][1],
                    shards=shards,
                    start=places[:, 0],
                    end=places[:, 1],
                    shard_start=buckets[:, 0],
                    shard_size=(buckets[:, 1] - buckets[:, 0]) // shards,
                    group=torch.tensor([group_of[parameter] for parameter in part.param_index_map]),
                )
            )
    return StageBuffers(tuple(buffers), parameters, frozen)


def _bucket_size(ddp_config: Any, replicas: int, *, first: bool) -> int | None:
    """Elements of a bucket as DistributedDataParallel chooses them; None for one bucket.

    Only the first chunk of the first stage is cut, as its gradients' reduction is the one on the critical path.
    """
    if not ddp_config.overlap_grad_reduce or not first:
        return None
    return int(ddp_config.bucket_size or max(40_000_000, 1_000_000 * replicas))
