"""One rank of a real NCCL run: a small model, DistributedDataParallel and the optimizer, and what they hold.

Its argument is JSON: a name, a model folder, the provider's fields, the offload fraction and the mode of each case.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from planning.architectures import configs, provider_of


def held_of(folder: str, fields: dict[str, Any], fraction: float | None, aware: bool) -> dict[str, int]:
    # The local layers, so that the test needs no Transformer Engine and parameters come in the plan's order.
    provider = provider_of(
        Path(folder), gradient_accumulation_fusion=False, moe_permute_fusion=False, moe_grouped_gemm=False, **fields
    )
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core import parallel_state
    from megatron.core.optimizer import get_megatron_optimizer

    provider.transformer_layer_spec = local_layer_spec
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    optimizer_config, ddp_config = configs(fraction, aware=aware)
    chunks = provider.provide_distributed_model(ddp_config=ddp_config, wrap_with_ddp=True)
    optimizer = get_megatron_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    shards = [
        shard
        for part in optimizer.chained_optimizers
        for group in part.shard_fp32_from_float16_groups
        for shard in group
        if shard is not None
    ]
    hybrids = [part.optimizer for part in optimizer.chained_optimizers if fraction is not None]
    clones = [clone for hybrid in hybrids for clone in hybrid.gpu_params_map_cpu_copy.values()]
    copies = [copy for hybrid in hybrids for copy in hybrid.param_to_fp32_param.values() if copy.is_cuda]
    held = {
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "FP32 shards": sum(shard.nbytes for shard in shards),
        "clones": sum(clone.nbytes for clone in clones),
        "FP32 working copies": sum(copy.nbytes for copy in copies),
    }
    parallel_state.destroy_model_parallel()
    return held


def main() -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    held = {name: held_of(*case) for name, *case in json.loads(sys.argv[1])}
    print("HELD " + json.dumps(held))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
