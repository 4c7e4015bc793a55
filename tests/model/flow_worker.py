"""One rank that sets models up as a trainer does and trains them: python flow_worker.py FOLDER CASE [CASE ...].

FOLDER is what flow_models.py made. Each case is a fresh setup in the same process, from setup_distributed on, and
prints one line: its name and its result as JSON. A case that raises prints its traceback and the worker goes on.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flow_config import policy_config
from flow_models import LENGTH, SEQUENCES, TAUGHT, UNKNOWN, batch

from megasetup.checkpoint.importing import handle_model_import
from megasetup.checkpoint.paths import validate_model_paths
from megasetup.config.runtime import validate_and_set_config
from megasetup.masters import audit_master_weights
from megasetup.model.distributed import setup_distributed
from megasetup.model.finalize import finalize_megatron_setup
from megasetup.model.result import ModelAndOptimizerState
from megasetup.model.training import setup_model_and_optimizer

CASES: dict[str, Callable[..., dict[str, Any]]] = {}
FOLDER = Path(sys.argv[1])


def case(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    CASES[function.__name__] = function
    return function


class Run:
    """One setup, from the config to a model that can take steps."""

    def __init__(
        self, config: dict[str, Any], weights: str | None = None, optimizer: str | None = None, **setup: Any
    ) -> None:
        self.config = config
        setup_distributed(config)
        name, self.pretrained, exists = validate_model_paths(config)
        handle_model_import(config, name, self.pretrained, exists)
        runtime = validate_and_set_config(config, dist.get_rank(), name, self.pretrained, weights, optimizer)
        self.cfg = runtime.megatron_cfg
        self.made: ModelAndOptimizerState = setup_model_and_optimizer(config, self.cfg, **setup)
        model = self.made.model
        self.chunks = model if isinstance(model, list) else [model]
        self.tokenizer, self.bridge, self.disable_hook, self.dp_size = finalize_megatron_setup(
            config, self.cfg, name, None, model, self.made.optimizer
        )

    def _pass(self, seed: int, *, train: bool) -> float:
        """The mean loss over the whole batch of all data-parallel ranks, the same on every rank."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rank = parallel_state.get_data_parallel_rank()
        rows = batch(seed).chunk(self.dp_size)[rank]
        size = 2 if len(rows) >= 2 else 1
        pieces = rows.split(size)
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(pieces),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(pieces),
            seq_length=LENGTH,
            micro_batch_size=size,
            forward_only=not train,
        )
        total = torch.zeros(2, device="cuda")
        for result in results:
            total += result["loss"].to("cuda")
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        stages = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(total, parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
        return (total[0] / total[1]).item()

    def evaluate(self, seed: int = TAUGHT) -> float:
        for chunk in self.chunks:
            chunk.eval()
        if self.disable_hook:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()
        with torch.no_grad():
            loss = self._pass(seed, train=False)
        if self.disable_hook:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()
        for chunk in self.chunks:
            chunk.train()
        return loss

    def step(self, seed: int = TAUGHT) -> float:
        """One optimizer step; the loss before it."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.made.optimizer.zero_grad()
        loss = self._pass(seed, train=True)
        succeeded, _, _ = self.made.optimizer.step()
        assert succeeded
        self.made.scheduler.step(increment=SEQUENCES)
        self.made.state.train_state.step += 1
        self.made.state.train_state.consumed_train_samples += SEQUENCES
        return loss

    def facts(self, steps: int = 3) -> dict[str, Any]:
        """Losses before and while training, and what the report says."""
        report = self.made.report
        known, unknown = self.evaluate(TAUGHT), self.evaluate(UNKNOWN)
        losses = [self.step() for _ in range(steps)]
        audit = audit_master_weights(self.made.optimizer, self.chunks)
        assert report.audit is not None
        return {
            "known": known,
            "unknown": unknown,
            "losses": losses,
            "after": self.evaluate(),
            "exact": all(found.state == "exact" for found in report.audit.copies),
            "levels": sorted({found.level for found in report.audit.copies}),
            "ok_after_training": audit.ok,
            "synced": report.sync is not None,
            "stages": [stage.name for stage in report.stages],
            "report": str(report),
        }


def forward_step(pieces: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    rows = next(pieces)
    positions = torch.arange(LENGTH, device="cuda").expand(len(rows), -1)
    output = model(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous())
    return output, functools.partial(summed_loss)


def summed_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = output.float().sum()
    count = torch.tensor(output.numel(), dtype=torch.int, device="cuda")
    return total, count, {"loss": torch.stack([total.detach(), count.float()])}


def parallel() -> dict[str, Any]:
    """Parallel sizes that the environment asks for."""
    sizes: dict[str, Any] = json.loads(os.environ.get("FLOW_PARALLEL", "{}"))
    return sizes


def config(kind: str, **settings: Any) -> dict[str, Any]:
    return policy_config(str(FOLDER / kind), **(parallel() | settings))


@case
def dense() -> dict[str, Any]:
    return Run(config("dense")).facts()


@case
def dense_partial() -> dict[str, Any]:
    return Run(config("dense", fraction=0.3)).facts()


@case
def dense_overlap() -> dict[str, Any]:
    run = Run(config("dense", overlap=True))
    return run.facts() | {"disable_hook": run.disable_hook}


@case
def dense_aware() -> dict[str, Any]:
    return Run(config("dense", precision_aware=True)).facts()


@case
def dense_aware_partial() -> dict[str, Any]:
    return Run(config("dense", precision_aware=True, fraction=0.3)).facts()


@case
def dense_stock() -> dict[str, Any]:
    return Run(config("dense", fast_hybrid_optimizer=False)).facts()


@case
def dense_aware_stock() -> dict[str, Any]:
    return Run(config("dense", precision_aware=True, fraction=0.3, fast_hybrid_optimizer=False)).facts()


@case
def dense_on_gpu() -> dict[str, Any]:
    return Run(config("dense", fraction=None)).facts()


@case
def moe() -> dict[str, Any]:
    return Run(config("moe")).facts()


@case
def moe_aware() -> dict[str, Any]:
    return Run(config("moe", precision_aware=True)).facts()


@case
def moe_frozen() -> dict[str, Any]:
    from megasetup.moe import MoEFloat16Module, find_routers

    run = Run(config("moe", freeze_moe_router=True))
    before = [parameter.detach().clone() for _, router in find_routers(run.chunks) for parameter in router.parameters()]
    facts = run.facts()
    after = [parameter for _, router in find_routers(run.chunks) for parameter in router.parameters()]
    return facts | {
        "routers": len(before),
        "unchanged": all(map(torch.equal, before, after)),
        "frozen": not any(parameter.requires_grad for parameter in after),
        "wrapper": isinstance(run.chunks[0].module, MoEFloat16Module),
    }


@case
def lora() -> dict[str, Any]:
    peft = {"enabled": True, "dim": 8, "alpha": 32}
    run = Run(config("dense", peft=peft))
    trained = [name for name, parameter in run.chunks[0].named_parameters() if parameter.requires_grad]
    return run.facts() | {"trained": trained}


@case
def value_model() -> dict[str, Any]:
    from megasetup.config.value_model import make_policy_like_config

    return Run(make_policy_like_config(config("dense"))).facts()


@case
def reference() -> dict[str, Any]:
    from megasetup.model.reference import setup_reference_model_state

    results = {}
    for name, settings in {"dense": {}, "lora": {"peft": {"enabled": True, "dim": 8, "alpha": 32}}}.items():
        run = Run(config("dense", **settings))
        found = setup_reference_model_state(run.config, run.cfg, run.pretrained)
        own = {key: value for key, value in run.chunks[0].state_dict().items() if isinstance(value, torch.Tensor)}
        found = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
        base = [key for key in own if "adapter" not in key]
        results[name] = {
            "same_names": own.keys() == found.keys(),
            "on_cpu": all(value.device.type == "cpu" for value in found.values()),
            "equal": all(torch.equal(own[key].cpu(), found[key]) for key in base),
            "tensors": len(base),
            "adapters_add_nothing": all(
                not found[key].any() for key in found if "adapter" in key and "linear_out" in key
            ),
            "losses": [run.step() for _ in range(2)],  # the policy still trains
        }
    return results


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    """Every FP32 copy and every moment that the optimizer has, on the CPU."""
    from megasetup.masters import plan_sync

    found = [
        copy.detach().float().cpu().clone()
        for entry in plan_sync(optimizer, levels="all").copies
        for _, copy in entry.levels
    ]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                found += [
                    state[key].detach().float().cpu().clone() for key in ("exp_avg", "exp_avg_sq") if key in state
                ]
    return found


def resume_with(save_settings: dict[str, Any], *, kind: str = "dense", **load: Any) -> dict[str, Any]:
    from megatron.bridge.training.checkpointing import save_checkpoint

    target = FOLDER / "saved" / f"{load.pop('name')}"
    run = Run(config(kind, **save_settings))
    for _ in range(2):
        run.step(UNKNOWN)
    made = run.made
    run.cfg.checkpoint.save = str(target)
    save_optimizer = load.pop("save_optim", True)
    run.cfg.checkpoint.save_optim = save_optimizer
    saved = masters_of(made.optimizer)
    save_checkpoint(
        state=made.state,
        model=run.chunks,
        optimizer=made.optimizer if save_optimizer else None,
        opt_param_scheduler=made.scheduler if save_optimizer else None,
        num_floating_point_operations_so_far=0,
        checkpointing_context=made.checkpointing_context,
    )
    evaluated = run.evaluate(UNKNOWN)
    expected = [run.step(UNKNOWN) for _ in range(3)]
    del run, made
    again = Run(config(kind, **(save_settings | load)), weights=str(target), optimizer=str(target))
    report = again.made.report
    loaded = masters_of(again.made.optimizer)
    return {
        "evaluated": [evaluated, again.evaluate(UNKNOWN)],
        "expected": expected,
        "losses": [again.step(UNKNOWN) for _ in range(3)],
        "step": again.made.state.train_state.step - 3,
        "bits": len(saved) == len(loaded) and all(map(torch.equal, saved, loaded)),
        "copies": [len(saved), len(loaded)],
        "ensured": report.ensure is not None,
        "synced": report.sync is not None,
        "weights": report.weights,
        "read": next(stage.bytes for stage in report.stages if stage.name == "load"),
        "on_disk": sum(file.stat().st_size for file in target.rglob("*.distcp")),
        "parameters": sum(parameter.numel() for chunk in again.chunks for parameter in chunk.parameters()),
        "report": str(report),
    }


@case
def resume() -> dict[str, Any]:
    return resume_with({}, name="full")


@case
def resume_partial() -> dict[str, Any]:
    return resume_with({"fraction": 0.3}, name="partial")


@case
def resume_aware() -> dict[str, Any]:
    return resume_with({"precision_aware": True}, name="aware")


@case
def resume_other_fraction() -> dict[str, Any]:
    return resume_with({"fraction": 1.0}, name="other", fraction=0.3)


@case
def resume_weights_only() -> dict[str, Any]:
    return resume_with({}, name="weights", save_optim=False)


@case
def inference() -> dict[str, Any]:
    from megatron.core.resharding.refit import clear_all_caches, swap_model_weights
    from megatron.core.utils import unwrap_model

    from megasetup.model.inference import build_inference_model, pause_inference_model, resume_inference_model

    generation = {
        "backend": "megatron",
        "colocated": {"enabled": True},
        "mcore_generation_config": json.loads(os.environ.get("FLOW_INFERENCE", "{}")),
    }
    settings = config("dense")
    settings["generation"] = generation
    run = Run(settings)
    plan = run.made.colocated_reshard_plan
    if plan is None:
        return {"plan": None}
    second = build_inference_model(settings, run.cfg, plan.initial_model_provider)
    swap_model_weights(run.chunks, [second], "nccl")
    clear_all_caches()
    rows = batch(UNKNOWN)[:, :-1].contiguous()
    positions = torch.arange(LENGTH, device="cuda").expand(len(rows), -1)
    addresses = [parameter.data_ptr() for parameter in second.parameters()]
    paused = pause_inference_model()  # (only where torch_memory_saver is installed)
    facts: dict[str, Any] = {"losses": [run.step() for _ in range(2)]}
    assert resume_inference_model() == paused
    facts["same_addresses"] = addresses == [parameter.data_ptr() for parameter in second.parameters()]
    swap_model_weights(run.chunks, [second], "nccl")
    clear_all_caches()
    with torch.no_grad():
        run.chunks[0].eval()
        found = [full_logits(model, unwrap_model(model)(rows, positions, None)) for model in (run.chunks[0], second)]
    run.chunks[0].train()
    return facts | {
        "difference": (found[0] - found[1]).abs().max().item(),
        "largest": found[0].abs().max().item(),
        "grad": any(parameter.requires_grad for parameter in second.parameters()),
        "training": second.training,
        "size": [found[0].shape[-1], found[1].shape[-1]],
    }


def full_logits(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """Logits of the whole vocabulary, gathered over the model's own tensor-parallel ranks."""
    from megatron.core.utils import unwrap_model

    group = unwrap_model(model).pg_collection.tp
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1).float()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("megasetup").setLevel(logging.INFO)
    warnings.simplefilter("ignore")
    for name in sys.argv[2:]:
        try:
            result = CASES[name]()
        except BaseException:
            traceback.print_exc()
            result = {"failed": traceback.format_exc()}
        print(f"RESULT {name} {json.dumps(result)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
