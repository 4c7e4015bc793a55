"""Real Megatron optimizers over a small model, for the tests that run on GPUs.

A MegatronModule rather than a GPTModel: Megatron's optimizers ask no more of a model, and every parameter here has a
reason to be there. Several sizes that are no multiple of a vector, a norm whose weights all start at 1.0, a router in
FP32 as MoE models keep it, and one weight large enough to cross the wire in more than one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import nn

VOCABULARY, WIDTH, INNER, EXPERTS = 50_257, 72, 331, 6


class Small(MegatronModule):
    """An embedding, a norm, one feed-forward block and an FP32 router."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, *, fp32_router: bool) -> None:
        super().__init__(config)

        def weight(*shape: int, kind: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, device="cuda") * 0.1).to(kind))

        # Megatron offloads weights in reverse order until the fraction is reached: the large one early, so that a
        # fraction below 1 leaves some on the GPU.
        self.fc2 = weight(WIDTH, INNER)
        self.fc1 = weight(INNER, WIDTH)
        self.norm = nn.Parameter(torch.ones(WIDTH, device="cuda", dtype=dtype))
        self.router = weight(EXPERTS, WIDTH, kind=torch.float32 if fp32_router else dtype)
        self.embedding = weight(VOCABULARY, WIDTH)
        self.odd = weight(37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = F.embedding(tokens, self.embedding) * self.norm
        hidden = hidden + F.linear(F.gelu(F.linear(hidden, self.fc1)), self.fc2)
        gates = F.linear(hidden.to(self.router.dtype), self.router).float().softmax(-1)
        return hidden.float().square().mean() + gates.square().sum(-1).mean() + self.odd.float().square().mean()


@contextmanager
def parallel_state_of(rank: int, world: int, store: torch.distributed.Store) -> Iterator[None]:
    """A NCCL process group and Megatron's data-parallel state on it, gone afterwards."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", store=store, rank=rank, world_size=world, device_id=torch.device("cuda", rank)
    )
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
    finally:
        torch.distributed.destroy_process_group()


def build(
    *,
    precision_aware: bool,
    fraction: float | None,
    dtype: torch.dtype = torch.bfloat16,
    fp32_router: bool = True,
    overlap: bool = False,
) -> tuple[Any, Any]:
    """The model in Megatron's DistributedDataParallel, and its optimizer; fraction None for no offload."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
    )
    # FP32 gradients for all, so that one gradient norm can be taken over them.
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(config, settings, Small(config, dtype, fp32_router=fp32_router))
    offload = {} if fraction is None else {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    # Without gradients: Megatron makes the shard of an FP32 parameter a view of it, and torch takes no such view of a
    # tensor that has gradients into an optimizer ("can't optimize a non-leaf Tensor").
    with torch.no_grad():
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                weight_decay=0.01,
                bf16=dtype == torch.bfloat16,
                fp16=dtype == torch.float16,
                loss_scale=1.0 if dtype == torch.float16 else None,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                use_precision_aware_optimizer=precision_aware,
                overlap_cpu_optimizer_d2h_h2d=overlap,
                **offload,
            ),
            [chunk],
            use_gloo_process_groups=False,
        )
    return chunk, optimizer


def train(chunk: Any, optimizer: Any, steps: int, *, seed: int = 0) -> None:
    """Real optimizer steps on random tokens."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for _ in range(steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = torch.randint(VOCABULARY, (64,), device="cuda", generator=generator)
        optimizer.scale_loss(chunk(tokens)).backward()
        chunk.finish_grad_sync()
        succeeded, _, _ = optimizer.step()
        assert succeeded
    torch.cuda.synchronize()
