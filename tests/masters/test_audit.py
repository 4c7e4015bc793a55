"""The three states with their counts, first indices and names."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("megatron.core")

from standins import Block, bits, copies_of, distributed_over, load_new_weights

from megasetup.masters import SyncPlan, WeightCopies, audit_master_weights, audit_plan, sync_master_weights


def test_right_after_a_sync_all_is_exact() -> None:
    model = Block()
    optimizer = distributed_over([model])
    load_new_weights(model)
    sync_master_weights(optimizer)
    report = audit_master_weights(optimizer, model)
    assert report.ok
    assert report.stale == ()
    assert report.counts() == {
        1: {"exact": 5, "consistent": 0, "stale": 0},
        2: {"exact": 5, "consistent": 0, "stale": 0},
    }
    assert "none stale" in str(report)


def test_after_a_load_without_a_sync_all_is_stale_but_the_models_own_memory() -> None:
    model = Block()
    optimizer = distributed_over([model])
    load_new_weights(model)
    report = audit_master_weights(optimizer)
    assert not report.ok
    assert report.counts() == {
        1: {"exact": 1, "consistent": 0, "stale": 4},
        2: {"exact": 0, "consistent": 0, "stale": 5},
    }


def test_counts_and_first_indices() -> None:
    weight = torch.ones(100, dtype=torch.bfloat16)
    exact, consistent, stale = torch.ones(100), torch.ones(100), torch.ones(100)
    consistent[[7, 30]] += 2.0**-10  # below half of the last place of BF16
    stale[[3, 40, 41]] += 2.0**-10
    stale[[20, 50]] += 1.0
    plan = SyncPlan.from_copies([WeightCopies("w", weight, ((1, exact), (2, consistent), (3, stale)), offset=1000)])
    before = bits(exact, consistent, stale)
    report = audit_plan(plan)
    assert bits(exact, consistent, stale) == before
    assert [copy.to_dict() for copy in report.copies] == [
        {
            "name": "w",
            "level": 1,
            "state": "exact",
            "elements": 100,
            "exact_differences": 0,
            "rounded_differences": 0,
            "first_index": -1,
            "first_index_in_parameter": -1,
        },
        {
            "name": "w",
            "level": 2,
            "state": "consistent",
            "elements": 100,
            "exact_differences": 2,
            "rounded_differences": 0,
            "first_index": 7,
            "first_index_in_parameter": 1007,
        },
        {
            "name": "w",
            "level": 3,
            "state": "stale",
            "elements": 100,
            "exact_differences": 5,
            "rounded_differences": 2,
            "first_index": 20,
            "first_index_in_parameter": 1020,
        },
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("elements", [100, 5_000_011])
def test_counts_and_first_indices_of_gpu_weights(elements: int, pinned: bool) -> None:
    """Level 1 on the GPU and clones on the host, short ones and ones of several chunks."""
    weights, shards, clones = [], [], []
    for index in range(3):
        weights.append(torch.randn(elements, device="cuda").clamp_(0.5, 100.0).to(torch.bfloat16))
        shards.append(weights[-1].float())
        clones.append(torch.empty(elements, pin_memory=pinned).copy_(weights[-1]))
        if index >= 1:  # consistent, and so is the third, but for what follows
            for copy in (shards[-1], clones[-1]):
                copy.view(torch.int32)[7::13] += 5
    last = elements - 1
    clones[2][[20, last]] += 1000.0
    shards[2][11] = -1.0
    entries = [
        WeightCopies(f"w{index}", weight, ((1, shard), (2, clone)))
        for index, (weight, shard, clone) in enumerate(zip(weights, shards, clones, strict=True))
    ]
    plan = SyncPlan.from_copies(entries)
    before = bits(*shards, *clones)
    for _ in range(2):
        found = {
            (copy.name, copy.level): (copy.state, copy.exact_differences, copy.rounded_differences, copy.first_index)
            for copy in audit_plan(plan).copies
        }
        moved = len(range(7, elements, 13))
        # 20 is one of those that moved; 11 and the last are not.
        assert found == {
            ("w0", 1): ("exact", 0, 0, -1),
            ("w0", 2): ("exact", 0, 0, -1),
            ("w1", 1): ("consistent", moved, 0, 7),
            ("w1", 2): ("consistent", moved, 0, 7),
            ("w2", 1): ("stale", moved + 1, 1, 11),
            ("w2", 2): ("stale", moved + 1, 2, 20),
        }
    assert bits(*shards, *clones) == before
    plan.run()
    assert all(copy.state == "exact" for copy in audit_plan(plan).copies)


def test_the_one_broken_clone_is_named() -> None:
    model = Block()
    optimizer = distributed_over([model], span=lambda name, p: (5, p.numel()))
    main = optimizer.shard_fp32_from_float16_groups[0][2]
    optimizer.optimizer.gpu_params_map_cpu_copy[main][9] = -100.0
    report = audit_master_weights(optimizer, model)
    (broken,) = report.stale
    assert (broken.name, broken.level, broken.rounded_differences) == ("fc1", 2, 1)
    assert (broken.first_index, broken.first_index_in_parameter) == (9, 14)
    assert str(report).splitlines()[-2:] == [
        "stale, worst first (elements that do not round to the weight, of all in the shard):",
        "  fc1, level 2: 1 of 72, first at 9 (14 in the parameter)",
    ]
    data = report.to_dict()
    assert data["ok"] is False
    assert data["counts"] == {
        "1": {"exact": 5, "consistent": 0, "stale": 0},
        "2": {"exact": 4, "consistent": 0, "stale": 1},
    }
    assert json.loads(json.dumps(data)) == data


def test_aliased_levels_are_reported_each() -> None:
    optimizer = distributed_over([Block(fp32_router=False)], precision_aware=True)
    shard = optimizer.shard_float16_groups[0][1]
    optimizer.optimizer.param_to_fp32_param[shard][2] = 8.0
    report = audit_master_weights(optimizer)
    assert [(copy.name, copy.level, copy.first_index) for copy in report.stale] == [("norm", 2, 2), ("norm", 3, 2)]


def test_worst_first_and_shortened() -> None:
    weights = [torch.ones(100, dtype=torch.bfloat16) for _ in range(30)]
    copies = [torch.ones(100) for _ in range(30)]
    for index, copy in enumerate(copies):
        copy[: index + 1] = 3.0
    entries = [
        WeightCopies(f"w{index}", weight, ((2, copy),))
        for index, (weight, copy) in enumerate(zip(weights, copies, strict=True))
    ]
    report = audit_plan(SyncPlan.from_copies(entries))
    assert [copy.name for copy in report.stale[:2]] == ["w29", "w28"]
    lines = str(report).splitlines()
    assert lines[0].endswith("30 STALE")
    assert lines[4].startswith("  w29, level 2: 30 of 100")
    assert lines[-1] == "  and 10 more"


def test_levels_choose_what_is_audited() -> None:
    optimizer = distributed_over([Block()], fraction=None)
    assert len(audit_master_weights(optimizer).copies) == 5
    report = audit_master_weights(optimizer, levels="offloaded")
    assert report.copies == ()
    assert len(report.untouched) == 1
    assert "untouched: optimizer (DistributedOptimizer): no HybridDeviceOptimizer" in str(report)


def test_quantised_weights_are_named_and_their_clone_is_compared_with_level_1() -> None:
    optimizer = distributed_over([Block(quantised=True)])
    main = optimizer.shard_fp32_from_float16_groups[0][3]
    optimizer.optimizer.gpu_params_map_cpu_copy[main][1] += 1.0
    before = bits(*copies_of(optimizer))
    report = audit_master_weights(optimizer)
    assert report.quantised == ("fp8",)
    assert [(copy.name, copy.level, copy.first_index) for copy in report.stale] == [("fp8", 2, 1)]
    assert bits(*copies_of(optimizer)) == before


def test_notes_reach_the_report() -> None:
    model = Block(fp32_router=False)
    optimizer = distributed_over([model], precision_aware=True)
    model.norm.data = model.norm.data.clone()
    report = audit_master_weights(optimizer)
    assert report.notes[0][0] == "norm"
    assert "  norm: the optimizer steps memory that this parameter no longer lies in" in str(report)
