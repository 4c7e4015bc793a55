"""One rank of test_setup_cpu.py: python flow_cpu_worker.py MODEL OUT. All of the flow that runs without a GPU.

Imports the Hugging Face folder MODEL on gloo ranks, checks the config, and loads the reference model; its tensors go to
OUT/RANK.pt. Megatron's forward pass and its optimizers need CUDA, so that is where it ends.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flow_config import policy_config

from megasetup.checkpoint.importing import handle_model_import
from megasetup.checkpoint.paths import validate_model_paths
from megasetup.config.runtime import validate_and_set_config
from megasetup.model import bridge, starting, training
from megasetup.model.chunks import build_chunks
from megasetup.model.distributed import destroy_parallel_state, setup_distributed
from megasetup.model.finalize import finalize_megatron_setup
from megasetup.model.reference import setup_reference_model_state


def refused(config: dict[str, Any], cfg: Any) -> list[str]:
    """The error of a setup for training, and its notes."""
    try:
        training.setup_model_and_optimizer(config, cfg)
    except Exception as error:
        return [f"{type(error).__name__}: {error}", *error.__notes__]
    return []


def optional_parts(chunks: list[Any]) -> list[str]:
    """What is there of flows that the config does not switch on."""
    names = ("draft.eagle", "draft.weights", "linear_logprobs", "inference")
    found = [name for name in names if f"megasetup.model.{name}" in sys.modules]
    for chunk in chunks:
        for name, module in chunk.named_modules():
            hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            found += [name] * any(hooks)
    replay = sys.modules.get("megatron.core.transformer.moe.router_replay")
    return found + ["replay"] * bool(replay is not None and replay.RouterReplay.global_router_replay_instances)


def main() -> None:
    model, out = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("megasetup").setLevel(logging.INFO)
    warnings.simplefilter("ignore")
    world = int(os.environ["WORLD_SIZE"])
    config = policy_config(model, transformer_impl="local", tensor_model_parallel_size=world, fraction=None)
    setup_distributed(config)
    name, path, exists = validate_model_paths(config)
    handle_model_import(config, name, path, exists)
    rank = dist.get_rank()
    runtime = validate_and_set_config(config, rank, name, path, None, None)
    cfg = runtime.megatron_cfg
    facts: dict[str, Any] = {"existed": exists, "draft": refused({**config, "draft": {"enabled": True}}, cfg)}
    setup_distributed(config)  # (the refusal took the process group down on every rank)
    facts["no_gpu"] = refused(config, cfg)
    setup_distributed(config)
    cfg.dist.distributed_backend = "gloo"
    state = starting.new_state(cfg, None)
    groups = bridge.initialize(cfg, bridge.embedding_ranks(cfg.model, None), None)
    found = setup_reference_model_state(config, cfg, path)
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    torch.save(tensors, Path(out) / f"{rank}.pt")
    chunks = build_chunks(config, cfg, groups, [], wrap_with_ddp=False)
    tokenizer, auto_bridge, disable, dp_size = finalize_megatron_setup(config, cfg, name, None, chunks, None)
    facts |= {
        "optional": optional_parts(chunks),
        "vocabulary": tokenizer.vocab_size,
        "bridge": type(auto_bridge).__name__,
        "disable": disable,
        "dp_size": dp_size,
        "padded": runtime.final_padded_vocab_size,
    }
    try:
        cfg.model.tensor_model_parallel_size = 4
        bridge.initialize(cfg, None, None)
    except RuntimeError as error:
        facts["other_sizes"] = str(error)
    destroy_parallel_state(state)
    print("RESULT " + json.dumps(facts))


if __name__ == "__main__":
    main()
