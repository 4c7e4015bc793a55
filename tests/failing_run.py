"""The run that loses its model, for test_failing_run.py: each command is one process with fresh state.

teach FOLDER           make a small Qwen3 and teach it one batch, saved as a Hugging Face model
train FOLDER MODE HOW  load it through Megatron-Bridge as a fine-tuning start does, and take three steps on that batch
                       MODE: standard or precision_aware; HOW: none, sync or ensure
Prints one line of JSON last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

VOCABULARY, SEQUENCES, LENGTH = 2048, 4, 64


def batch() -> torch.Tensor:
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0)).cuda()


def teach(folder: Path) -> dict[str, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    tokens = batch()
    loss = float("inf")
    for _ in range(3000):
        logits = model(input_ids=tokens[:, :-1]).logits
        error = F.cross_entropy(logits.float().view(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        loss = error.item()
        if loss < 0.02:
            break
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    model.bfloat16().save_pretrained(folder)
    return {"loss": loss}


def load(folder: Path, *, precision_aware: bool) -> tuple[Any, Any]:
    """A BF16 Megatron model with the folder's weights, and an optimizer that was made before they were loaded."""
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.bf16, provider.params_dtype, provider.pipeline_dtype = True, torch.bfloat16, torch.bfloat16
    provider.gradient_accumulation_fusion = False
    provider.finalize()
    provider.initialize_model_parallel(seed=0, create_gloo_process_groups=False)
    chunks = provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            weight_decay=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=precision_aware,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    bridge.load_hf_weights(chunks)
    optimizer.reload_model_params()  # what Megatron does after a load without optimizer state
    (chunk,) = chunks
    return chunk, optimizer


def three_steps(chunk: Any, optimizer: Any) -> list[float]:
    """The loss before each of three steps on the batch that the model knows."""
    tokens = batch()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(LENGTH, device="cuda").expand(SEQUENCES, -1).contiguous()
    losses = []
    for _ in range(3):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = chunk(inputs, positions, None, labels=labels).float().mean()
        optimizer.scale_loss(loss).backward()
        chunk.finish_grad_sync()
        succeeded, _, _ = optimizer.step()
        if not succeeded:
            raise RuntimeError("the optimizer skipped a step")
        losses.append(loss.item())
    return losses


def train(folder: Path, mode: str, how: str) -> dict[str, Any]:
    from megasetup.masters import audit_master_weights, ensure_master_weights, sync_master_weights

    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    chunk, optimizer = load(folder, precision_aware=mode == "precision_aware")
    before = audit_master_weights(optimizer, chunk)
    if how == "sync":
        sync_master_weights(optimizer, chunk)
    elif how == "ensure":
        ensure_master_weights(optimizer, chunk)
    after = audit_master_weights(optimizer, chunk)
    clones = [copy for copy in before.copies if copy.level == 2]
    return {
        "stale_share": sum(copy.rounded_differences for copy in clones) / sum(copy.elements for copy in clones),
        "ok": after.ok,
        "losses": three_steps(chunk, optimizer),
        "ok_after_training": audit_master_weights(optimizer, chunk).ok,
    }


def main() -> None:
    command, folder, *rest = sys.argv[1:]
    result = teach(Path(folder)) if command == "teach" else train(Path(folder), *rest)
    print(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
