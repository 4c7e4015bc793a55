"""What is repaired in a DistributedOptimizer's checkpoints; tests/masters/test_hybrid_resume.py resumes from real ones.

Its constructor needs a GPU, so objects without it are repaired here, and what is called says how it was called.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megasetup.compat import hybrid_checkpoints
from megasetup.masters.hybrid import PipelinedHybridOptimizer

Called = list[tuple[Any, ...]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """Calls of the stock methods: name, arguments and how many parameters had a state."""
    calls: Called = []

    def load(distributed: DistributedOptimizer, state: dict[str, Any]) -> None:
        distributed._set_main_param_and_optimizer_states("parameter", state)

    def sharded(distributed: DistributedOptimizer, model: Any, is_loading: bool = False, **settings: Any) -> str:
        calls.append(("sharded", model, is_loading, settings, len(distributed.optimizer.state)))
        if is_loading:
            distributed.optimizer.load_state_dict(distributed.optimizer.state_dict())
        return "sharded"

    def set_tensors(distributed: DistributedOptimizer, param: Any, tensors: dict[str, Any]) -> None:
        calls.append(("set", param, tensors))

    for name, method in (
        ("load_parameter_state_from_dp_zero", load),
        ("load_parameter_state_from_dp_reshardable", load),
        ("sharded_state_dict", sharded),
        ("_set_main_param_and_optimizer_states", set_tensors),
    ):
        monkeypatch.setattr(DistributedOptimizer, name, method)
    return calls


@pytest.fixture
def distributed(called: Called) -> DistributedOptimizer:
    made = DistributedOptimizer.__new__(DistributedOptimizer)
    made.model_fp32_groups, made.model_float16_groups = [["router"], []], [["fc1", "fc2"], ["norm"]]
    made.model_param_group_index_map = {}
    params = [torch.ones(10, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)]
    made.optimizer = PipelinedHybridOptimizer(
        params,
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        fused=True,
    )
    made.optimizer.make()
    hybrid_checkpoints.repair(made)
    return made


def test_each_parameter_is_looked_up_where_it_is(distributed: DistributedOptimizer) -> None:
    assert distributed.model_param_group_index_map == {
        "router": (0, 0),
        "fc1": (0, 1),
        "fc2": (0, 2),
        "norm": (1, 0),
    }


@pytest.mark.parametrize("sharding", ["dp_zero", "dp_reshardable"])
def test_what_is_loaded_is_told(
    sharding: str, distributed: DistributedOptimizer, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    sync = PipelinedHybridOptimizer._sync_hdo_state_to_sub_optimizers
    monkeypatch.setattr(
        PipelinedHybridOptimizer,
        "_sync_hdo_state_to_sub_optimizers",
        lambda hybrid: (told.append(torch.is_grad_enabled()), sync(hybrid)),
    )
    getattr(distributed, f"load_parameter_state_from_{sharding}")({"param": 1, "step": 7})
    assert called == [("set", "parameter", {"master_param": None, "param": 1, "step": None})]
    assert told == [False]


def test_it_goes_with_its_last_reference(distributed: DistributedOptimizer) -> None:
    other = DistributedOptimizer.__new__(DistributedOptimizer)
    vars(other).update(vars(distributed))
    hybrid_checkpoints.repair(other)
    held = weakref.ref(other)
    del other
    assert held() is None


def test_loading_makes_the_state_that_is_asked_for(distributed: DistributedOptimizer, called: Called) -> None:
    assert distributed.sharded_state_dict("model", True, metadata={}) == "sharded"
    assert called == [("sharded", "model", True, {"metadata": {}}, 2)]
    assert all(entry["step"] == 1 for entry in distributed.optimizer.state.values())
    distributed.sharded_state_dict("model", is_loading=True)
    assert all(entry["step"] == 1 for entry in distributed.optimizer.state.values())


def test_saving_before_the_first_step(distributed: DistributedOptimizer, called: Called) -> None:
    with pytest.raises(RuntimeError, match="before its first step"):
        distributed.sharded_state_dict("model")
    assert called == []
    distributed.optimizer.dummy_step()
    distributed.sharded_state_dict("model", sharding_type=None)
    assert called == [("sharded", "model", False, {"sharding_type": None}, 2)]


def test_a_rank_without_parameters_saves_with_the_others(distributed: DistributedOptimizer, called: Called) -> None:
    for group in distributed.optimizer.param_groups:
        group["params"] = []
    distributed.optimizer.make()
    distributed.optimizer.step()
    assert distributed.sharded_state_dict("model") == "sharded"
    assert called == [("sharded", "model", False, {}, 0)]


def test_what_a_step_that_was_cut_off_has_left(distributed: DistributedOptimizer, called: Called) -> None:
    distributed.optimizer.dummy_step()
    distributed.optimizer.cut_off = "a step was cut off"
    with pytest.raises(RuntimeError, match="a step was cut off"):
        distributed.sharded_state_dict("model")
    distributed.sharded_state_dict("model", True)
    with pytest.raises(RuntimeError, match="a step was cut off"):
        distributed.optimizer.step()
    distributed.load_parameter_state_from_dp_zero({"param": 1})
    distributed.optimizer.step()
