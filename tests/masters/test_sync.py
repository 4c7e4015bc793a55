"""The right values in every copy, the report, and repairs that leave all that is sound as it is."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("megatron.core")

from standins import (
    Block,
    assert_exact,
    bits,
    chain,
    copies_of,
    distributed_over,
    float16_over,
    fp32_over,
    hybrid_over,
    load_new_weights,
    stub,
    train_a_little,
)

from megasetup.masters import (
    LevelReport,
    PlanError,
    SyncReport,
    Untouched,
    audit_master_weights,
    ensure_master_weights,
    sync_master_weights,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("precision_aware", [False, True])
def test_every_copy_holds_the_loaded_weights(precision_aware: bool, fraction: float, dtype: torch.dtype) -> None:
    model = Block(dtype)
    optimizer = distributed_over([model], precision_aware=precision_aware, fraction=fraction)
    load_new_weights(model)
    before = bits(*model.parameters())
    sync_master_weights(optimizer, model)
    assert_exact(optimizer)
    assert bits(*model.parameters()) == before


def test_special_values_survive() -> None:
    model = Block(fp32_router=False)
    optimizer = distributed_over([model])
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 2.0**-133, 3.0e38]).bfloat16()
    model.norm.data.copy_(special)
    sync_master_weights(optimizer)
    main = optimizer.shard_fp32_from_float16_groups[0][1]
    assert bits(main) == bits(special.float())


def test_low_precision_clones_are_copied_as_they_are() -> None:
    model = Block(fp32_router=False)
    optimizer = distributed_over([model], precision_aware=True, param_update_in_fp32=False)
    load_new_weights(model)
    report = sync_master_weights(optimizer)
    assert_exact(optimizer)
    assert [(level.level, level.bytes) for level in report.levels] == [(2, 2 * 252)]


def test_several_chunks_and_nested_chains() -> None:
    one, two, three = Block(), Block(fp32_router=False), Block(torch.float16)
    parts = [
        distributed_over([one, two]),
        distributed_over([three], precision_aware=True, fraction=0.3),
    ]
    load_new_weights(one, two, three)
    report = sync_master_weights(chain(chain(parts[0], stub()), chain(parts[1])))
    for part in parts:
        assert_exact(part)
    assert report.weights == 14
    assert len(report.untouched) == 1


def test_quantised_weights_keep_level_1_and_their_clone_follows_it() -> None:
    model = Block(quantised=True)
    optimizer = distributed_over([model])
    main = optimizer.shard_fp32_from_float16_groups[0][3]
    clone = optimizer.optimizer.gpu_params_map_cpu_copy[main]
    clone.fill_(5.0)
    loaded = main.clone()
    report = sync_master_weights(optimizer)
    assert torch.equal(main, loaded)
    assert torch.equal(clone, loaded)
    assert report.quantised == ("fp8",)
    assert "quantised, level 1 left to the main parameters they were loaded with:\n  fp8" in str(report)


def test_without_a_hybrid_optimizer_level_1_is_refreshed_on_request_only() -> None:
    model = Block()
    for optimizer, held in (
        (part := distributed_over([model], fraction=None), copies_of(part)),
        (plain := float16_over(model), list(plain.fp32_from_float16_groups[0])),
    ):
        load_new_weights(model, seed=5)
        before = bits(*held)
        report = sync_master_weights(optimizer)
        assert bits(*held) == before
        assert report.weights == 0
        assert len(report.untouched) == 1
        report = sync_master_weights(optimizer, levels="all")
        low = [parameter for parameter in model.parameters() if parameter.dtype == torch.bfloat16]
        assert all(torch.equal(copy, held.float().view(copy.shape)) for copy, held in zip(held, low, strict=True))
        assert report.untouched == ()


def test_hybrid_optimizers_over_the_models_own_parameters() -> None:
    model = Block()
    hybrid = hybrid_over([list(model.parameters())], 0.5)
    full = Block(torch.float32)
    wrapped = fp32_over(full, offloaded=True)
    load_new_weights(model, full)
    sync_master_weights(hybrid)
    sync_master_weights(wrapped)
    for parameter, copy in [
        *hybrid.gpu_params_map_cpu_copy.items(),
        *hybrid.param_to_fp32_param.items(),
        *wrapped.optimizer.gpu_params_map_cpu_copy.items(),
    ]:
        assert torch.equal(copy, parameter.detach().float())


def test_report_counts_what_was_written() -> None:
    model = Block()  # 252 elements in BF16, 35 in FP32
    report = sync_master_weights(distributed_over([model]))
    one, two = report.levels
    assert (one.level, one.tensors, one.elements, one.shared, one.bytes) == (1, 5, 287, 1, 4 * 252)
    assert (two.level, two.tensors, two.elements, two.shared, two.bytes) == (2, 5, 287, 0, 4 * 287)
    assert report.bytes == 4 * 252 + 4 * 287
    assert report.elements == 287
    assert one.bandwidth == pytest.approx(one.bytes / one.seconds)
    assert one.wire_share is None  # CPU weights cross no wire
    assert report.planning_seconds > 0
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["levels"][0]["bytes"] == 4 * 252


def test_report_as_text_and_data() -> None:
    report = SyncReport(
        levels=(
            LevelReport(1, 3, 2_000_000, 8_000_000, 0, 0.001, 8e9, None),
            LevelReport(2, 3, 2_000_000, 8_000_000, 1, 0.08, 1e8, 0.953),
        ),
        weights=3,
        elements=2_000_000,
        bytes=16_000_000,
        seconds=0.08,
        planning_seconds=0.002,
        staged_elements=1_500_000,
        direct_elements=500_000,
        wire_bytes=5_000_000,
        wire_bandwidth=5.5e10,
        threads=8,
        untouched=(Untouched("optimizer (FP32Optimizer)", "no other copy"),),
        quantised=("a", "b"),
        notes=(("c", "adrift"),),
    )
    assert str(report).splitlines() == [
        "refreshed 3 weights (2,000,000 elements) in 80.0 ms, planned in 2.0 ms",
        "  level        copies   elements  MB written    ms  GB/s  of the wire",
        "  1                 3  2,000,000         8.0   1.0   8.0            -",
        "  2      3 (1 shared)  2,000,000         8.0  80.0   0.1        95.3%",
        "over the wire: 1,500,000 elements widened by 8 CPU threads, 500,000 written by the copy engine, 5.0 MB",
        "untouched: optimizer (FP32Optimizer): no other copy",
        "quantised, level 1 left to the main parameters they were loaded with:",
        "  a",
        "  b",
        "notes:",
        "  c: adrift",
    ]
    data = report.to_dict()
    assert data["untouched"] == [{"what": "optimizer (FP32Optimizer)", "reason": "no other copy"}]
    assert json.loads(json.dumps(data)) == data


def test_wrong_sizes_are_refused() -> None:
    optimizer = distributed_over([Block()])
    optimizer.model_chunks[0].norm.data = torch.ones(3, dtype=torch.bfloat16)
    for call in (sync_master_weights, ensure_master_weights):
        with pytest.raises(PlanError, match="norm, level 1: 7 elements, but the weight has 3"):
            call(optimizer)


def test_clones_that_belong_to_no_weight_are_refused() -> None:
    optimizer = distributed_over([Block()])
    hybrid = optimizer.optimizer
    hybrid.gpu_params_map_cpu_copy = {key.clone(): copy for key, copy in hybrid.gpu_params_map_cpu_copy.items()}
    load_new_weights(*optimizer.model_chunks)
    before = bits(*copies_of(optimizer))
    for call in (sync_master_weights, ensure_master_weights, audit_master_weights):
        with pytest.raises(PlanError, match="5 problems"):
            call(optimizer)
    assert bits(*copies_of(optimizer)) == before


@pytest.mark.parametrize("precision_aware", [False, True])
def test_ensure_leaves_more_precise_masters_alone(precision_aware: bool) -> None:
    optimizer = distributed_over([Block()], precision_aware=precision_aware, fraction=0.5)
    train_a_little(optimizer)
    before = bits(*copies_of(optimizer))
    report = ensure_master_weights(optimizer)
    assert bits(*copies_of(optimizer)) == before
    assert report.repairs == ()
    assert report.audit.ok


@pytest.mark.parametrize("precision_aware", [False, True])
def test_ensure_repairs_everything_after_a_fine_tuning_load(precision_aware: bool) -> None:
    model = Block()
    optimizer = distributed_over([model], precision_aware=precision_aware)
    train_a_little(optimizer)
    load_new_weights(model)
    report = ensure_master_weights(optimizer)
    assert_exact(optimizer)
    assert {repair.source for repair in report.repairs} == {"model"}
    assert {repair.was for repair in report.repairs} == {"stale"}
    levels = (2, 3) if precision_aware else (1, 2)
    assert [(repair.name, repair.level) for repair in report.repairs][:2] == [
        ("embedding", levels[0]),
        ("embedding", levels[1]),
    ]
    assert not report.audit.ok
    assert ensure_master_weights(optimizer).repairs == ()


def test_ensure_repairs_one_copy_and_keeps_the_rest() -> None:
    optimizer = distributed_over([Block()], precision_aware=True)
    train_a_little(optimizer)
    fc1 = optimizer.optimizer.gpu_params_map_cpu_copy[optimizer.shard_float16_groups[0][2]]
    others = [copy for copy in copies_of(optimizer) if copy is not fc1]
    before = bits(*others)
    fc1[17] += 1.0
    report = ensure_master_weights(optimizer)
    assert [(repair.name, repair.level, repair.source, repair.elements) for repair in report.repairs] == [
        ("fc1", 2, "model", 77),
        ("fc1", 3, "model", 77),
    ]
    assert torch.equal(fc1, optimizer.shard_float16_groups[0][2].float())
    assert bits(*others) == before
    assert "repaired 2 copies" in str(report)
    assert "  fc1, level 2 (stale), from model" in str(report)
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data


def test_ensure_after_a_resume_takes_level_2_from_level_1() -> None:
    # Megatron loads the precise masters into level 1; level 2 was cloned before and knows nothing of them.
    optimizer = distributed_over([Block()])
    train_a_little(optimizer)
    mains = optimizer.shard_fp32_from_float16_groups[0]
    precise = bits(*mains)
    for main in mains:
        optimizer.optimizer.gpu_params_map_cpu_copy[main].normal_()
    report = ensure_master_weights(optimizer)
    assert bits(*mains) == precise
    assert bits(*(optimizer.optimizer.gpu_params_map_cpu_copy[main] for main in mains)) == precise
    assert {(repair.level, repair.source) for repair in report.repairs} == {(2, "level 1")}
    assert len(report.repairs) == 4


def test_ensure_takes_level_1_from_a_precise_level_2() -> None:
    optimizer = distributed_over([Block()])
    train_a_little(optimizer)
    mains = optimizer.shard_fp32_from_float16_groups[0]
    precise = bits(*mains)
    mains[0].normal_()
    report = ensure_master_weights(optimizer)
    assert bits(*mains) == precise
    assert [(repair.name, repair.level, repair.source) for repair in report.repairs] == [("embedding", 1, "level 2")]


def test_ensure_gives_an_exact_copy_the_bits_that_a_precise_one_has() -> None:
    # A norm weight that still rounds to 1.0: after a resume its clone is exact by accident, and lacks the loaded bits.
    optimizer = distributed_over([Block()])
    train_a_little(optimizer)
    mains = optimizer.shard_fp32_from_float16_groups[0]
    precise = bits(*mains)
    optimizer.optimizer.gpu_params_map_cpu_copy[mains[1]].fill_(1.0)
    report = ensure_master_weights(optimizer)
    assert bits(*(optimizer.optimizer.gpu_params_map_cpu_copy[main] for main in mains)) == precise
    assert [(repair.name, repair.level, repair.source, repair.was) for repair in report.repairs] == [
        ("norm", 2, "level 1", "exact")
    ]


def test_ensure_keeps_two_different_precise_copies() -> None:
    optimizer = distributed_over([Block()])
    train_a_little(optimizer)
    main = optimizer.shard_fp32_from_float16_groups[0][1]
    optimizer.optimizer.gpu_params_map_cpu_copy[main].fill_(1 + 2.0**-11)
    before = bits(*copies_of(optimizer))
    assert ensure_master_weights(optimizer).repairs == ()
    assert bits(*copies_of(optimizer)) == before


def test_ensure_repairs_fp32_native_clones_from_the_model() -> None:
    model = Block()
    optimizer = distributed_over([model])
    clone = optimizer.optimizer.gpu_params_map_cpu_copy[optimizer.shard_fp32_groups[0][0]]
    clone[3] += 1.0
    report = ensure_master_weights(optimizer)
    assert torch.equal(clone, model.router.detach().view(-1))
    assert [(repair.name, repair.level, repair.source) for repair in report.repairs] == [("router", 2, "model")]
