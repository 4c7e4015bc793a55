"""What each rank and node holds, by hand for a small model in every mode of the optimizer; whether it fits."""

import pytest
import torch
from planning.architectures import SMALL, SMALL_MOE, configs, provider_of, write
from planning.by_hand import buffer_of, owned_of

from megasetup.planning import Limits, PlanningError, Rates, plan_run, sync_time
from megasetup.planning.memory import STAGING_GPU, STAGING_PINNED, OptimizerMemory, host_bytes, optimizer_items

# SMALL: an embedding of 250 x 64, two layers, a norm; all trained.
_PARAMETERS = 250 * 64 + 2 * (64 * 128 + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
_PADDED = -(-_PARAMETERS // 128) * 128


def _up(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def _plan(tmp_path, fraction=1.0, *, aware=False, gpus=1, settings=SMALL, fields=None, **more):
    ddp = {name: more.pop(name) for name in ("grad_reduce_in_fp32",) if name in more}
    provider = provider_of(write(tmp_path, settings), **(fields or {}))
    return plan_run(provider, *configs(fraction, aware=aware, **ddp), gpus=gpus, **more)


def _items(plan) -> dict[tuple[str, str], int]:
    return {(item.name, item.where): item.bytes for item in plan.heaviest.items}


def test_standard_mode_all_offloaded(tmp_path):
    items = _items(_plan(tmp_path))
    shards = items.pop(("FP32 shards", "GPU"))
    assert 4 * _PARAMETERS <= shards < 4 * _PARAMETERS + 512 * 21  # 21 tensors, in blocks of 512 bytes
    assert items == {
        ("weights", "GPU"): _up(2 * _PADDED),
        ("gradients", "GPU"): _up(4 * _PADDED),
        ("clones", "host, pinned"): 4 * _PARAMETERS,
        ("gradient buffers", "host, pinned"): 4 * _PARAMETERS,
        ("moments", "host"): 8 * _PARAMETERS,
        ("staging of the sync", "GPU"): STAGING_GPU,
        ("staging of the sync", "host, pinned"): STAGING_PINNED,
    }


def test_precision_aware_all_offloaded_has_no_fp32_on_the_gpu(tmp_path):
    items = _items(_plan(tmp_path, aware=True))
    assert ("FP32 shards", "GPU") not in items
    assert ("FP32 working copies", "GPU") not in items
    assert items["clones", "host, pinned"] == 4 * _PARAMETERS


def test_without_offload_nothing_is_on_the_host(tmp_path):
    plan = _plan(tmp_path, None, grad_reduce_in_fp32=False)
    items = _items(plan)
    assert items["gradients", "GPU"] == _up(2 * _PADDED)
    assert 8 * _PARAMETERS <= items["moments", "GPU"] < 8 * _PARAMETERS + 2 * 512 * 21
    assert items["FP32 gradients of a step", "GPU"] == items["FP32 shards", "GPU"]
    assert plan.heaviest.host == 0
    assert plan.slowest_sync == (0.0, "")


def _memory(**settings) -> OptimizerMemory:
    plain = {
        "offload": True,
        "fraction": 0.5,
        "precision_aware": False,
        "master_bytes": 4,
        "moments": (4, 4),
        "hybrid_moments": (4, 4),
        "pin_gradients": True,
        "pin_parameters": True,
        "fast_hybrid": True,
    }
    return OptimizerMemory(**{**plain, **settings})


def _of(items) -> dict[tuple[str, str], int]:
    return {(item.name, item.where): item.bytes for item in items if item.bytes}


def test_half_offloaded_precision_aware_keeps_working_copies_of_the_rest():
    owned = owned_of(buffer_of([1024, 2048]), fraction=0.3)
    assert _of(optimizer_items(owned, _memory(precision_aware=True))) == {
        ("FP32 working copies", "GPU"): 2048 * 4,
        ("moments", "GPU"): 2048 * 8,
        ("clones", "host, pinned"): 1024 * 4,
        ("gradient buffers", "host, pinned"): 1024 * 4,
        ("moments", "host"): 1024 * 8,
    }


def test_gradients_pass_through_a_few_buffers():
    owned = owned_of(buffer_of([1024, 1 << 26]), fraction=1.0)
    items = _of(optimizer_items(owned, _memory(fraction=1.0)))
    assert items["clones", "host, pinned"] == 4 * ((1 << 26) + 1024)
    assert items["gradient buffers", "host, pinned"] == 3 * (1 << 24) * 4


def test_megatron_s_own_hybrid_optimizer_pins_powers_of_two():
    owned = owned_of(buffer_of([1000, 2048]), fraction=1.0)
    assert _of(optimizer_items(owned, _memory(fraction=1.0, fast_hybrid=False))) == {
        ("FP32 shards", "GPU"): 4096 + 8192,
        ("clones", "host, pinned"): 4096 + 8192,
        ("gradient buffers", "host, pinned"): 4096 + 8192,
        ("moments", "host"): 3048 * 8,
    }
    aware = _of(optimizer_items(owned, _memory(fraction=1.0, fast_hybrid=False, precision_aware=True)))
    assert aware["clones", "host"] == 3048 * 4
    assert ("clones", "host, pinned") not in aware


def test_gradients_that_are_widened_for_a_step():
    owned = owned_of(buffer_of([1024, 1024], gradient=torch.bfloat16), fraction=0.3)
    name = ("FP32 gradients of a step", "GPU")
    assert _of(optimizer_items(owned, _memory()))[name] == 2 * 4096  # of every shard
    assert _of(optimizer_items(owned, _memory(precision_aware=True, fast_hybrid=False)))[name] == 4096  # on the GPU
    assert name not in _of(optimizer_items(owned, _memory(precision_aware=True)))


def test_precision_aware_on_the_gpu_holds_the_dtypes_that_are_asked_for():
    owned = owned_of(buffer_of([1024]), fraction=0.0)
    settings = _memory(offload=False, fraction=0.0, precision_aware=True, master_bytes=2, moments=(2, 1))
    assert _of(optimizer_items(owned, settings)) == {("masters", "GPU"): 2048, ("moments", "GPU"): 2048 + 1024}


def test_an_fp32_parameter_has_no_shard_but_a_clone():
    owned = owned_of(buffer_of([1024], dtype=torch.float32), fraction=1.0)
    found = _of(optimizer_items(owned, _memory(fraction=1.0)))
    assert ("FP32 shards", "GPU") not in found
    assert found["clones", "host, pinned"] == 4096


def test_what_is_not_to_be_pinned_is_not():
    items = optimizer_items(
        owned_of(buffer_of([1024]), fraction=1.0), _memory(pin_gradients=False, pin_parameters=False)
    )
    assert host_bytes(items, pinned=True) == 0
    assert host_bytes(items) == 1024 * 16


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"precision_aware": False, "moments": (4, 4), "fraction": 0.0}),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.4}, {"fraction": 0.4}),
        # Offload takes no notice of the dtypes of the moments.
        (
            {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16},
            {"precision_aware": True, "hybrid_moments": (4, 4)},
        ),
        (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8},
            {"precision_aware": True, "moments": (2, 1), "master_bytes": 2},
        ),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False}, {"master_bytes": 4}),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16}, {"master_bytes": 2}),
        # MXFP8 parameters: Megatron manages FP32 masters itself, as in standard mode.
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "mxfp8"}, {"precision_aware": False}),
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "delayed"}, {"precision_aware": True}),
        ({"optimizer": "sgd"}, {"moments": (4,), "hybrid_moments": (4,)}),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, {"moments": (), "hybrid_moments": ()}),
        ({"pin_cpu_grads": False}, {"pin_gradients": False, "pin_parameters": True}),
    ],
)
def test_settings_of_the_optimizer(settings, expected):
    from megasetup.compat.bridge import import_bridge

    # Bridge's class, as the run's config holds it: nothing is worked out before it is finalized.
    config = import_bridge("megatron.bridge.training.config").OptimizerConfig(bf16=True, **settings)
    found = OptimizerMemory.of(config)
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_rule_for_precision_aware_is_megatron_s():
    config, _ = configs(1.0, aware=True)
    assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    assert OptimizerMemory.of(config).precision_aware


