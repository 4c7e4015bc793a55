"""What `megasetup plan` says of a one-GPU run of Qwen2.5-1.5B's shapes, against what that run really allocates.

The model is Megatron-Bridge's own, with Transformer Engine's layers and random weights, in DistributedDataParallel with
a DistributedOptimizer; nothing is downloaded. GPU memory is what torch's allocator holds after each stage; host memory
is the tensors that the hybrid optimizer holds, and what the sync's staging takes. Run it alone on a GPU:

    python benchmarks/plan_against_real.py --json benchmarks/results/plan-h200.json

It exits with status 1 when an item of at least 150 MB, or a sum, is off by more than 3%.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megasetup.compat.bridge import import_bridge
from megasetup.compat.fusions import without_missing_fusions
from megasetup.masters.hybrid_slices import MOMENTS
from megasetup.planning import RunPlan, plan_run
from megasetup.planning.memory import STAGING_PINNED

TOLERANCE = 0.03
SMALL = 150_000_000  # items below this are printed and not judged

QWEN2_5_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


class Case(NamedTuple):
    """One way to train: offload fraction (None for no offload), mode, gradients, and whose hybrid optimizer."""

    fraction: float | None
    precision_aware: bool = False
    fp32_gradients: bool = True
    fast: bool = True


CASES = {
    "standard, all offloaded": Case(1.0),
    "standard, half offloaded": Case(0.5),
    "standard, all offloaded, Megatron's hybrid optimizer": Case(1.0, fast=False),
    "precision-aware, all offloaded": Case(1.0, precision_aware=True),
    "precision-aware, half offloaded": Case(0.5, precision_aware=True),
    "standard, BF16 gradients, none offloaded": Case(None, fp32_gradients=False),
}


def provider_of(settings: dict[str, Any]) -> Any:
    """A finalized Bridge provider for a Hugging Face configuration, in BF16."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        provider = AutoBridge.from_hf_config(AutoConfig.from_pretrained(folder)).to_megatron_provider(
            load_weights=False
        )
    provider.bf16, provider.params_dtype = True, torch.bfloat16
    without_missing_fusions(provider)
    provider.finalize()
    return provider


def configs_of(case: Case) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": case.fraction}
    optimizer = OptimizerConfig(
        optimizer="adam",
        lr=1e-5,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=case.precision_aware,
        **({} if case.fraction is None else offload),
    )
    return optimizer, DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=case.fp32_gradients, overlap_grad_reduce=False
    )


def settled() -> int:
    """Bytes that torch's GPU allocator holds once garbage is gone."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def resident() -> int:
    """Bytes of host memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def block(tensor: torch.Tensor, case: Case) -> int:
    """Host bytes behind a tensor: torch's pinned allocator gives the next power of two, an arena what is asked."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_pinned() and not case.fast else tensor.nbytes


def measure(case: Case) -> tuple[dict[str, int], dict[str, float]]:
    """Build, step once and sync: bytes by the plan's own item names, and other figures."""
    from megatron.core.optimizer import get_megatron_optimizer

    from megasetup import plan_sync
    from megasetup.compat.hybrid_optimizer import fast_hybrid_optimizer

    optimizer_config, ddp_config = configs_of(case)
    found: dict[str, int] = {}
    before = settled()
    chunks = provider_of(QWEN2_5_1_5B).provide_distributed_model(ddp_config=ddp_config, wrap_with_ddp=True)
    found["weights + gradients, GPU"] = settled() - before
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    found["weights, GPU"] = sum(buffer.param_data.nbytes for buffer in buffers)
    found["gradients, GPU"] = sum(buffer.grad_data.nbytes for buffer in buffers)

    before, host_before = settled(), resident()
    start = time.perf_counter()
    with fast_hybrid_optimizer() if case.fast else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
    made = time.perf_counter() - start
    shards = settled() - before
    found["FP32 shards, GPU"] = shards
    for buffer in buffers:
        buffer.grad_data.normal_(std=1e-3)
    before = settled()
    optimizer.step()
    found["moments + FP32 gradients of a step, GPU"] = settled() - before
    grown = resident() - host_before

    hybrids = [part.optimizer for part in optimizer.chained_optimizers if hasattr(part.optimizer, "cpu_optimizers")]
    clones = [clone for hybrid in hybrids for clone in hybrid.gpu_params_map_cpu_copy.values()]
    gradients = [gradient for hybrid in hybrids for gradient in hybrid.cpu_copy_map_grad.values()]
    if case.fast:  # the ring
        runs = [bucket.grads for hybrid in hybrids for bucket in hybrid._buckets]
        gradients = list({run.data_ptr(): run for run in sorted(runs, key=torch.numel)}.values())
    moments = [
        value
        for hybrid in hybrids
        for cpu in hybrid.cpu_optimizers
        for state in cpu.state.values()
        for name, value in state.items()
        if name in MOMENTS
    ]
    found["clones, host"] = sum(block(clone, case) for clone in clones)
    found["gradient buffers, host"] = sum(block(gradient, case) for gradient in gradients)
    found["moments, host"] = sum(moment.nbytes for moment in moments)
    pinned = sum(block(held, case) for held in (*clones, *gradients) if held.is_pinned())
    figures: dict[str, float] = {
        "optimizer_made_seconds": made,
        "pinned_bytes": pinned,
        "pinned_by_torch_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.current", 0),
        "process_grew_by_bytes": grown,
    }
    if hybrids:
        room = free()
        plan = plan_sync(optimizer, chunks)
        found["staging of the sync, GPU"] = room - free()
        figures["sync_seconds"] = min(plan.run().seconds for _ in range(3))
    return found, figures


