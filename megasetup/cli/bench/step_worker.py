"""One measurement of `bench step`, in a process of its own: what it pins and peaks at is then its alone.

A real DistributedOptimizer over a model that has only the weights of a shape set. Its gradients are drawn once and stay
in Megatron's gradient buffer, in BF16, so that every step has the same work and both ways can be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megasetup.cli.bench.step_memory import PeakHostMemory, needed_bytes, pinned_bytes
from megasetup.cli.bench.workload import PRECISION_AWARE
from megasetup.cli.shapes import Shapes
from megasetup.cli.timing import seconds_of

STOCK, OURS = "megatron", "megasetup"


@dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
        shapes: the model.
        way: STOCK or OURS.
        mode: STANDARD or PRECISION_AWARE.
        overlap: Megatron's overlap_cpu_optimizer_d2h_h2d.
        fraction: the share of the optimizer that is offloaded.
        steps: steps to time, the first included; 0 for making alone.
        device: index of the GPU.
    """

    shapes: Shapes
    way: str
    mode: str
    overlap: bool
    fraction: float
    steps: int
    device: int

    @property
    def label(self) -> str:
        return f"{self.way}, {self.mode}, {'with' if self.overlap else 'without'} overlap"


@contextlib.contextmanager
def _one_rank(device: int) -> Iterator[None]:
    from megatron.core import parallel_state

    torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl", store=HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", device)
    )
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield
    finally:
        torch.distributed.destroy_process_group()


def _model(shapes: Shapes, device: torch.device) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import MegatronModule, TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    model = MegatronModule(config)
    generator = torch.Generator(device).manual_seed(1)
    for name, shape in shapes.tensors:
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(weight))
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=False)
    chunk = DistributedDataParallel(config, settings, model)
    for buffer in chunk.buffers:
        buffer.grad_data.normal_(std=1e-3, generator=generator)
    return chunk


def _optimizer(chunk: Any, case: Case) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.01,
            clip_grad=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=case.mode == PRECISION_AWARE,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=case.fraction,
            overlap_cpu_optimizer_d2h_h2d=case.overlap,
        ),
        [chunk],
        use_gloo_process_groups=False,
    )


_DIGEST_BYTES = 1 << 26


def _digest(chunk: Any, hybrid: Any) -> dict[str, list[int]]:
    """Checksums of the model's weights, of the clones and of their moments, piece by piece, the same for both ways."""
    tensors = {f"weight {name}": weight for name, weight in chunk.named_parameters()}
    for index, param in enumerate(param for group in hybrid.param_groups for param in group["params"]):
        state = hybrid.state[param]
        tensors[f"clone {index}"] = hybrid.param_to_inner_param[param]
        tensors |= {f"{name} {index}": state[name] for name in ("exp_avg", "exp_avg_sq") if name in state}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sums = {
            name: [
                pool.submit(_checksum, piece)
                for piece in tensor.detach().reshape(-1).view(torch.uint8).split(_DIGEST_BYTES)
            ]
            for name, tensor in tensors.items()
        }
        return {name: [future.result() for future in of_one] for name, of_one in sums.items()}


def _checksum(piece: torch.Tensor) -> int:
    return zlib.crc32(piece.cpu().numpy())


def import_all() -> None:
    """What a measurement imports, before its turn."""
    for name in (
        "megatron.core.distributed",
        "megatron.core.optimizer",
        "megatron.core.transformer",
        "megasetup.compat.hybrid_optimizer",
        "megasetup.masters.hybrid",
    ):
        importlib.import_module(name)


def measure(case: Case) -> dict[str, Any]:
    """Make the optimizer and step it; plain data."""
    from megasetup.compat.hybrid_optimizer import fast_hybrid_optimizer

    device = torch.device("cuda", case.device)
    with _one_rank(case.device), fast_hybrid_optimizer() if case.way == OURS else contextlib.nullcontext():
        chunk = _model(case.shapes, device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        with PeakHostMemory() as peak:
            making, optimizer = seconds_of(lambda: _optimizer(chunk, case), device)
            making_gpu = torch.cuda.max_memory_allocated(device)
            steps = [seconds_of(optimizer.step, device)[0] for _ in range(case.steps)]
        hybrid = optimizer.chained_optimizers[0].optimizer
        return {
            "way": case.way,
            "mode": case.mode,
            "overlap": case.overlap,
            "made_seconds": making,
            "step_seconds": steps,
            "pinned_bytes": pinned_bytes(hybrid),
            "needed_bytes": needed_bytes(hybrid),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated(device),
            "peak_gpu_bytes_making": making_gpu,
            "peak_host_bytes": peak.bytes,
            "digest": _digest(chunk, hybrid),
        }


def adam_alone(case: Case) -> dict[str, Any]:
    """Torch's fused AdamW over the same elements on the host, with nothing beside it; plain data."""
    params = [torch.zeros(count) for count in case.shapes.counts]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True)
    seconds = []
    for _ in range(max(4, case.steps)):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return {"step_seconds": seconds}
