"""Routing replay is refused where nobody records routes, and where routers would not follow them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from bridge_providers import policy, provider

from megasetup.config.errors import MISSING, ConfigError, Problem
from megasetup.config.moe import apply_moe_config
from megasetup.config.router_replay import router_replay_enabled, validate_router_replay_config
from megasetup.config.validate import examine_policy

REPLAY: dict[str, Any] = {"router_replay": {"enabled": True}}
VLLM: dict[str, Any] = {"generation": {"backend": "vllm", "colocated": {"enabled": True}}}
M = "policy.megatron_cfg"


def _problems(**megatron_cfg: Any) -> dict[str, Any]:
    with pytest.raises(AssertionError) as raised:
        validate_router_replay_config(policy(**megatron_cfg) | REPLAY | VLLM)
    error = raised.value
    assert isinstance(error, ConfigError)
    return {problem.path: problem.found for problem in error.problems}


def test_vllm_and_megatron_are_enough() -> None:
    validate_router_replay_config(policy() | REPLAY | VLLM)
    validate_router_replay_config(policy(enabled=True, cuda_graph_impl="none") | REPLAY | VLLM)


@pytest.mark.parametrize("replay", [{}, {"router_replay": None}, {"router_replay": {"enabled": False}}])
def test_without_replay_nothing_is_asked(replay: dict[str, Any]) -> None:
    config = policy(enabled=False, model_overrides={"moe_router_fusion": True}) | replay
    validate_router_replay_config(config)
    assert router_replay_enabled(config) is False
    assert router_replay_enabled(config | REPLAY) is True


@pytest.mark.parametrize(
    ("generation", "found"),
    [
        ({}, MISSING),
        ({"generation": {"backend": "sglang"}}, "sglang"),
        ({"generation": {"backend": "megatron"}}, "megatron"),
    ],
)
def test_routes_come_from_vllm(generation: dict[str, Any], found: Any) -> None:
    with pytest.raises(AssertionError) as raised:
        validate_router_replay_config(policy() | REPLAY | generation)
    assert isinstance(raised.value, ConfigError)
    assert raised.value.problems == (
        Problem(
            "policy.generation.backend",
            found,
            "must be vllm, which records the routes, because policy.router_replay.enabled is true",
        ),
    )


def test_what_cannot_be_replayed_comes_together() -> None:
    overrides = {
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "moe_router_fusion": True,
        "moe_expert_capacity_factor": 1.0,
    }
    found = _problems(
        enabled=False,
        moe_router_load_balancing_type="sinkhorn",
        cuda_graph_impl="full_iteration",
        model_overrides=overrides,
    )
    assert found == {
        f"{M}.enabled": False,
        f"{M}.moe_router_load_balancing_type": "sinkhorn",
        f"{M}.cuda_graph_impl": "full_iteration",
        **{f"{M}.model_overrides.{name}": value for name, value in overrides.items()},
    }


@pytest.mark.parametrize("modules", [None, [], "full", ["attn", "moe_router"]])
def test_graphs_that_capture_routers(modules: Any) -> None:
    assert _problems(cuda_graph_impl="local", cuda_graph_modules=modules) == {f"{M}.cuda_graph_impl": "local"}


@pytest.mark.parametrize("key", ["cuda_graph_modules", "cuda_graph_scope"])
def test_graphs_that_leave_routers_out(key: str) -> None:
    validate_router_replay_config(policy(cuda_graph_impl="local", **{key: ["attn", "mlp"]}) | REPLAY | VLLM)


def test_settings_of_the_whole_policy_are_examined() -> None:
    findings = examine_policy(policy(model_overrides={"moe_router_fusion": True}) | REPLAY)
    paths = {problem.path for problem in findings.problems}
    assert {"policy.generation.backend", f"{M}.model_overrides.moe_router_fusion"} <= paths


def test_a_model_without_experts() -> None:
    with pytest.raises(ConfigError, match=r"policy\.router_replay\.enabled is True: must be false: the model has no"):
        apply_moe_config(provider("dense"), policy() | REPLAY)


def test_a_fused_router_that_the_model_comes_with_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    model_cfg = provider("moe")
    model_cfg.moe_router_fusion = True
    apply_moe_config(model_cfg, policy() | {"router_replay": {"enabled": False}})
    assert model_cfg.moe_router_fusion is True
    with caplog.at_level(logging.WARNING, "megasetup"):
        apply_moe_config(model_cfg, policy() | REPLAY)
    assert (model_cfg.moe_router_fusion, model_cfg.moe_enable_routing_replay) == (False, True)
    assert "moe_router_fusion is switched off" in caplog.text


def test_what_the_model_comes_with() -> None:
    model_cfg = provider("moe")
    model_cfg.virtual_pipeline_model_parallel_size = 2
    model_cfg.moe_router_load_balancing_type = ["aux_loss", "sinkhorn"]
    with pytest.raises(ConfigError) as raised:
        apply_moe_config(model_cfg, policy() | REPLAY)
    first, second = raised.value.problems
    assert first.path == second.path == "policy.router_replay.enabled"
    assert "moe_router_load_balancing_type changed, which is ['aux_loss', 'sinkhorn']" in first.remedy
    assert "virtual_pipeline_model_parallel_size changed, which is 2" in second.remedy
