"""One rank of test_nodes.py, under torchrun: python nodes_worker.py MODEL OUT.

As far as a trainer gets without a GPU: imports the Hugging Face folder MODEL into the folder that this node sees, makes
the config and loads the reference model; its tensors go to OUT/RANK.pt, and what was found to OUT/RANK.json.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from flow_config import policy_config

from megasetup.checkpoint.importing import handle_model_import
from megasetup.checkpoint.paths import validate_model_paths
from megasetup.config.runtime import validate_and_set_config
from megasetup.model import bridge, starting
from megasetup.model.distributed import destroy_parallel_state, setup_distributed
from megasetup.model.reference import setup_reference_model_state


def main() -> None:
    model, out = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    config = policy_config(model, transformer_impl="local", tensor_model_parallel_size=2, fraction=None)
    setup_distributed(config)
    name, path, exists = validate_model_paths(config)
    handle_model_import(config, name, path, exists)
    rank = dist.get_rank()
    cfg = validate_and_set_config(config, rank, name, path, None, None).megatron_cfg
    cfg.dist.distributed_backend = "gloo"
    cfg.checkpoint.fully_parallel_load = False  # (data-parallel ranks would exchange what they read on GPUs)
    state = starting.new_state(cfg, None)
    bridge.initialize(cfg, bridge.embedding_ranks(cfg.model, None), None)
    found = setup_reference_model_state(config, cfg, path)
    from megatron.core import parallel_state

    facts = {
        "world": dist.get_world_size(),
        "local_rank": os.environ["LOCAL_RANK"],
        "node": os.environ["GROUP_RANK"],
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
        "path": path,
        "existed": exists,
        "data_size": cfg.data_parallel_size,
    }
    torch.save({key: value for key, value in found.items() if isinstance(value, torch.Tensor)}, Path(out, f"{rank}.pt"))
    Path(out, f"{rank}.json").write_text(json.dumps(facts))
    destroy_parallel_state(state)


if __name__ == "__main__":
    main()
