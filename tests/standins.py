"""Stand-ins for Megatron's optimizers, for machines without a GPU, and what tests read of optimizers, real or not.

DistributedOptimizer and HybridDeviceOptimizer cannot be constructed without CUDA. These are instances of the real
classes, made without their constructors, whose private attributes are filled with CPU tensors as the constructors
would fill them. So type checks and Megatron's own methods are real; what is not is how the attributes came about. The
tests marked gpu construct the real ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import chain as chain_lists
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import nn

Span = Callable[[str, torch.Tensor], tuple[int, int]]


class Quantised(torch.Tensor):
    """Stand-in for Transformer Engine's quantised tensors: a subclass with no memory that holds its values."""

    @staticmethod
    def __new__(cls, shape: Sequence[int]) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.bfloat16, requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} on a quantised tensor")


class Block(nn.Module):
    """Some weights with names like a transformer's, the router in FP32 as an MoE model keeps it."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, *, fp32_router: bool = True, quantised: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(13, 7).to(dtype))
        self.norm = nn.Parameter(torch.ones(7, dtype=dtype))
        if fp32_router:
            self.router = nn.Parameter(torch.randn(5, 7))
        self.fc1 = nn.Parameter(torch.randn(11, 7).to(dtype))
        if quantised:
            self.fp8 = nn.Parameter(Quantised((6, 7)))
        self.fc2 = nn.Parameter(torch.randn(7, 11).to(dtype))


def whole(name: str, parameter: torch.Tensor) -> tuple[int, int]:
    return 0, parameter.numel()


def plain_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, held) for name, held in model.named_parameters() if not isinstance(held, Quantised)]


@torch.no_grad()
def load_new_weights(*chunks: nn.Module, seed: int = 1) -> None:
    """What a fine-tuning load does: new values in the model's parameters and nowhere else."""
    generator = torch.Generator().manual_seed(seed)
    for chunk in chunks:
        for _, parameter in plain_parameters(chunk):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def hybrid_over(
    groups: Sequence[Sequence[torch.Tensor]], fraction: float = 1.0, *, param_update_in_fp32: bool = True
) -> HybridDeviceOptimizer:
    """A hybrid optimizer over these parameters, with clones as its _get_sub_optimizer_param_groups makes them."""
    hybrid = object.__new__(HybridDeviceOptimizer)
    hybrid.param_groups = [{"params": list(group)} for group in groups]
    hybrid.param_update_in_fp32 = param_update_in_fp32
    hybrid.gpu_params_map_cpu_copy = {}
    hybrid.param_to_fp32_param = {}
    threshold = fraction * sum(parameter.numel() for group in groups for parameter in group)
    offloaded = 0
    for group in groups:
        for parameter in group:
            inner = parameter
            offload = offloaded < threshold
            if offload:
                inner = inner.detach().clone()
                offloaded += inner.numel()
            if param_update_in_fp32 and inner.dtype != torch.float32:
                inner = inner.detach().clone().float()
                hybrid.param_to_fp32_param[parameter] = inner
            if offload:
                hybrid.gpu_params_map_cpu_copy[parameter] = inner
    return hybrid