def plan_of(case: Case) -> RunPlan:
    return plan_run(provider_of(QWEN2_5_1_5B), *configs_of(case), gpus=1, fast_hybrid_optimizer=case.fast)


def planned(plan: RunPlan) -> dict[str, int]:
    """The plan's items by the names of `measure`."""
    items = {(item.name, item.where == "GPU"): item.bytes for item in plan.heaviest.items}

    def of(*names: str, gpu: bool) -> int:
        return sum(items.get((name, gpu), 0) for name in names)

    return {
        "weights + gradients, GPU": of("weights", "gradients", gpu=True),
        "weights, GPU": of("weights", gpu=True),
        "gradients, GPU": of("gradients", gpu=True),
        "FP32 shards, GPU": of("FP32 shards", "FP32 working copies", gpu=True),
        "moments + FP32 gradients of a step, GPU": of("moments", "FP32 gradients of a step", gpu=True),
        "clones, host": of("clones", gpu=False),
        "gradient buffers, host": of("gradient buffers", gpu=False),
        "moments, host": of("moments", gpu=False),
        "staging of the sync, GPU": of("staging of the sync", gpu=True),
    }


def compare(name: str, plan: RunPlan, found: dict[str, int]) -> tuple[list[dict[str, Any]], bool]:
    expected = planned(plan)
    totals = {
        f"all on the {where.strip()}": [key for key in found if key.endswith(where) and " + gradients," not in key]
        for where in (" GPU", " host")
    }
    rows, good = [], True
    print(f"\n{name}\n{'':44}{'plan':>14}{'real':>14}{'plan/real':>11}")
    for item in [*found, *totals]:
        keys = totals.get(item, [item])
        want, have = sum(expected[key] for key in keys), sum(found[key] for key in keys)
        ratio = want / have if have else (1.0 if not want else float("inf"))
        off = abs(ratio - 1) > TOLERANCE and max(want, have) >= SMALL
        good &= not off
        rows.append({"item": item, "plan_bytes": want, "real_bytes": have, "ratio": ratio, "judged_off": off})
        print(f"{item:44}{want / 1e6:11,.1f} MB{have / 1e6:11,.1f} MB{ratio:11.4f}{'  OFF' if off else ''}")
    return rows, good


def run_case(name: str, plan: RunPlan) -> tuple[dict[str, Any], bool]:
    found, figures = measure(CASES[name])
    gc.collect()
    torch.cuda.empty_cache()
    rows, good = compare(name, plan, found)
    if "sync_seconds" in figures:
        print(
            f"sync: planned {plan.slowest_sync.seconds * 1e3:.1f} ms (bound by the {plan.slowest_sync.bound}), "
            f"real {figures['sync_seconds'] * 1e3:.1f} ms"
        )
    print(f"optimizer made in {figures['optimizer_made_seconds']:.2f} s")
    print(
        f"pinned: planned {plan.heaviest.pinned / 1e9:.2f} GB, {STAGING_PINNED / 1e9:.2f} GB of it staging; held by "
        f"the optimizer {figures['pinned_bytes'] / 1e9:.2f} GB; made by torch's allocator in all "
        f"{figures['pinned_by_torch_bytes'] / 1e9:.2f} GB"
    )
    print(f"the process grew by {figures['process_grew_by_bytes'] / 1e9:.2f} GB")
    return {"case": name, "plan": plan.to_dict(), "items": rows, **figures}, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this case (may be given again)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import_bridge()
    names = arguments.case or list(CASES)
    plans = {name: plan_of(CASES[name]) for name in names}
    print(f"parameters: {next(iter(plans.values())).parameters:,}")

    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    provider_of(QWEN2_5_1_5B).initialize_model_parallel(seed=0)
    results, good = [], True
    for name in names:
        result, this = run_case(name, plans[name])
        results.append(result)
        good &= this
    torch.distributed.destroy_process_group()
    if arguments.json:
        from megasetup.cli.machine import environment

        data = {"benchmark": "plan against real", "environment": environment(), "cases": results}
        arguments.json.write_text(json.dumps(data, indent=2) + "\n")
    print("\nplan and reality agree within 3%" if good else "\nplan and reality DISAGREE")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
