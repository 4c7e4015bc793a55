"""Two Ray actors as two ranks, their methods off the main thread: python ray_worker.py MODEL FOLDER.

Each imports the Hugging Face folder MODEL with the other, makes the config and a GlobalState, loads the reference
model, and lets the engine find, refresh and name its FP32 copies. Prints one line of JSON: a result for each rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import warnings
from typing import Any

import ray
import torch
from flow_config import policy_config
from launch import free_port

_RANKS = 2


class Rank:
    """What a trainer's worker does, as far as it goes without a GPU."""

    def __init__(self, rank: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(_RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def set_up(self, model: str, folder: str) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        from megasetup.checkpoint.importing import handle_model_import
        from megasetup.checkpoint.paths import validate_model_paths
        from megasetup.config.runtime import validate_and_set_config
        from megasetup.model import bridge, starting
        from megasetup.model.distributed import destroy_parallel_state, setup_distributed
        from megasetup.model.reference import setup_reference_model_state

        os.environ["MEGASETUP_CHECKPOINT_DIR"] = folder
        config = policy_config(model, transformer_impl="local", tensor_model_parallel_size=_RANKS, fraction=None)
        setup_distributed(config)
        name, path, exists = validate_model_paths(config)
        handle_model_import(config, name, path, exists)
        runtime = validate_and_set_config(config, torch.distributed.get_rank(), name, path, None, None)
        cfg = runtime.megatron_cfg
        cfg.dist.distributed_backend = "gloo"
        state = starting.new_state(cfg, None)
        handled = self._handles_signals()
        bridge.initialize(cfg, bridge.embedding_ranks(cfg.model, None), None)
        found = setup_reference_model_state(config, cfg, path)
        destroy_parallel_state(state)
        weights = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
        return {
            "main_thread": threading.current_thread() is threading.main_thread(),
            "existed": exists,
            "rank": int(os.environ["RANK"]),
            "dtype": str(runtime.dtype),
            "sums": {key: value.double().abs().sum().item() for key, value in weights.items()},
            "handled": handled,
            "engine": _engine(weights),
        }

    @staticmethod
    def _handles_signals() -> bool:
        """Bridge's own handler, which Python lets only the main thread install, is entered and left."""
        from megatron.bridge.training.utils.sig_utils import DistributedSignalHandler

        with DistributedSignalHandler() as handler:
            return handler is not None


def _engine(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    from megasetup import SyncPlan
    from megasetup.masters import WeightCopies, audit_plan

    plan = SyncPlan.from_copies(
        [
            WeightCopies(name, weight.view(-1), ((1, torch.randn(weight.numel())), (2, torch.randn(weight.numel()))))
            for name, weight in weights.items()
        ]
    )
    stale = len(audit_plan(plan).stale)
    plan.run()
    states = {copy.state for copy in audit_plan(plan).copies}
    broken = plan.copies[len(plan.copies) // 2]
    broken.levels[-1][1].view(-1)[3] += 1
    named = [(copy.name, copy.level, copy.first_index) for copy in audit_plan(plan).stale]
    return {
        "copies": len(plan.copies),
        "stale": stale,
        "states": sorted(states),
        "broken": broken.name,
        "named": named,
        "equal": all(torch.equal(entry.levels[0][1], entry.source.float()) for entry in plan.copies),
    }


def main() -> None:
    model, folder = sys.argv[1:]
    # (a socket's path may have 107 characters: a test's own folder can be too deep)
    with tempfile.TemporaryDirectory(prefix="ray") as short:
        ray.init(num_cpus=_RANKS, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=short)
        try:
            # More than one method at a time: Ray runs them on threads of its own.
            actor = ray.remote(max_concurrency=2, num_cpus=1)(Rank)
            port = free_port()
            ranks = [actor.remote(rank, port) for rank in range(_RANKS)]
            print("RESULT " + json.dumps(ray.get([rank.set_up.remote(model, folder) for rank in ranks], timeout=240)))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
