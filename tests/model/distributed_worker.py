"""One rank of test_distributed.py: python distributed_worker.py CASE. Prints one line of JSON last."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from megasetup.model.distributed import destroy_parallel_state, setup_distributed


def summed() -> float:
    number = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(number)
    return number.item()


def again() -> dict[str, Any]:
    """Up and down, many times, Megatron's groups included."""
    from megatron.core import parallel_state

    sums, sizes = [], []
    destroy_parallel_state()
    for size in (1, 2, 1, 2, 1):
        setup_distributed({})
        sums.append(summed())
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=min(size, dist.get_world_size()))
        sizes.append(parallel_state.get_tensor_model_parallel_world_size())
    destroy_parallel_state()
    destroy_parallel_state()
    return {
        "sums": sums,
        "sizes": sizes,
        "initialized": dist.is_initialized(),
        "megatron": parallel_state.model_parallel_is_initialized(),
    }


def ready() -> dict[str, Any]:
    setup_distributed({"generation": {"backend": "sglang", "colocated": {"enabled": False}}})
    from torch._inductor import config

    return {
        "backend": dist.get_backend(),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "sum": summed(),
        "cache": config.autotune_local_cache,
        "allocator": os.environ["NCCL_CUMEM_ENABLE"],
    }


def dead() -> dict[str, Any]:
    """One rank ends without a word; the other is taken down all the same."""
    setup_distributed({})
    summed()
    if dist.get_rank() == 1:
        os._exit(0)
    destroy_parallel_state()
    return {"initialized": dist.is_initialized()}


def main() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = {"again": again, "ready": ready, "dead": dead}[sys.argv[1]]()
    ours = sorted({str(warning.message) for warning in caught if "process group is gloo" in str(warning.message)})
    print(json.dumps(result | {"warned": len(ours)}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
