"""flow_worker.py on a machine without a GPU: python flow_on_cpu_worker.py FOLDER CASE [CASE ...].

The whole setup and training with Megatron's local layers, on gloo, with the CPU as a stand-in for the GPU
(cpu_as_gpu.py). The cases of flow_worker.py, and those below; results are printed as there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import flow_worker
import torch
from cpu_as_gpu import cpu_as_gpu
from flow_models import TAUGHT, batch
from flow_worker import FOLDER, Run, case, config, resume_with

from megasetup.compat.local_layers import name_as_transformer_engine, with_extra_states
from megasetup.model import training


@case
def dense_weights() -> dict[str, Any]:
    return against_hugging_face("dense")


@case
def moe_weights() -> dict[str, Any]:
    return against_hugging_face("moe")


def against_hugging_face(kind: str) -> dict[str, Any]:
    """The model that a setup made: its weights under Hugging Face's names, and its logits."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run = Run(config(kind))
    expected = load_file(FOLDER / kind / "model.safetensors")
    found = dict(run.bridge.export_hf_weights(run.chunks, show_progress=False))
    tokens = batch(TAUGHT)[:, :-1].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER / kind, dtype=torch.bfloat16).eval()
    run.chunks[0].eval()
    with torch.no_grad():
        logits = run.chunks[0](tokens, positions, None).float()
        wanted = theirs(input_ids=tokens).logits.float()
    return {
        "names": found.keys() == expected.keys(),
        "different": [name for name in expected if not torch.equal(found[name].cpu(), expected[name])],
        "tensors": len(expected),
        "spread": wanted.std().item(),
        "difference": (logits - wanted).abs().mean().item(),
        "worst": (logits - wanted).abs().max().item(),
        "read": next(stage.bytes for stage in run.made.report.stages if stage.name == "load"),
        "on_disk": sum(file.stat().st_size for file in Path(run.pretrained).rglob("*.distcp")),
        "parameters": sum(tensor.numel() for tensor in expected.values()),
    }


@case
def resume_moe() -> dict[str, Any]:
    return resume_with({}, kind="moe", name="moe")


@case
def moe_of_the_other_layers() -> dict[str, Any]:
    """What resume_moe saved, under the names of local layers, in a model that has Transformer Engine's names.

    The layers are local ones, named and with extra states as Transformer Engine's are, which need a GPU.
    """
    hooks = [name_as_transformer_engine, with_extra_states]
    saved = str(FOLDER / "saved" / "moe")
    own = Run(config("moe"), weights=saved)
    other = Run(config("moe"), weights=saved, additional_pre_wrap_hooks=hooks)
    names = [set(unwrap(run).sharded_state_dict()) for run in (own, other)]
    return {
        "extra_states": len(names[1] - names[0]),
        "equal": list(map(torch.equal, own.chunks[0].parameters(), other.chunks[0].parameters())),
        "losses": [own.evaluate(), other.evaluate()],
    }


@case
def state_of_the_other_layers() -> dict[str, Any]:
    """What resume_moe saved, with a config that says that Transformer Engine's layers saved it."""
    other = FOLDER / "saved" / "other"
    shutil.copytree(FOLDER / "saved" / "moe", other)
    (file,) = other.glob("iter_*/run_config.yaml")
    text = file.read_text()
    assert "transformer_impl: local" in text
    file.write_text(text.replace("transformer_impl: local", "transformer_impl: transformer_engine"))
    try:
        Run(config("moe"), weights=str(other), optimizer=str(other))
    except RuntimeError as error:
        refused = str(error)
    return {"refused": refused, "weights": Run(config("moe"), weights=str(other)).made.report.weights}


@case
def callers_wishes() -> dict[str, Any]:
    """What a setup does with the functions that its caller gives, and when."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.utils import get_model_config

    events: list[str] = []
    before_load: list[torch.Tensor] = []

    def embedding_ranks(*_args: Any, **_kwargs: Any) -> list[int]:
        events.append("embedding ranks")
        return [0]

    def before_wrapping(chunks: list[Any]) -> None:
        events.append(f"pre-wrap {type(chunks[0]).__name__}")

    def before_loading(chunks: list[Any]) -> None:
        events.append(f"pre-load {type(chunks[0]).__name__}")
        before_load.append(next(chunks[0].parameters()).detach().clone())

    gather = {"overlap_grad_reduce": True, "overlap_param_gather": True, "align_param_gather": True}
    run = Run(
        config("dense", distributed_data_parallel_config={"grad_reduce_in_fp32": True, **gather}),
        get_embedding_ranks=embedding_ranks,
        additional_pre_wrap_hooks=[before_wrapping],
        pre_load_checkpoint_hook=before_loading,
    )
    chunk = run.chunks[0]
    loaded = next(chunk.parameters()).detach().clone()
    # As initialised, without an optimizer.
    bare = Run(config("dense"), load_weights=False, load_optimizer=False)
    return {
        "events": events,
        "loaded_before": torch.equal(before_load[0], loaded),
        "wrapped": isinstance(chunk, DistributedDataParallel),
        "param_sync": run.made.param_sync_func == chunk.start_param_sync,
        "settings": get_model_config(chunk).param_sync_func == chunk.start_param_sync,
        "mapping": run.cfg.dist.external_gpu_device_mapping,
        "losses": [run.step() for _ in range(2)],
        "bare": [bare.made.optimizer, bare.made.scheduler, bare.made.param_sync_func],
        "bare_loaded": torch.equal(next(bare.chunks[0].parameters()), loaded),
        "bare_report": [bare.made.report.weights, [stage.name for stage in bare.made.report.stages]],
    }


def unwrap(run: Run) -> Any:
    from megatron.core.utils import unwrap_model

    return unwrap_model(run.chunks[0])


@case
def resume_offloaded() -> dict[str, Any]:
    return resume_with({"fraction": 1.0}, name="offloaded")


def _need_no_gpu() -> None:
    """A GPU is what cpu_as_gpu stands in for."""


if __name__ == "__main__":
    training.need_gpu = _need_no_gpu
    with cpu_as_gpu():
        flow_worker.main()
