"""One rank of a real gloo run: builds small models on the CPU as Bridge does and prints what it holds.

Its argument is JSON: a name, a model folder and the provider's fields of each model.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from planning.architectures import provider_of


def held_of(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    # A CPU has no Transformer Engine and no streams: the local layers, and a dispatcher that needs neither.
    provider = provider_of(
        Path(folder),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        moe_permute_fusion=False,
        moe_grouped_gemm=False,
        moe_token_dispatcher_type="allgather",
        **fields,
    )
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=provider.tensor_model_parallel_size,
        pipeline_model_parallel_size=provider.pipeline_model_parallel_size,
        expert_model_parallel_size=provider.expert_model_parallel_size,
        expert_tensor_parallel_size=provider.expert_tensor_parallel_size,
    )
    provider.transformer_layer_spec = local_layer_spec
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide().bfloat16()
    parallel_state.destroy_model_parallel()
    return {
        name: [
            list(parameter.shape),
            str(parameter.dtype),
            bool(getattr(parameter, "allreduce", True)),
            bool(getattr(parameter, "tensor_model_parallel", False)),
        ]
        for name, parameter in model.named_parameters()
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo")
    held = {name: held_of(folder, fields) for name, folder, fields in json.loads(sys.argv[1])}
    print("HELD " + json.dumps(held))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
