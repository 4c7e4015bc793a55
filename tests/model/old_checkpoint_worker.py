"""Loads checkpoints that other versions made, as a setup does: python old_checkpoint_worker.py MODEL CHECKPOINT...

One gloo rank. Each CHECKPOINT is loaded as setup_model_and_optimizer loads the one to start from, one setup after
another, without an optimizer, which needs CUDA. Prints one line of JSON for each: what was loaded, or the error and its
notes.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import torch.distributed as dist
from flow_config import policy_config

from megasetup.config.runtime import validate_and_set_config
from megasetup.model import bridge, loading, starting
from megasetup.model.chunks import build_chunks
from megasetup.model.distributed import destroy_parallel_state, setup_distributed
from megasetup.model.stages import Stages


def load(model: str, checkpoint: str) -> dict[str, Any]:
    config = policy_config(model, transformer_impl="local", fraction=None)
    setup_distributed(config)
    cfg = validate_and_set_config(config, dist.get_rank(), model, checkpoint, None, None).megatron_cfg
    cfg.dist.distributed_backend = "gloo"
    cfg.checkpoint.fully_parallel_load = False
    state = starting.new_state(cfg, None)
    groups = bridge.initialize(cfg, bridge.embedding_ranks(cfg.model, None), None)
    chunks = build_chunks(config, cfg, groups, [], wrap_with_ddp=False)
    facts: dict[str, Any] = {"saved_optimizer": bridge.saved_optimizer(checkpoint)}
    try:
        with Stages("setup") as stages:
            restored = loading.load(stages, state, chunks, None, None, {}, None, [])
            facts |= {"restored": restored, "weights": stages.report.weights}
        facts["sums"] = {name: p.double().abs().sum().item() for name, p in chunks[0].module.named_parameters()}
    except Exception as error:
        facts |= {"error": f"{type(error).__name__}: {error}", "notes": error.__notes__}
    destroy_parallel_state(state)
    return facts


def main() -> None:
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=sys.stdout)
    model, *checkpoints = sys.argv[1:]
    for checkpoint in checkpoints:
        print("RESULT " + json.dumps(load(model, checkpoint)), flush=True)


if __name__ == "__main__":
    main()
