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
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import nn

from megasetup.compat.hybrid_optimizer import fast_hybrid_optimizer

VOCABULARY, WIDTH, INNER, EXPERTS = 50_257, 72, 331, 6
DEVICE = "cuda"  # "cpu" where the CPU stands in for a GPU


class Small(MegatronModule):
    """An embedding, a norm, one feed-forward block and an FP32 router."""

    def __init__(
        self, config: TransformerConfig, dtype: torch.dtype, *, fp32_router: bool, has_expert: bool = False
    ) -> None:
        super().__init__(config)

        def weight(*shape: int, kind: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, device=DEVICE) * 0.1).to(kind))

        # Megatron offloads weights in reverse order until the fraction is reached: the large one early, so that a
        # fraction below 1 leaves some on the GPU.
        self.fc2 = weight(WIDTH, INNER)
        self.fc1 = weight(INNER, WIDTH)
        self.norm = nn.Parameter(torch.ones(WIDTH, device=DEVICE, dtype=dtype))
        self.router = weight(EXPERTS, WIDTH, kind=torch.float32 if fp32_router else dtype)
        self.embedding = weight(VOCABULARY, WIDTH)
        self.odd = weight(37)
        if has_expert:  # one that this rank has to itself
            self.expert = weight(INNER, WIDTH)
            self.expert.allreduce = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = F.embedding(tokens, self.embedding) * self.norm
        hidden = hidden + F.linear(F.gelu(F.linear(hidden, self.fc1)), self.fc2)
        if hasattr(self, "expert"):
            hidden = hidden + F.linear(F.linear(hidden, self.expert), self.fc2)
        gates = F.linear(hidden.to(self.router.dtype), self.router).float().softmax(-1)
        return hidden.float().square().mean() + gates.square().sum(-1).mean() + self.odd.float().square().mean()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if hasattr(self, "expert"):
            rank, size = (
                parallel_state.get_expert_model_parallel_rank(),
                parallel_state.get_expert_model_parallel_world_size(),
            )
            replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
            found[f"{prefix}expert"] = ShardedTensor.from_rank_offsets(
                f"{prefix}expert", self.expert, (0, rank, size), replica_id=replica
            )
        return found


@contextmanager
def parallel_state_of(
    rank: int, world: int, store: torch.distributed.Store, *, expert_parallel: int = 1, with_gloo: bool = False
) -> Iterator[None]:
    """A NCCL process group (gloo's on the CPU) and Megatron's data- and expert-parallel state on it, gone afterwards.

    with_gloo: gloo groups beside them, through which one kind of checkpoint is loaded; build() must then know too.
    """
    torch.cuda.set_device(rank)
    of_device: dict[str, Any] = {"backend": "gloo"}
    if DEVICE == "cuda":
        of_device = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    torch.distributed.init_process_group(store=store, rank=rank, world_size=world, **of_device)
    try:
        parallel_state.initialize_model_parallel(
            create_gloo_process_groups=with_gloo, expert_model_parallel_size=expert_parallel
        )
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
    reduce_in_fp32: bool = True,
    fast: bool = False,
    has_expert: bool = False,
    with_gloo: bool = False,
) -> tuple[Any, Any]:
    """The model in Megatron's DistributedDataParallel, and its optimizer; fraction None for no offload.

    fast: with the package's hybrid optimizer in place of Megatron's. Without reduce_in_fp32 there must be no FP32
    router, since one gradient norm is taken over all gradients.
    """
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
    )
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=reduce_in_fp32)
    chunk = DistributedDataParallel(
        config, settings, Small(config, dtype, fp32_router=fp32_router, has_expert=has_expert)
    )
    offload = {} if fraction is None else {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    # Without gradients: Megatron makes the shard of an FP32 parameter a view of it, and torch takes no such view of a
    # tensor that has gradients into an optimizer ("can't optimize a non-leaf Tensor"). Ours is made with them.
    with fast_hybrid_optimizer() if fast else torch.no_grad():
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
            use_gloo_process_groups=with_gloo,
        )
    return chunk, optimizer


def train(chunk: Any, optimizer: Any, steps: int, *, seed: int = 0, first: int = 0) -> None:
    """Real optimizer steps on random tokens, those of steps `first` and on."""
    for step in range(first, first + steps):
        generator = torch.Generator(DEVICE).manual_seed(1000 * seed + step)
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = torch.randint(VOCABULARY, (64,), device=DEVICE, generator=generator)
        optimizer.scale_loss(chunk(tokens)).backward()
        chunk.finish_grad_sync()
        succeeded, _, _ = optimizer.step()
        assert succeeded
    torch.cuda.synchronize()
