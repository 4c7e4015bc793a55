"""Bytes that one rank holds, item by item, from its buffers and shards and the optimizer's settings.

Where the optimizer's state lies depends on three settings. Standard: an FP32 GPU shard of each 16-bit parameter
(level 1) and, for an offloaded one, a pinned FP32 clone that the CPU optimizer steps. Precision-aware with offload: no
GPU shard; the hybrid optimizer keeps FP32 working copies, on the host for offloaded parameters and on the GPU for the
others, and takes no notice of exp_avg_dtype. Precision-aware without offload: the fused GPU optimizer holds masters and
moments in the dtypes that OptimizerConfig names.

The hybrid optimizer is ours, which pins exactly what it needs and has gradients pass through a few short buffers,
unless the config wants Megatron's own. That one has a buffer for each gradient, asks torch for each pinned tensor, in a
block of the next power of two, and pins no clone in precision-aware mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from megasetup.masters.hybrid_buckets import ring_elements
from megasetup.planning.buffers import Owned, StageBuffers

Where = Literal["GPU", "host, pinned", "host"]

# torch's allocator hands out GPU memory in multiples of this.
_GPU_BLOCK = 512
# The sync's staging with its default chunks of 4 Mi elements (csrc/transfer/pipeline.h).
STAGING_PINNED = 64 << 20
STAGING_GPU = 96 << 20


class Item(NamedTuple):
    """One kind of memory that a rank holds.

    Attributes:
        name: what it is.
        where: "GPU", "host, pinned" or "host".
        bytes: how much; GPU memory as torch's allocator counts it.
    """

    name: str
    where: Where
    bytes: int


@dataclass(frozen=True)
class OptimizerMemory:
    """What the optimizer's settings say about memory.

    Attributes:
        offload: optimizer_cpu_offload.
        fraction: optimizer_offload_fraction; 0 without offload.
        precision_aware: 16-bit parameters have no FP32 GPU shard of their own.
        master_bytes: bytes an element of the fused optimizer's masters (precision-aware, not offloaded).
        moments: bytes an element of each moment on the GPU without a hybrid optimizer.
        hybrid_moments: bytes an element of each moment with one.
        pin_gradients, pin_parameters: pin_cpu_grads and pin_cpu_params.
        fast_hybrid: the hybrid optimizer is ours.
    """

    offload: bool
    fraction: float
    precision_aware: bool
    master_bytes: int
    moments: tuple[int, ...]
    hybrid_moments: tuple[int, ...]
    pin_gradients: bool
    pin_parameters: bool
    fast_hybrid: bool

    @classmethod
    def of(cls, config: Any, *, fast_hybrid: bool = True) -> OptimizerMemory:
        """Read an OptimizerConfig; `fast_hybrid` is policy.megatron_cfg.fast_hybrid_optimizer."""
        plain: tuple[int, ...] = (4, 4)
        moments: tuple[int, ...] = (config.exp_avg_dtype.itemsize, config.exp_avg_sq_dtype.itemsize)
        if config.optimizer != "adam":
            plain = moments = (4,) if config.sgd_momentum else ()
        # (what OptimizerConfig.finalize works out, which on a machine without Transformer Engine refuses to)
        aware = config.use_precision_aware_optimizer and (
            config.optimizer_cpu_offload
            or config.main_params_dtype != torch.float32
            or config.fp8_recipe in (None, "delayed")
        )
        # Of an FP32 master, the fused optimizer may keep the 16 bits that the BF16 parameter does not have.
        remainders = aware and config.store_param_remainders and config.main_params_dtype == torch.float32
        return cls(
            offload=bool(config.optimizer_cpu_offload),
            fraction=float(config.optimizer_offload_fraction) if config.optimizer_cpu_offload else 0.0,
            precision_aware=bool(aware),
            master_bytes=2 if remainders and config.bf16 else config.main_params_dtype.itemsize,
            moments=moments,
            hybrid_moments=plain,
            pin_gradients=bool(getattr(config, "pin_cpu_grads", True)),
            pin_parameters=bool(getattr(config, "pin_cpu_params", True)),
            fast_hybrid=fast_hybrid,
        )


def model_items(stage: StageBuffers) -> list[Item]:
    """Weights and gradient buffers, the same on every rank of a stage."""
    weights = sum(_blocks(buffer.elements * buffer.parameter_dtype.itemsize) for buffer in stage.buffers)
    gradients = sum(_blocks(buffer.elements * buffer.gradient_dtype.itemsize) for buffer in stage.buffers)
    return [
        Item("weights", "GPU", weights + stage.frozen_bytes),
        Item("gradients", "GPU", gradients),
    ]


def optimizer_items(owned: Owned, settings: OptimizerMemory) -> list[Item]:
    """What one optimizer holds on one rank after its first step."""
    elements, sixteen = owned.elements, owned.sixteen_bit
    on_cpu = owned.offloaded
    on_gpu = ~on_cpu
    items: list[Item] = []
    copied = sixteen & on_gpu if settings.precision_aware else sixteen
    if settings.precision_aware and not settings.offload:
        items.append(Item("masters", "GPU", _blocks_of(elements[copied], settings.master_bytes)))
    elif settings.precision_aware:
        items.append(Item("FP32 working copies", "GPU", _blocks_of(elements[copied], 4)))
    else:
        items.append(Item("FP32 shards", "GPU", _blocks_of(elements[copied], 4)))
    # A gradient of another dtype than the FP32 copy it is for is widened, and stays until the gradients are cleared.
    widened = copied & owned.sixteen_bit_gradient
    if not settings.precision_aware or (settings.offload and not settings.fast_hybrid):
        items.append(Item("FP32 gradients of a step", "GPU", _blocks_of(elements[widened], 4)))
    moments = settings.hybrid_moments if settings.offload else settings.moments
    items.append(Item("moments", "GPU", sum(_blocks_of(elements[on_gpu], size) for size in moments)))
    if settings.offload:
        offloaded = elements[on_cpu]
        # (in precision-aware mode Megatron's own pins 16-bit clones, and then widens them into pageable memory)
        pinned = settings.pin_parameters and (settings.fast_hybrid or not settings.precision_aware)
        # (ours has all gradients pass through a few buffers)
        buffers = torch.tensor([ring_elements(offloaded.tolist())]) if settings.fast_hybrid else offloaded
        items += [
            _on_host("clones", offloaded, pinned, settings),
            _on_host("gradient buffers", buffers, settings.pin_gradients, settings),
            Item("moments", "host", int(offloaded.sum()) * sum(moments)),
        ]
    return items


def _on_host(name: str, elements: torch.Tensor, pinned: bool, settings: OptimizerMemory) -> Item:
    """FP32 host tensors of these lengths."""
    if pinned and not settings.fast_hybrid:
        return Item(name, "host, pinned", sum(1 << (4 * count - 1).bit_length() for count in elements.tolist()))
    return Item(name, "host, pinned" if pinned else "host", int(elements.sum()) * 4)


def staging_items(offloads: bool) -> list[Item]:
    """The sync's own staging, held while a plan of it is."""
    if not offloads:
        return []
    return [
        Item("staging of the sync", "GPU", STAGING_GPU),
        Item("staging of the sync", "host, pinned", STAGING_PINNED),
    ]


def merged(items: list[Item]) -> list[Item]:
    """Items of one name and place added up, in the order of first appearance; none is empty."""
    totals: dict[tuple[str, Where], int] = {}
    for item in items:
        totals[item.name, item.where] = totals.get((item.name, item.where), 0) + item.bytes
    return [Item(name, where, count) for (name, where), count in totals.items() if count]


def gpu_bytes(items: list[Item]) -> int:
    """Bytes of GPU memory among items."""
    return sum(item.bytes for item in items if item.where == "GPU")


def host_bytes(items: list[Item], *, pinned: bool = False) -> int:
    """Bytes of host memory among items, or of the pinned part alone."""
    return sum(item.bytes for item in items if item.where != "GPU" and (not pinned or item.where == "host, pinned"))


def _blocks(nbytes: int) -> int:
    return -(-nbytes // _GPU_BLOCK) * _GPU_BLOCK


def _blocks_of(elements: torch.Tensor, size: int) -> int:
    return int(((elements * size + _GPU_BLOCK - 1) // _GPU_BLOCK * _GPU_BLOCK).sum())