def distributed_over(
    chunks: Sequence[nn.Module],
    *,
    fraction: float | None = 1.0,
    precision_aware: bool = False,
    span: Span = whole,
    param_update_in_fp32: bool = True,
) -> DistributedOptimizer:
    """A distributed optimizer over the chunks' parameters; fraction None for one without a hybrid optimizer."""
    optimizer = object.__new__(DistributedOptimizer)
    optimizer.is_stub_optimizer = False
    optimizer.model_chunks = list(chunks)
    optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    optimizer.config = None
    optimizer.model_float16_groups, optimizer.shard_float16_groups = [[]], [[]]
    optimizer.shard_fp32_from_float16_groups = [[]]
    optimizer.model_fp32_groups, optimizer.shard_fp32_groups = [[]], [[]]
    ranges: dict[torch.Tensor, dict[str, Range]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            start, end = span(name, parameter)
            if start == end:
                continue  # this rank owns nothing of it
            ranges[parameter] = {"param": Range(start, end)}
            if isinstance(parameter, Quantised):
                shard, main = None, torch.randn(end - start)
            else:
                shard = (parameter if parameter.dtype == torch.float32 else parameter.detach()).view(-1)[start:end]
                main = shard.clone().float()
            if parameter.dtype == torch.float32:
                optimizer.model_fp32_groups[0].append(parameter)
                optimizer.shard_fp32_groups[0].append(shard)
            else:
                optimizer.model_float16_groups[0].append(parameter)
                optimizer.shard_float16_groups[0].append(shard)
                optimizer.shard_fp32_from_float16_groups[0].append(None if precision_aware else main)
    optimizer.model_param_gbuf_map = dict.fromkeys(ranges, (0, "dtype", 0))
    optimizer.gbuf_ranges = [{"dtype": [{"param_map": ranges}]}]
    low = optimizer.shard_float16_groups[0] if precision_aware else optimizer.shard_fp32_from_float16_groups[0]
    inner = [*optimizer.shard_fp32_groups[0], *(parameter for parameter in low if parameter is not None)]
    if fraction is None:
        optimizer.optimizer = SimpleNamespace(param_groups=[{"params": inner}])
    else:
        optimizer.optimizer = hybrid_over([inner], fraction, param_update_in_fp32=param_update_in_fp32)
    return optimizer


def stub() -> DistributedOptimizer:
    """What Megatron makes on a rank where everything is frozen."""
    optimizer = object.__new__(DistributedOptimizer)
    optimizer.is_stub_optimizer = True
    optimizer.optimizer = None
    optimizer.model_chunks = []
    optimizer.config = None
    return optimizer


def float16_over(model: nn.Module) -> Float16OptimizerWithFloat16Params:
    """A mixed-precision optimizer that is not distributed."""
    optimizer = object.__new__(Float16OptimizerWithFloat16Params)
    optimizer.is_stub_optimizer = False
    optimizer.config = None
    low = [parameter for parameter in model.parameters() if parameter.dtype != torch.float32]
    optimizer.float16_groups = [low]
    optimizer.fp32_from_float16_groups = [[parameter.detach().clone().float() for parameter in low]]
    optimizer.fp32_from_fp32_groups = [[p for p in model.parameters() if p.dtype == torch.float32]]
    optimizer.optimizer = SimpleNamespace(param_groups=[{"params": optimizer.fp32_from_float16_groups[0]}])
    return optimizer


def fp32_over(model: nn.Module, *, offloaded: bool = False) -> FP32Optimizer:
    """An optimizer that steps the model's own FP32 parameters."""
    optimizer = object.__new__(FP32Optimizer)
    optimizer.is_stub_optimizer = False
    optimizer.config = None
    parameters = list(model.parameters())
    inner = SimpleNamespace(param_groups=[{"params": parameters}])
    optimizer.optimizer = hybrid_over([parameters]) if offloaded else inner
    return optimizer


def chain(*optimizers: Any) -> ChainedOptimizer:
    """A real chain: its constructor needs no GPU."""
    return ChainedOptimizer(list(optimizers))


def copies_of(optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    """Every copy apart from the model's own memory, each tensor once."""
    hybrid = optimizer.optimizer
    held = [main for main in chain_lists.from_iterable(optimizer.shard_fp32_from_float16_groups) if main is not None]
    if isinstance(hybrid, HybridDeviceOptimizer):
        held += [*hybrid.gpu_params_map_cpu_copy.values(), *hybrid.param_to_fp32_param.values()]
    return list({id(tensor): tensor for tensor in held}.values())


def bits(*tensors: torch.Tensor) -> list[bytes]:
    """Their memory, for comparison before and after."""
    on_host = [tensor.detach().cpu().contiguous() for tensor in tensors]
    return [ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in on_host]


def held_by(
    optimizer: DistributedOptimizer,
) -> Iterator[tuple[str, torch.Tensor, dict[int, torch.Tensor]]]:
    """(name, this rank's part of the weight, its copies by level), read without any of the package's code."""
    names = {held: name for chunk in optimizer.model_chunks for name, held in chunk.named_parameters()}
    clones = getattr(optimizer.optimizer, "gpu_params_map_cpu_copy", {})
    working = getattr(optimizer.optimizer, "param_to_fp32_param", {})
    low = zip(
        chain_lists.from_iterable(optimizer.model_float16_groups),
        chain_lists.from_iterable(optimizer.shard_float16_groups),
        chain_lists.from_iterable(optimizer.shard_fp32_from_float16_groups),
        strict=True,
    )
    shards = list(chain_lists.from_iterable(optimizer.shard_fp32_groups))
    native = zip(chain_lists.from_iterable(optimizer.model_fp32_groups), shards, shards, strict=True)
    for parameter, shard, main in (*low, *native):
        if isinstance(parameter, Quantised):
            continue
        key = shard if main is None else main
        levels = {1: main, 2: clones.get(key), 3: working.get(key)}
        span = optimizer._get_model_param_range_map(parameter)["param"]
        weight = parameter.detach().reshape(-1)[span.start : span.end]
        yield names[parameter], weight, {level: copy.detach() for level, copy in levels.items() if copy is not None}


def assert_exact(optimizer: DistributedOptimizer) -> None:
    """Every copy is the widened weight."""
    for name, weight, levels in held_by(optimizer):
        for level, copy in levels.items():
            assert torch.equal(copy.cpu(), weight.cpu().to(copy.dtype)), (name, level)


def train_a_little(optimizer: DistributedOptimizer) -> None:
    """Leave the copies as a healthy step does: all levels alike, and more precise than the model they round to."""
    for _, weight, levels in held_by(optimizer):
        if weight.dtype != torch.float32:
            stepped = weight.float() * (1 + 2.0**-10)
            assert torch.equal(stepped.to(weight.dtype), weight)
            for copy in levels.values():
                copy.copy_(stepped)