def test_ranks_and_nodes_add_up(tmp_path):
    fields = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    plan = _plan(tmp_path, settings=SMALL_MOE, fields=fields, gpus=16, nodes=4)
    assert [rank.place.rank for rank in plan.ranks] == list(range(16))
    assert [rank.node for rank in plan.ranks] == [rank // 4 for rank in range(16)]
    for node in plan.nodes:
        ranks = plan.ranks[node.node * 4 : node.node * 4 + 4]
        assert node.gpu == sum(rank.gpu for rank in ranks)
        assert node.host == sum(rank.host for rank in ranks)
        assert node.pinned == sum(rank.pinned for rank in ranks)
    # Every trained element has its clone on exactly one rank: per stage and tensor rank the dense ones, and per expert
    # rank the experts. Norms and routers are held, and cloned, by both tensor ranks.
    clones = sum(item.bytes for rank in plan.ranks for item in rank.items if item.name == "clones") // 4
    replicated = 2 * (64 + 64 + 2 * 16 + 4 * 64) + 64
    assert clones == plan.parameters + replicated
    assert plan.heaviest.gpu == max(rank.gpu for rank in plan.ranks)
    assert plan.heaviest_node.host == max(node.host for node in plan.nodes)


def test_stages_of_a_virtual_pipeline_hold_all_their_chunks(tmp_path):
    settings = {**SMALL, "num_hidden_layers": 4, "tie_word_embeddings": False}
    fields = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    plan = _plan(tmp_path, settings=settings, fields=fields, gpus=2)
    straight = _plan(tmp_path, settings=settings, fields={"pipeline_model_parallel_size": 2}, gpus=2)
    assert plan.parameters == straight.parameters
    assert [rank.parameters for rank in plan.ranks] == [rank.parameters for rank in straight.ranks]


def test_limits_decide_whether_it_fits(tmp_path):
    plan = _plan(tmp_path)
    gpu, host = plan.heaviest.gpu, plan.heaviest_node.host
    for limits, expected in (
        (Limits(gpu, host), (True, True)),
        (Limits(gpu - 1, host), (False, True)),
        (Limits(gpu, host - 1), (True, False)),
    ):
        held = _plan(tmp_path, limits=limits)
        assert (held.fits_gpu, held.fits_host) == expected
        assert held.fits == all(expected)
        assert held.to_dict()["fits"] == held.fits


@pytest.mark.parametrize(
    ("ranks", "rates", "seconds", "bound"),
    [
        # 1e9 elements: 2e9 bytes at 95.5% of 50 GB/s; 1e9 of 35e9 a second; 6e9 bytes of 3.83e12.
        (1, Rates(wire=50e9), 2e9 / (50e9 * 0.955), "wire"),
        (8, Rates(wire=50e9, host=40e9), 8 / 40, "host"),
        (1, Rates(wire=50e9, host=40e9, device=60e9), 0.1, "device"),
    ],
)
def test_the_slowest_bounds_a_sync(ranks, rates, seconds, bound):
    found = sync_time(wire_bytes=2 * 10**9, host_elements=10**9, device_elements=10**9, ranks=ranks, rates=rates)
    assert found.bound == bound
    assert found.seconds == pytest.approx(seconds)


def test_a_sync_with_the_default_rates_is_near_what_was_measured():
    # 7.6156 B parameters, one rank: 289 ms (benchmarks/results/sync-h200.txt); two ranks: 0.42 to 0.48 s each.
    work = {"wire_bytes": 2 * 7_615_616_512, "host_elements": 7_615_616_512, "device_elements": 7_615_616_512}
    assert sync_time(**work, ranks=1, rates=Rates()).seconds == pytest.approx(0.289, rel=0.03)
    assert 0.42 < sync_time(**work, ranks=2, rates=Rates()).seconds < 0.48


def test_fp32_elements_cross_the_wire_whole(tmp_path):
    provider = provider_of(write(tmp_path, SMALL), bf16=False, params_dtype=torch.float32)
    optimizer, ddp = configs()
    optimizer.bf16, optimizer.params_dtype = False, torch.float32
    plan = plan_run(provider, optimizer, ddp, gpus=1, rates=Rates(wire=1e6))
    assert plan.slowest_sync.seconds == pytest.approx(4 * _PARAMETERS / (1e6 * 0.955))
    assert _items(plan)["weights", "GPU"] == _up(4 * _PADDED)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"gpus": 4, "nodes": 3}, "4 GPUs cannot be spread evenly over 3 nodes"),
        ({"gpus": 3, "fields": {"tensor_model_parallel_size": 2}}, "3 GPUs cannot be split"),
    ],
)
def test_what_cannot_be_planned(tmp_path, arguments, said):
    with pytest.raises(PlanningError, match=said):
        _plan(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("optimizer_fields", "ddp_fields", "said"),
    [
        ({"optimizer": "muon"}, {}, "optimizer is 'muon'"),
        ({}, {"use_distributed_optimizer": False}, "use_distributed_optimizer is off"),
        ({}, {"use_megatron_fsdp": True}, "use_megatron_fsdp is on"),
    ],
)
def test_settings_that_cannot_be_planned(tmp_path, optimizer_fields, ddp_fields, said):
    optimizer, ddp = configs()
    for config, fields in ((optimizer, optimizer_fields), (ddp, ddp_fields)):
        for name, value in fields.items():
            setattr(config, name, value)
    with pytest.raises(PlanningError, match=said):
        plan_run(provider_of(write(tmp_path, SMALL)), optimizer, ddp, gpus=1)


def test_no_gpu_is_touched(tmp_path):
    _plan(tmp_path)
    assert not torch.cuda.is_initialized()
