"""Which copies are found in each kind of optimizer, under which names, and what is left out with which reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from standins import (
    Block,
    chain,
    distributed_over,
    float16_over,
    fp32_over,
    hybrid_over,
    stub,
)

from megasetup.masters.layout import Layout, read_layout


def levels_by_name(layout: Layout) -> dict[str, list[int]]:
    return {entry.name: [level for level, _ in entry.levels] for entry in layout.copies}


def test_standard_mode_has_level_1_and_clones() -> None:
    model = Block()
    optimizer = distributed_over([model])
    layout = read_layout(optimizer)
    assert levels_by_name(layout) == {
        "embedding": [1, 2],
        "norm": [1, 2],
        "fc1": [1, 2],
        "fc2": [1, 2],
        "router": [1, 2],
    }
    by_name = {entry.name: entry for entry in layout.copies}
    embedding = by_name["embedding"]
    assert embedding.source.data_ptr() == model.embedding.data_ptr()
    assert embedding.source.shape == (91,)
    assert not embedding.source.requires_grad
    main = optimizer.shard_fp32_from_float16_groups[0][0]
    assert embedding.levels[0][1] is main
    assert embedding.levels[1][1] is optimizer.optimizer.gpu_params_map_cpu_copy[main]
    # The FP32-native parameter is its own level 1.
    assert by_name["router"].levels[0][1].data_ptr() == model.router.data_ptr()
    assert not layout.untouched
    assert not layout.problems


def test_precision_aware_mode_has_one_tensor_as_levels_2_and_3() -> None:
    optimizer = distributed_over([Block(fp32_router=False)], precision_aware=True)
    layout = read_layout(optimizer)
    assert levels_by_name(layout) == {key: [2, 3] for key in ("embedding", "norm", "fc1", "fc2")}
    for entry in layout.copies:
        (_, clone), (_, working_copy) = entry.levels
        assert clone is working_copy
        assert clone.dtype == torch.float32


def test_precision_aware_fraction_leaves_working_copies_on_the_device() -> None:
    # 91 of 252 elements reach the threshold of 0.3 with the first weight; the rest stays.
    optimizer = distributed_over([Block(fp32_router=False)], precision_aware=True, fraction=0.3)
    assert levels_by_name(read_layout(optimizer)) == {"embedding": [2, 3], "norm": [3], "fc1": [3], "fc2": [3]}


def test_standard_fraction_leaves_level_1_alone() -> None:
    optimizer = distributed_over([Block(fp32_router=False)], fraction=0.3)
    assert levels_by_name(read_layout(optimizer)) == {"embedding": [1, 2], "norm": [1], "fc1": [1], "fc2": [1]}


def test_low_precision_clones() -> None:
    optimizer = distributed_over([Block(fp32_router=False)], precision_aware=True, param_update_in_fp32=False)
    layout = read_layout(optimizer)
    assert levels_by_name(layout) == {key: [2] for key in ("embedding", "norm", "fc1", "fc2")}
    assert {entry.levels[0][1].dtype for entry in layout.copies} == {torch.bfloat16}


def test_shards_are_this_ranks_range() -> None:
    model = Block()
    layout = read_layout(distributed_over([model], span=lambda name, p: (p.numel() // 3, p.numel() - 1)))
    embedding = layout.copies[0]
    assert embedding.offset == 30
    assert embedding.source.numel() == 60
    assert embedding.source.data_ptr() == model.embedding.data_ptr() + 60


def test_names_of_one_chunk_of_several_and_of_none() -> None:
    one, two = Block(), Block()
    optimizer = distributed_over([one, two])
    names = [entry.name for entry in read_layout(optimizer).copies]
    assert names[:2] == ["chunk0.embedding", "chunk0.norm"]
    assert "chunk1.fc2" in names
    wrapped = torch.nn.Sequential(one, two)
    assert read_layout(optimizer, wrapped).copies[0].name == "0.embedding"
    assert read_layout(optimizer, [two]).copies[0].name == "parameter 0 of group 0"
    assert read_layout(optimizer, [two]).copies[-2].name == "FP32 parameter 0 of group 0"
    nested = chain(chain(distributed_over([one])))
    assert read_layout(nested, [two]).copies[1].name == (
        "optimizer.chained_optimizers[0].chained_optimizers[0]: parameter 1 of group 0"
    )


def test_quantised_weights_are_named_and_their_clones_mirror_level_1() -> None:
    model = Block(quantised=True)
    optimizer = distributed_over([model])
    layout = read_layout(optimizer)
    assert [str(label) for label in layout.quantised] == ["fp8"]
    entry = next(entry for entry in layout.copies if entry.name == "fp8")
    main = next(
        main
        for held, main in zip(
            optimizer.model_float16_groups[0], optimizer.shard_fp32_from_float16_groups[0], strict=True
        )
        if held is model.fp8
    )
    assert entry.quantised
    assert entry.source.data_ptr() == main.data_ptr()
    assert [(level, copy) for level, copy in entry.levels] == [(2, optimizer.optimizer.gpu_params_map_cpu_copy[main])]


def test_quantised_weights_without_level_1_are_only_named() -> None:
    layout = read_layout(distributed_over([Block(quantised=True)], precision_aware=True))
    assert [str(label) for label in layout.quantised] == ["fp8"]
    assert "fp8" not in levels_by_name(layout)


def test_clones_of_a_quantised_weight_without_level_1_are_left_untouched() -> None:
    optimizer = distributed_over([Block(quantised=True, fp32_router=False)], precision_aware=True)
    shard = torch.randn(42).bfloat16()
    optimizer.shard_float16_groups[0][3] = shard
    optimizer.optimizer.gpu_params_map_cpu_copy[shard] = shard.float()
    layout = read_layout(optimizer)
    assert [entry.what for entry in layout.untouched] == ["fp8"]
    assert "nothing to refresh its copies from" in layout.untouched[0].reason
    assert not layout.problems

    quantised = Block(quantised=True, fp32_router=False)
    hybrid = hybrid_over([[quantised.norm]])
    hybrid.param_groups[0]["params"].append(quantised.fp8)
    hybrid.gpu_params_map_cpu_copy[quantised.fp8] = torch.zeros(42)
    layout = read_layout(hybrid, quantised)
    assert [entry.what for entry in layout.untouched] == ["fp8"]
    assert not layout.problems


def test_clones_that_no_weight_claims_are_problems() -> None:
    optimizer = distributed_over([Block()])
    hybrid = optimizer.optimizer
    hybrid.gpu_params_map_cpu_copy = {key.clone(): copy for key, copy in hybrid.gpu_params_map_cpu_copy.items()}
    problems = read_layout(optimizer).problems
    assert len(problems) == 5
    assert problems[0].startswith(
        "optimizer: gpu_params_map_cpu_copy holds a copy of shape (35,) for a tensor that is in none of its "
        "param_groups, which is no weight of this optimizer"
    )
    assert "build the optimizer again" in problems[0]
    assert "version of Megatron" in problems[0]


def test_working_copies_that_no_weight_claims_are_problems() -> None:
    # The optimizer steps another shard than the one that is listed for the weight.
    optimizer = distributed_over([Block(fp32_router=False)], precision_aware=True)
    shards = optimizer.shard_float16_groups[0]
    shards[1] = shards[1].detach()
    layout = read_layout(chain(optimizer))
    assert [problem.split(", which")[0] for problem in layout.problems] == [
        f"optimizer.chained_optimizers[0]: {name} holds a copy of shape (7,) for parameter 1 of its param group 0"
        for name in ("gpu_params_map_cpu_copy", "param_to_fp32_param")
    ]


def test_clones_of_a_bare_hybrid_optimizer_that_no_weight_claims() -> None:
    model = Block(fp32_router=False)
    hybrid = hybrid_over([list(model.parameters())])
    hybrid.param_groups[0]["params"].pop()  # fc2
    (first, second) = read_layout(hybrid, model).problems
    assert "gpu_params_map_cpu_copy holds a copy of shape (7, 11)" in first
    assert "param_to_fp32_param holds a copy of shape (7, 11)" in second


def test_a_parameter_transposed_where_it_lies_is_a_problem() -> None:
    model = Block(fp32_router=False)
    optimizer = distributed_over([model])
    model.embedding.data = model.embedding.data.t()  # the address and the count are the same
    (problem,) = read_layout(optimizer).problems
    assert problem.startswith("embedding: the model parameter of shape (7, 13)")


def test_a_weight_that_cannot_be_read_still_claims_its_clone() -> None:
    model = Block(fp32_router=False)
    optimizer = distributed_over([model])
    model.embedding.data = torch.randn(7, 13).bfloat16().t()
    (problem,) = read_layout(optimizer).problems
    assert problem.startswith("embedding: ")


def test_a_weight_without_main_parameter_in_standard_mode_is_remarked() -> None:
    optimizer = distributed_over([Block()], fraction=0.3)
    optimizer.shard_fp32_from_float16_groups[0][3] = None
    notes = {entry.name: entry.note for entry in read_layout(optimizer).copies if entry.note}
    assert list(notes) == ["fc2"]
    assert "neither a main parameter nor a copy" in notes["fc2"]


def test_a_shard_that_is_stepped_in_its_own_dtype_is_not_remarked() -> None:
    optimizer = distributed_over(
        [Block(fp32_router=False)], precision_aware=True, fraction=0.3, param_update_in_fp32=False
    )
    layout = read_layout(optimizer)
    assert levels_by_name(layout) == {"embedding": [2], "norm": [], "fc1": [], "fc2": []}
    assert {entry.note for entry in layout.copies} == {""}


def test_without_hybrid_optimizer() -> None:
    optimizer = distributed_over([Block()], fraction=None)
    layout = read_layout(optimizer)
    assert not layout.copies
    assert layout.untouched[0].what == "optimizer (DistributedOptimizer)"
    assert "no HybridDeviceOptimizer" in layout.untouched[0].reason
    everything = read_layout(optimizer, levels="all")
    assert levels_by_name(everything) == {key: [1] for key in ("embedding", "norm", "fc1", "fc2", "router")}
    assert not everything.untouched


def test_precision_aware_without_hybrid_optimizer_is_named_with_its_reason() -> None:
    optimizer = distributed_over([Block(fp32_router=False)], fraction=None, precision_aware=True)
    for levels in ("offloaded", "all"):
        layout = read_layout(optimizer, levels=levels)
        assert not layout.copies
        assert "master_param" in layout.untouched[0].reason


def test_stub_and_fsdp_are_reported() -> None:
    sharded = distributed_over([Block()])
    sharded.ddp_config = SimpleNamespace(use_megatron_fsdp=True)
    layout = read_layout(chain(stub(), sharded))
    assert not layout.copies
    assert [entry.what for entry in layout.untouched] == [
        "optimizer.chained_optimizers[0] (DistributedOptimizer)",
        "optimizer.chained_optimizers[1] (DistributedOptimizer)",
    ]
    assert "stub" in layout.untouched[0].reason
    assert "Megatron-FSDP" in layout.untouched[1].reason


def test_float16_optimizer() -> None:
    model = Block()
    optimizer = float16_over(model)
    assert "no HybridDeviceOptimizer" in read_layout(optimizer).untouched[0].reason
    layout = read_layout(optimizer, model, levels="all")
    assert levels_by_name(layout) == {key: [1] for key in ("embedding", "norm", "fc1", "fc2")}
    optimizer.optimizer = hybrid_over([list(model.parameters())])
    assert "use_distributed_optimizer" in read_layout(optimizer).untouched[0].reason


def test_fp32_optimizer() -> None:
    model = Block(torch.float32)
    assert "no other copy" in read_layout(fp32_over(model), levels="all").untouched[0].reason
    layout = read_layout(fp32_over(model, offloaded=True), model)
    assert levels_by_name(layout) == {key: [2] for key in ("embedding", "norm", "router", "fc1", "fc2")}


def test_bare_hybrid_optimizer() -> None:
    model = Block(fp32_router=False)
    layout = read_layout(hybrid_over([list(model.parameters())], 0.3), model)
    assert levels_by_name(layout) == {"embedding": [2, 3], "norm": [3], "fc1": [3], "fc2": [3]}
    assert layout.copies[0].source.data_ptr() == model.embedding.data_ptr()


def test_a_parameter_bound_to_other_memory_is_read_where_it_is_now() -> None:
    model = Block(fp32_router=False)
    optimizer = distributed_over([model], precision_aware=True)
    model.embedding.data = torch.randn(13, 7).bfloat16()
    first, second, *_ = read_layout(optimizer).copies
    assert first.source.data_ptr() == model.embedding.data_ptr()
    assert "will not reach the model" in first.note
    assert second.note == ""


def test_a_parameter_that_is_not_contiguous_is_a_problem() -> None:
    model = Block(fp32_router=False)
    optimizer = distributed_over([model])
    model.embedding.data = torch.randn(7, 13).bfloat16().t()
    layout = read_layout(optimizer)
    assert len(layout.problems) == 1
    assert "embedding: the model parameter of shape (13, 7)" in layout.problems[0]


@pytest.mark.parametrize("other", [None, 3, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)])
def test_other_optimizers_are_a_type_error(other: object) -> None:
    with pytest.raises(
        TypeError, match=rf"{type(other).__qualname__}: pass a Megatron optimizer: DistributedOptimizer"
    ):
        read_layout(other)


def test_another_optimizer_within_a_chain_is_a_type_error() -> None:
    mixed = chain(distributed_over([Block()]))
    mixed.chained_optimizers.append("adam")
    with pytest.raises(TypeError, match=r"optimizer\.chained_optimizers\[1\] is a builtins\.str"):
        read_layout(mixed)


def test_wrong_arguments() -> None:
    optimizer = distributed_over([Block()])
    with pytest.raises(ValueError, match="levels is 'level1'"):
        read_layout(optimizer, levels="level1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a int"):
        read_layout(optimizer, 3)
