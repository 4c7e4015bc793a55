"""One rank with a training model and an inference model in another layout, without a GPU.

python inference_worker.py FOLDER: FOLDER holds dense/, a Hugging Face model. FLOW_PARALLEL gives the training model's
parallel sizes, FLOW_INFERENCE the other's. Setup, both models and Megatron's reshard are the real ones; CUDA's streams
stand aside, and the process groups that Bridge makes for NCCL are gloo's. Prints "as told", or ends with a traceback.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from draft_parts import plain_layers
from flow_config import policy_config
from flow_models import LENGTH, UNKNOWN, batch
from flow_worker import full_logits
from megatron.core.resharding.refit import swap_model_weights
from megatron.core.utils import unwrap_model
from setup_without_gpu import set_up

from megasetup.compat.no_gpu import no_gpu
from megasetup.model.inference import build_inference_model, pause_inference_model, resume_inference_model


def gloo_groups(make: Any) -> Any:
    return lambda ranks, backend=None, **arguments: make(ranks, backend="gloo", **arguments)


def logits(model: Any) -> torch.Tensor:
    rows = batch(UNKNOWN, "cpu")[:, :-1].contiguous()
    positions = torch.arange(LENGTH).expand(len(rows), -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return full_logits(model, unwrap_model(model)(rows, positions, mask))


def check_same(training: Any, inference: Any) -> None:
    swap_model_weights([training], [inference], "nccl")
    expected, found = logits(training), logits(inference)
    # Sums over two halves round otherwise than sums over a whole.
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def check(config: dict[str, Any]) -> None:
    cfg, made = set_up(config)
    training = made.model.eval()
    assert made.colocated_reshard_plan is not None
    initial = made.colocated_reshard_plan.initial_model_provider
    assert initial is not cfg.model
    assert getattr(initial, "_pg_collection", None) is None
    assert getattr(cfg.model, "_pg_collection", None) is not None
    before = {name: repr(value) for name, value in vars(initial).items()}
    with no_gpu():
        inference = build_inference_model(config, cfg, initial)
        assert before == {name: repr(value) for name, value in vars(initial).items()}
        sizes = config["generation"]["mcore_generation_config"]
        assert {name: getattr(inference.module.config, name) for name in sizes} == sizes
        assert not inference.training
        assert not any(parameter.requires_grad for parameter in inference.parameters())
        addresses = [parameter.data_ptr() for parameter in inference.parameters()]
        check_same(training, inference)
        # (there is no GPU memory to give back)
        assert not pause_inference_model()
        assert not resume_inference_model()
        with torch.no_grad():
            for parameter in training.parameters():
                parameter *= 0.9
        check_same(training, inference)
        assert addresses == [parameter.data_ptr() for parameter in inference.parameters()]


def main() -> None:
    warnings.simplefilter("ignore")
    plain_layers()
    parallel, asked = (json.loads(os.environ[name]) for name in ("FLOW_PARALLEL", "FLOW_INFERENCE"))
    config = policy_config(
        str(Path(sys.argv[1]) / "dense"),
        fraction=None,
        transformer_impl="local",
        **parallel,
    )
    config["generation"] = {"backend": "megatron", "colocated": {"enabled": True}, "mcore_generation_config": asked}
    with (
        mock.patch.object(torch.cuda, "Stream", return_value=None),
        mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(wait_stream=lambda _: None)),
        mock.patch.object(dist, "new_subgroups_by_enumeration", gloo_groups(dist.new_subgroups_by_enumeration)),
    ):
        check(config)
    print("as told", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
