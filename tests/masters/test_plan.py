"""Plans: checked whole, writing nothing when anything is wrong, run again, and refused once a tensor has moved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("megatron.core")

from hypothesis import given, settings
from hypothesis import strategies as st
from standins import (
    Block,
    Quantised,
    assert_exact,
    bits,
    chain,
    copies_of,
    distributed_over,
    load_new_weights,
)

from megasetup.masters import PlanError, SyncPlan, WeightCopies, plan_sync


def weights(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(size).to(dtype) for size in sizes]


def fp32(size: int) -> torch.Tensor:
    return torch.full((size,), 7.0)


def refused(*copies: WeightCopies) -> tuple[str, ...]:
    """The problems of a plan that must be refused; checks that nothing was written."""
    tensors = [tensor for entry in copies for tensor in (entry.source, *(copy for _, copy in entry.levels))]
    real = [t for t in tensors if not t.is_meta and not isinstance(t, Quantised) and t.untyped_storage().size()]
    before = bits(*real)
    with pytest.raises(PlanError) as caught:
        SyncPlan.from_copies(copies)
    assert isinstance(caught.value, ValueError)
    assert "nothing was written" in str(caught.value)
    assert bits(*real) == before
    return caught.value.problems


def test_size() -> None:
    (weight,) = weights(8)
    (problem,) = refused(WeightCopies("a.weight", weight, ((1, fp32(9)),)))
    assert problem.startswith("a.weight, level 1: 9 elements, but the weight has 8: ")
    assert "build it again" in problem


def test_dtype() -> None:
    (weight,) = weights(8)
    (problem,) = refused(WeightCopies("a", weight, ((2, torch.zeros(8, dtype=torch.float64)),)))
    assert problem.startswith("a, level 2: a copy of dtype torch.float64 cannot hold a weight of dtype torch.bfloat16")
    (problem,) = refused(WeightCopies("a", weight, ((2, torch.zeros(8, dtype=torch.float16)),)))
    assert "torch.float16" in problem


def test_level() -> None:
    (weight,) = weights(8)
    (problem,) = refused(WeightCopies("a", weight, ((4, fp32(8)),)))  # type: ignore[arg-type]
    assert problem == "a, level 4: there are levels 1, 2 and 3 only"


def test_contiguity() -> None:
    (weight,) = weights(16)
    problems = refused(
        WeightCopies("a", weight[::2], ((1, fp32(8)),)), WeightCopies("b", weight[:8], ((2, fp32(16)[::2]),))
    )
    assert problems[0] == ("a: shape (8,) with strides (2,) is not contiguous: pass a contiguous tensor")
    assert problems[1].startswith("b, level 2: shape (8,) with strides (2,)")


def test_no_memory() -> None:
    (weight,) = weights(8)
    problems = refused(
        WeightCopies("a", torch.empty(8, dtype=torch.bfloat16, device="meta"), ((1, fp32(8)),)),
        WeightCopies("b", weight, ((1, torch.empty(8, device="meta")),)),
    )
    assert any(p.startswith("a: 8 elements on meta without memory") for p in problems)
    assert any(p.startswith("b, level 1: 8 elements on meta without memory") for p in problems)
    assert any(p.startswith("b, level 1: it is on meta, its weight on cpu: level 1 lies where") for p in problems)
    freed = fp32(8)
    freed.untyped_storage().resize_(0)
    (problem,) = refused(WeightCopies("a", weight, ((2, freed),)))
    assert problem.startswith("a, level 2: 8 elements on cpu without memory")


def test_no_ordinary_memory() -> None:
    problems = refused(WeightCopies("a", Quantised((8,)), ((1, fp32(8)),)))
    assert "a: a Quantised is not ordinary memory: pass the tensor that holds its values" in problems


def test_negated_views() -> None:
    (weight,) = weights(8)
    problems = refused(
        WeightCopies("a", torch._neg_view(weight), ((1, fp32(8)),)),
        WeightCopies("b", weight, ((2, torch._neg_view(fp32(8))),)),
    )
    assert problems == (
        "a: a negated view, whose memory holds other values: hold tensor.resolve_neg() in its place",
        "b, level 2: a negated view, whose memory holds other values: hold tensor.resolve_neg() in its place",
    )


def test_conjugate_views() -> None:
    (weight,) = weights(8)
    problems = refused(WeightCopies("a", weight, ((1, torch.zeros(8, dtype=torch.complex64).conj()),)))
    assert (
        problems[0]
        == "a, level 1: a conjugate view, whose memory holds other values: hold tensor.resolve_conj() in its place"
    )


def test_no_strided_tensor() -> None:
    (weight,) = weights(8)
    target = fp32(8)
    with pytest.raises(PlanError) as caught:
        SyncPlan.from_copies(
            [
                WeightCopies("a", weight.to_sparse(), ((1, target),)),
                WeightCopies("b", weight, ((1, fp32(8)), (2, fp32(8).to_sparse()))),
                WeightCopies("c", weight, ((2, fp32(8).to_mkldnn()),)),
            ]
        )
    assert caught.value.problems == (
        "a: a tensor of layout torch.sparse_coo has no plain memory: pass a dense one (tensor.to_dense())",
        "b, level 2: a tensor of layout torch.sparse_coo has no plain memory: pass a dense one (tensor.to_dense())",
        "c, level 2: a tensor of layout torch._mkldnn has no plain memory: pass a dense one (tensor.to_dense())",
    )
    assert torch.equal(target, fp32(8))


def test_no_tensor() -> None:
    (weight,) = weights(8)
    with pytest.raises(PlanError) as caught:
        SyncPlan.from_copies(
            [
                WeightCopies("a", [1.0], ((1, fp32(1)),)),  # type: ignore[arg-type]
                WeightCopies("b", weight, ((1, None), (2, fp32(8).to_sparse()))),  # type: ignore[arg-type]
            ]
        )
    assert caught.value.problems == (
        "a: a builtins.list is not a tensor: pass a torch.Tensor",
        "b, level 1: a builtins.NoneType is not a tensor: pass a torch.Tensor",
        "b, level 2: a tensor of layout torch.sparse_coo has no plain memory: pass a dense one (tensor.to_dense())",
    )


def test_copies_that_overlap() -> None:
    one, two = weights(8, 8)
    memory = fp32(12)
    (problem,) = refused(WeightCopies("a", one, ((1, memory[:8]),)), WeightCopies("b", two, ((2, memory[4:]),)))
    assert problem.startswith("a, level 1, shares memory with b, level 2, from address ")
    assert hex(memory[4:].data_ptr()) in problem


def test_one_copy_for_two_weights() -> None:
    one, two = weights(8, 8)
    memory = fp32(8)
    (problem,) = refused(WeightCopies("a", one, ((1, memory),)), WeightCopies("b", two, ((1, memory),)))
    assert "a, level 1, shares memory with b, level 1" in problem


def test_levels_of_one_weight_that_overlap_in_part() -> None:
    (weight,) = weights(8)
    memory = fp32(12)
    (problem,) = refused(WeightCopies("a", weight, ((1, memory[:8]), (2, memory[4:]))))
    assert "a, level 1, shares memory with a, level 2" in problem


def test_a_copy_that_overlaps_another_weight() -> None:
    memory = torch.zeros(8)
    (problem,) = refused(
        WeightCopies("a", weights(4)[0], ((1, memory[2:6]),)), WeightCopies("b", memory, ((2, fp32(8)),))
    )
    assert problem.startswith("a, level 1, shares memory with the weight b at address ")


def test_a_copy_that_overlaps_its_own_weight_in_part() -> None:
    memory = torch.zeros(12)
    (problem,) = refused(WeightCopies("a", memory[:8], ((1, memory[4:]),)))
    assert problem.startswith("a, level 1, shares memory with the weight a")
    # The same address with another dtype is not "its own memory" either.
    (problem,) = refused(WeightCopies("a", memory.view(torch.bfloat16)[:8], ((1, memory[:8]),)))
    assert problem.startswith("a, level 1, shares memory with the weight a")


def test_all_problems_come_together() -> None:
    one, two, three = weights(8, 8, 8)
    problems = refused(
        WeightCopies("a", one, ((1, fp32(9)), (2, fp32(10)))),
        WeightCopies("b", two, ((1, fp32(8)),)),
        WeightCopies("c", three, ((1, torch.zeros(8, dtype=torch.int32)),)),
    )
    assert [problem.split(":")[0] for problem in problems] == ["a, level 1", "a, level 2", "c, level 1"]


def test_many_problems_are_shortened_in_the_text_only() -> None:
    entries = [WeightCopies(f"w{index}", weight, ((1, fp32(9)),)) for index, weight in enumerate(weights(*[8] * 50))]
    with pytest.raises(PlanError, match="50 problems") as caught:
        SyncPlan.from_copies(entries)
    assert len(caught.value.problems) == 50
    assert "and 30 more" in str(caught.value)


def test_a_megatron_optimizer_of_another_model_is_refused() -> None:
    optimizer = distributed_over([Block()])
    model = optimizer.model_chunks[0]
    model.norm.data = torch.ones(5, dtype=torch.bfloat16)
    before = bits(*copies_of(optimizer))
    with pytest.raises(PlanError, match="norm, level 1: 7 elements, but the weight has 5"):
        plan_sync(optimizer)
    assert bits(*copies_of(optimizer)) == before


def test_a_parameter_that_is_not_contiguous_is_refused_with_the_rest() -> None:
    optimizer = distributed_over([Block()])
    model = optimizer.model_chunks[0]
    model.embedding.data = torch.randn(7, 13).bfloat16().t()
    model.norm.data = torch.ones(5, dtype=torch.bfloat16)
    with pytest.raises(PlanError) as caught:
        plan_sync(optimizer)
    assert len(caught.value.problems) == 3  # embedding, and both copies of norm


def test_empty_weights_are_skipped() -> None:
    (weight,) = weights(8)
    target = fp32(8)
    plan = SyncPlan.from_copies(
        [WeightCopies("none", weight[:0], ((1, fp32(0)),)), WeightCopies("a", weight, ((1, target),))]
    )
    report = plan.run()
    assert report.weights == 1
    assert torch.equal(target, weight.float())
    assert [finding.comparison.exact_differences for finding in plan.compare()] == [0, 0]


def test_a_plan_of_nothing() -> None:
    report = SyncPlan.from_copies([]).run()
    assert report.weights == report.bytes == 0
    assert report.levels == ()


def test_aliases_are_written_once() -> None:
    (weight,) = weights(8)
    main, clone = fp32(8), fp32(8)
    report = SyncPlan.from_copies([WeightCopies("a", weight, ((1, main), (2, clone), (3, clone)))]).run()
    assert torch.equal(main, weight.float())
    assert torch.equal(clone, weight.float())
    assert [(level.level, level.tensors, level.shared, level.bytes) for level in report.levels] == [
        (1, 1, 0, 32),
        (2, 1, 0, 32),
        (3, 1, 1, 0),
    ]
    assert report.bytes == 64


def test_an_alias_of_the_third_distinct_copy() -> None:
    (weight,) = weights(8)
    copies = [fp32(8), fp32(8), fp32(8)]
    plan = SyncPlan.from_copies(
        [WeightCopies("a", weight, ((1, copies[0]), (2, copies[1]), (3, copies[2]), (3, copies[2].view(2, 4))))]
    )
    report = plan.run()
    assert all(torch.equal(copy, weight.float()) for copy in copies)
    assert report.levels[2].shared == 1
    copies[2][3] = 0.0
    assert [finding.comparison.first_exact for finding in plan.compare()] == [-1, -1, 3, 3]


def test_the_weights_own_memory_is_nothing_to_write() -> None:
    weight = torch.randn(8)
    clone = fp32(8)
    report = SyncPlan.from_copies([WeightCopies("a", weight, ((1, weight), (2, clone)))]).run()
    assert torch.equal(clone, weight)
    assert [(level.level, level.shared, level.bytes) for level in report.levels] == [(1, 1, 0), (2, 0, 32)]


def test_shapes_do_not_matter() -> None:
    weight = torch.randn(3, 5).bfloat16()
    target = torch.zeros(15)
    SyncPlan.from_copies([WeightCopies("a", weight, ((2, target),))]).run()
    assert torch.equal(target, weight.float().view(-1))


def test_a_plan_runs_again() -> None:
    model = Block()
    optimizer = distributed_over([model])
    plan = plan_sync(optimizer)
    for seed in (1, 2, 3):
        load_new_weights(model, seed=seed)
        report = plan.run()
        assert report.weights == 5
        assert_exact(optimizer)


@pytest.mark.parametrize("precision_aware", [False, True])
def test_a_parameter_that_was_bound_to_other_memory(precision_aware: bool) -> None:
    model = Block()
    optimizer = distributed_over([model], precision_aware=precision_aware)
    plan = plan_sync(optimizer)
    load_new_weights(model)
    kept = model.fc1.data
    model.fc1.data = kept.clone()
    before = bits(*copies_of(optimizer))
    with pytest.raises(RuntimeError, match=r"plan again:\n  fc1: the model's parameter was bound to other memory"):
        plan.run()
    with pytest.raises(RuntimeError, match="fc1"):
        plan.compare()
    assert bits(*copies_of(optimizer)) == before
    model.fc1.data = kept
    plan.run()
    assert_exact(optimizer)


def _new_level_1_memory(optimizer: object) -> None:
    main = optimizer.shard_fp32_from_float16_groups[0][1]  # type: ignore[attr-defined]
    main.data = main.data.clone()


def _freed_clone(optimizer: object) -> None:
    clone = next(iter(optimizer.optimizer.gpu_params_map_cpu_copy.values()))  # type: ignore[attr-defined]
    clone.untyped_storage().resize_(0)


def _clones_made_anew(optimizer: object) -> None:
    # As HybridDeviceOptimizer does after load_state_dict: new maps with new clones.
    hybrid = optimizer.optimizer  # type: ignore[attr-defined]
    hybrid.gpu_params_map_cpu_copy = {key: clone.clone() for key, clone in hybrid.gpu_params_map_cpu_copy.items()}


def _one_clone_replaced(optimizer: object) -> None:
    clones = optimizer.optimizer.gpu_params_map_cpu_copy  # type: ignore[attr-defined]
    key = next(iter(clones))
    clones[key] = clones[key].clone()


def _clones_that_changed_places(optimizer: object) -> None:
    hybrid = optimizer.optimizer  # type: ignore[attr-defined]
    first, second, *others = hybrid.gpu_params_map_cpu_copy
    clones = hybrid.gpu_params_map_cpu_copy.values()
    hybrid.gpu_params_map_cpu_copy = dict(zip((second, first, *others), clones, strict=True))


def _another_inner_optimizer(optimizer: object) -> None:
    optimizer.optimizer = distributed_over([Block()]).optimizer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("move", "what"),
    [
        (_new_level_1_memory, "norm, level 1: 7 elements at "),
        (_freed_clone, "router, level 2: "),
        (_clones_made_anew, "HybridDeviceOptimizer.gpu_params_map_cpu_copy holds other tensors"),
        (_one_clone_replaced, "HybridDeviceOptimizer.gpu_params_map_cpu_copy holds other tensors"),
        (_clones_that_changed_places, "HybridDeviceOptimizer.gpu_params_map_cpu_copy holds other tensors"),
        (_another_inner_optimizer, "DistributedOptimizer.optimizer holds other tensors"),
    ],
)
def test_a_copy_that_moved(move: Callable[[object], None], what: str) -> None:
    model = Block()
    optimizer = distributed_over([model])
    plan = plan_sync(optimizer)
    load_new_weights(model)
    held = copies_of(optimizer)
    move(optimizer)
    held = [copy for copy in held if copy.untyped_storage().size()]
    before = bits(*held)
    with pytest.raises(RuntimeError) as caught:
        plan.run()
    assert what in str(caught.value)
    assert bits(*held) == before


def test_a_copy_that_was_transposed_in_place() -> None:
    weight, copy = torch.randn(3, 5).bfloat16(), torch.zeros(3, 5)
    plan = SyncPlan.from_copies([WeightCopies("a", weight, ((1, copy),))])
    copy.data = copy.data.t()
    for call in (plan.run, plan.compare):
        with pytest.raises(RuntimeError, match=r"a, level 1: is now of shape \(5, 3\) and strides \(1, 5\)"):
            call()
    assert not copy.any()


def test_a_copy_that_changed_its_dtype_in_place() -> None:
    (weight,) = weights(8)
    copy = torch.zeros(8)
    plan = SyncPlan.from_copies([WeightCopies("a", weight, ((2, copy),))])
    copy.data = copy.data.view(torch.int32)
    with pytest.raises(RuntimeError, match=r"a, level 2: torch\.float32 is now torch\.int32"):
        plan.run()
    assert not copy.any()


def test_a_parameter_that_was_transposed_in_place() -> None:
    model = Block()
    optimizer = distributed_over([model])
    plan = plan_sync(optimizer)
    model.fc1.data = model.fc1.data.t()
    before = bits(*copies_of(optimizer))
    with pytest.raises(RuntimeError, match=r"fc1: the model's parameter is now of shape \(7, 11\)"):
        plan.run()
    assert bits(*copies_of(optimizer)) == before


def test_a_chain_that_lost_a_part() -> None:
    whole = chain(distributed_over([Block()]), distributed_over([Block()]))
    plan = plan_sync(whole)
    whole.chained_optimizers.pop()
    with pytest.raises(RuntimeError, match=r"ChainedOptimizer\.chained_optimizers holds other tensors"):
        plan.run()


def with_large_weight(dtype: torch.dtype = torch.bfloat16) -> Block:
    """A block with a weight that the worker pool shares out: up to 64 Ki elements, a caller works alone."""
    model = Block(dtype)
    model.register_parameter("expert", torch.nn.Parameter(torch.randn(521, 401).to(dtype)))
    return model


def test_two_threads_sync_two_optimizers() -> None:
    models = [with_large_weight(), with_large_weight(torch.float16)]
    optimizers = [distributed_over([model], precision_aware=index == 1) for index, model in enumerate(models)]
    plans = [plan_sync(optimizer) for optimizer in optimizers]
    errors: list[BaseException] = []
    together = threading.Barrier(2)

    def work(index: int) -> None:
        try:
            together.wait()
            for seed in range(40):
                load_new_weights(models[index], seed=100 * index + seed)
                plans[index].run()
                assert_exact(optimizers[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    precision_aware=st.booleans(),
    fraction=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_random_shards(data: st.DataObject, dtype: torch.dtype, precision_aware: bool, fraction: float) -> None:
    model = with_large_weight(dtype)
    spans = {}
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        if name == "expert":  # always long enough for the workers
            spans[name] = data.draw(st.integers(0, 999)), count - data.draw(st.integers(0, 999))
        else:
            ends = st.integers(0, count)
            spans[name] = tuple(sorted((data.draw(ends), data.draw(ends))))
    optimizer = distributed_over(
        [model], span=lambda name, _: spans[name], precision_aware=precision_aware, fraction=fraction
    )
    load_new_weights(model)
    before = bits(*model.parameters())
    plan_sync(optimizer).run()
    assert_exact(optimizer)
    assert bits(*model.parameters()) == before


def test_planning_many_weights_takes_little_time() -> None:
    count = 20_000
    sources = torch.randn(count * 8).bfloat16().split(8)
    mains, clones = torch.zeros(count * 8).split(8), torch.zeros(count * 8).split(8)
    entries = [
        WeightCopies(f"w{index}", source, ((1, main), (2, clone)))
        for index, (source, main, clone) in enumerate(zip(sources, mains, clones, strict=True))
    ]
    start = time.thread_time()
    plan = SyncPlan.from_copies(entries)
    assert time.thread_time() - start < 2.0  # a check that compares all pairs would take minutes
    plan.run()
    assert torch.equal(clones[-1], sources[-1].float())
