"""One rank that sets a policy and its draft up without a GPU, saves them and resumes.

python draft_setup_worker.py FOLDER KIND [KIND ...]: FOLDER is what draft_gpu_model.write_models made; FLOW_PARALLEL
gives the parallel sizes. Setup and checkpoints are the real ones (setup_without_gpu), Transformer Engine's layers stand
aside as in draft_parts. Prints "KIND as told" for each kind of run.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from draft_gpu_model import CONFIG, weights
from draft_parts import plain_layers, write_draft
from flow_config import policy_config
from megatron.core import parallel_state
from setup_without_gpu import set_up

from megasetup.compat.bridge import import_bridge
from megasetup.compat.no_gpu import no_gpu
from megasetup.model.draft import export_draft

FOLDER = Path(sys.argv[1])
KINDS: dict[str, dict[str, Any]] = {"whole": {}, "adapters": {"peft": {"enabled": True, "dim": 8, "alpha": 32}}}


def start(settings: dict[str, Any], draft: Path, saved: Path | None = None) -> tuple[Any, Any]:
    """The completed config and what the setup made."""
    sizes = json.loads(os.environ["FLOW_PARALLEL"])
    config = policy_config(str(FOLDER / "dense"), fraction=None, transformer_impl="local", **sizes, **settings)
    config["draft"] = {"enabled": True, "model_name": str(draft)}
    return set_up(config, saved)


def save(cfg: Any, made: Any, target: Path) -> None:
    checkpointing = import_bridge("megatron.bridge.training.checkpointing")
    cfg.checkpoint.save = str(target)
    made.state.train_state.step = 3
    with no_gpu():
        checkpointing.save_checkpoint(
            state=made.state,
            model=[made.model],
            optimizer=None,
            opt_param_scheduler=None,
            num_floating_point_operations_so_far=0,
            checkpointing_context=made.checkpointing_context,
        )


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def other_draft() -> Path:
    """A draft of the same sizes with other weights and other tokens: none of it may be left after a resume."""
    folder = FOLDER / "other"
    if dist.get_rank() == 0:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
        tensors["t2d"][: len(tensors["d2t"])] = True
        write_draft(folder, CONFIG, tensors)
    dist.barrier()
    return folder


def check(kind: str, settings: dict[str, Any]) -> None:
    cfg, made = start(settings, FOLDER / "draft")
    draft = made.draft_model
    assert (draft is not None) == parallel_state.is_pipeline_last_stage()
    said = made.report.weights
    assert said.startswith("base model "), said
    assert said.endswith(", a draft"), said
    base = {
        name: tensor.clone() for name, tensor in made.model.state_dict().items() if isinstance(tensor, torch.Tensor)
    }
    expected = {}
    if draft is not None:
        check_equal(export_draft(draft), weights())
        assert all(parameter.requires_grad for parameter in draft.parameters())
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter += 1
        expected = export_draft(draft)
    save(cfg, made, FOLDER / "saved" / kind)
    _, again = start(settings, other_draft(), FOLDER / "saved" / kind)
    if again.draft_model is not None:
        check_equal(export_draft(again.draft_model), expected)
    for name, tensor in again.model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and "draft_model" not in name:
            assert torch.equal(tensor, base[name]), name
    print(f"{kind} as told", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    plain_layers()
    for kind in sys.argv[2:]:
        check(kind, KINDS[kind])
    dist.destroy_process_group()


if __name__ == "__main__":  # (Megatron starts a process of its own while it saves, and that imports this file)
    main()
