"""The masters of real Megatron optimizers on a GPU: synced, audited and repaired, in both modes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from real_megatron import build, parallel_state_of, train
from standins import assert_exact, bits, copies_of, held_by, load_new_weights

from megasetup.kernels import native_status
from megasetup.masters import audit_master_weights, ensure_master_weights, plan_sync, sync_master_weights
from megasetup.nemo_rl import _force_sync_optimizer_fp32_from_model

# Megatron, Transformer Engine and torch warn as they please; only our own warnings are errors here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore", "error:megasetup")]

BOTH_MODES = pytest.mark.parametrize("precision_aware", [False, True], ids=["standard", "precision-aware"])
BOTH_FRACTIONS = pytest.mark.parametrize("fraction", [0.3, 1.0])
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with parallel_state_of(0, 1, torch.distributed.HashStore()):
        yield


def only_part(optimizer: Any) -> Any:
    (part,) = optimizer.chained_optimizers
    return part


def all_levels(part: Any) -> list[tuple[str, int, torch.Tensor]]:
    return [(name, level, held) for name, _, levels in held_by(part) for level, held in levels.items()]


@BOTH_DTYPES
@BOTH_FRACTIONS
@BOTH_MODES
def test_sync_after_a_load(precision_aware: bool, fraction: float, dtype: torch.dtype) -> None:
    chunk, optimizer = build(precision_aware=precision_aware, fraction=fraction, dtype=dtype)
    part = only_part(optimizer)
    assert isinstance(part.optimizer, HybridDeviceOptimizer)
    clones = part.optimizer.gpu_params_map_cpu_copy
    assert (len(clones) == 6) == (fraction == 1.0)
    assert clones
    load_new_weights(chunk)
    loaded = bits(*chunk.parameters())

    before = audit_master_weights(optimizer, chunk)
    router = next(parameter for name, parameter in chunk.named_parameters() if name.endswith("router"))
    stale = {(entry.name, entry.level) for entry in before.stale}
    wanted = {(name, level) for name, level, held in all_levels(part) if held.data_ptr() != router.data_ptr()}
    assert stale == wanted
    assert not before.ok

    report = sync_master_weights(optimizer, chunk)
    assert_exact(part)
    assert bits(*chunk.parameters()) == loaded
    after = audit_master_weights(optimizer, chunk)
    assert all(entry.state == "exact" for entry in after.copies)
    assert report.untouched == ()

    far = {held.data_ptr(): held.numel() for _, _, held in all_levels(part) if not held.is_cuda}
    assert report.staged_elements + report.direct_elements == sum(far.values())
    if native_status().gpu:
        level_2 = next(level for level in report.levels if level.level == 2)
        assert level_2.wire_share is not None
        assert 0 < level_2.wire_share < 1.5


@BOTH_MODES
def test_clones_of_both_kinds(precision_aware: bool) -> None:
    # Megatron pins the clones in standard mode; in precision-aware mode its .float() makes pageable ones.
    _, optimizer = build(precision_aware=precision_aware, fraction=1.0, fp32_router=False)
    clones = only_part(optimizer).optimizer.gpu_params_map_cpu_copy.values()
    assert {clone.is_pinned() for clone in clones} == {not precision_aware}


@BOTH_MODES
def test_the_seed_function(precision_aware: bool) -> None:
    chunk, optimizer = build(precision_aware=precision_aware, fraction=1.0)
    load_new_weights(chunk)
    assert _force_sync_optimizer_fp32_from_model(optimizer, [chunk]) is None
    assert_exact(only_part(optimizer))


@BOTH_DTYPES
@BOTH_FRACTIONS
@BOTH_MODES
def test_ensure_leaves_trained_masters_alone(precision_aware: bool, fraction: float, dtype: torch.dtype) -> None:
    chunk, optimizer = build(precision_aware=precision_aware, fraction=fraction, dtype=dtype)
    part = only_part(optimizer)
    train(chunk, optimizer, 3)
    before = bits(*copies_of(part))
    report = ensure_master_weights(optimizer, chunk)
    assert bits(*copies_of(part)) == before
    assert report.repairs == ()
    assert report.audit.ok
    states = [entry.state for entry in report.audit.copies if entry.level != 1 or not precision_aware]
    assert "consistent" in states  # the steps did leave masters with more precision than the model


@BOTH_FRACTIONS
@BOTH_MODES
def test_ensure_after_steps_and_a_fine_tuning_load(precision_aware: bool, fraction: float) -> None:
    chunk, optimizer = build(precision_aware=precision_aware, fraction=fraction)
    train(chunk, optimizer, 2)
    load_new_weights(chunk)
    report = ensure_master_weights(optimizer, chunk)
    assert_exact(only_part(optimizer))
    assert {repair.source for repair in report.repairs} == {"model"}
    # And training goes on from the loaded weights.
    loaded = [parameter.detach().clone() for parameter in chunk.parameters()]
    train(chunk, optimizer, 1)
    for was, now in zip(loaded, chunk.parameters(), strict=True):
        assert (now.detach().float() - was.float()).abs().max() < 0.1


@BOTH_MODES
def test_one_broken_clone_is_named_and_repaired_alone(precision_aware: bool) -> None:
    chunk, optimizer = build(precision_aware=precision_aware, fraction=1.0)
    part = only_part(optimizer)
    train(chunk, optimizer, 1)
    broken = next(held for name, level, held in all_levels(part) if name.endswith("fc1") and level == 2)
    whole = broken.clone()
    broken[123] += 1.0
    (first, *_) = audit_master_weights(optimizer, chunk).stale
    assert first.name.endswith("fc1")
    assert (first.level, first.rounded_differences, first.first_index) == (2, 1, 123)
    others = [held for held in copies_of(part) if held.data_ptr() != broken.data_ptr()]
    before = bits(*others)
    report = ensure_master_weights(optimizer, chunk)
    assert bits(*others) == before
    if precision_aware:
        assert {(repair.level, repair.source) for repair in report.repairs} == {(2, "model"), (3, "model")}
    else:  # level 1 still has all the bits
        assert [(repair.level, repair.source) for repair in report.repairs] == [(2, "level 1")]
        assert bits(broken) == bits(whole)


def test_ensure_after_a_resume_in_standard_mode() -> None:
    # Megatron copies the saved masters into level 1 in place. The clones were made before that.
    chunk, optimizer = build(precision_aware=False, fraction=1.0)
    part = only_part(optimizer)
    train(chunk, optimizer, 2)
    mains = {name: levels[1] for name, _, levels in held_by(part) if not name.endswith("router")}
    clones = {name: levels[2] for name, _, levels in held_by(part) if not name.endswith("router")}
    saved = bits(*mains.values())
    for name, clone in clones.items():
        if name.endswith("norm"):
            clone.fill_(1.0)
        else:
            clone.normal_()
    report = ensure_master_weights(optimizer, chunk)
    assert bits(*mains.values()) == saved
    assert bits(*clones.values()) == saved
    assert {(repair.level, repair.source) for repair in report.repairs} == {(2, "level 1")}


def test_level_1_is_repaired_from_a_precise_clone() -> None:
    chunk, optimizer = build(precision_aware=False, fraction=1.0)
    part = only_part(optimizer)
    train(chunk, optimizer, 2)
    main, clone = next((levels[1], levels[2]) for name, _, levels in held_by(part) if name.endswith("fc2"))
    saved = bits(clone)
    main.normal_()
    report = ensure_master_weights(optimizer, chunk)
    assert bits(main) == saved == bits(clone)
    assert [(repair.level, repair.source) for repair in report.repairs] == [(1, "level 2")]


def test_resume_of_a_precision_aware_hybrid_optimizer() -> None:
    chunk, optimizer = build(precision_aware=True, fraction=0.5, fp32_router=False)
    hybrid = only_part(optimizer).optimizer
    train(chunk, optimizer, 2)
    masters = list(hybrid.param_to_fp32_param.values())
    saved = copy.deepcopy(hybrid.state_dict())
    wanted = bits(*masters)
    plan = plan_sync(optimizer, chunk)

    hybrid.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"HybridDeviceOptimizer\.gpu_params_map_cpu_copy holds other tensors"):
        plan.run()
    assert bits(*hybrid.param_to_fp32_param.values()) == wanted
    report = ensure_master_weights(optimizer, chunk)
    assert report.repairs == ()
    assert bits(*hybrid.param_to_fp32_param.values()) == wanted


def test_a_plan_runs_again_after_steps() -> None:
    chunk, optimizer = build(precision_aware=False, fraction=1.0, overlap=True)
    plan = plan_sync(optimizer, chunk)
    for seed in range(3):
        train(chunk, optimizer, 1, seed=seed)
        load_new_weights(chunk, seed=seed)
        plan.run()
        assert_exact(only_part(optimizer))


def test_without_offload_level_1_is_refreshed_on_request_only() -> None:
    chunk, optimizer = build(precision_aware=False, fraction=None)
    part = only_part(optimizer)
    load_new_weights(chunk)
    before = bits(*copies_of(part))
    report = sync_master_weights(optimizer, chunk)
    assert bits(*copies_of(part)) == before
    assert len(report.untouched) == 1
    sync_master_weights(optimizer, chunk, levels="all")
    assert_exact(part)


def test_two_threads_sync_two_optimizers() -> None:
    pairs = [build(precision_aware=precision_aware, fraction=1.0) for precision_aware in (False, True)]
    plans = [plan_sync(optimizer, chunk) for chunk, optimizer in pairs]
    together = threading.Barrier(2)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        chunk, optimizer = pairs[index]
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                together.wait()
                for seed in range(5):
                    load_new_weights(chunk, seed=10 * index + seed)
                    plans[index].run()
                    assert_exact(only_part(optimizer))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
