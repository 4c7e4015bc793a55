"""Experts: each setting reaches its field, and what HybridEP and CUDA-graph generation need is set with them."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import pytest
from bridge_providers import changes, policy, provider

from megasetup.config.moe import apply_moe_config

RANKS, MNNVL = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "USE_MNNVL"
PAD = "moe_pad_experts_for_cuda_graph_inference"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of HybridEP's variables is set before a test, and what a test sets is gone after it."""
    for name in (RANKS, MNNVL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_tensor_parallel_size", 2),
        ("expert_model_parallel_size", 4),
        ("moe_router_dtype", "fp64"),
        ("moe_router_load_balancing_type", "none"),
        ("moe_router_bias_update_rate", 0.0),
        ("moe_enable_deepep", True),
        ("moe_token_dispatcher_type", "flex"),
        ("moe_shared_expert_overlap", True),
        ("moe_permute_fusion", False),
        ("moe_per_layer_logging", True),
        ("inference_moe_token_dispatcher_type", "nccl"),
        ("inference_grouped_gemm_backend", "torch"),
        ("moe_grouped_gemm", False),
        ("use_grouped_gemm_for_shared_expert", True),
        ("use_grouped_gemm_for_dense_mlp", True),
        ("moe_router_num_groups", 4),
        ("moe_router_group_topk", 2),
        (PAD, True),
        ("moe_flex_dispatcher_backend", "ncclep"),
        ("moe_flex_dispatcher_num_sms", 24),
    ],
)
def test_a_key_sets_its_field_and_no_other(key: str, value: Any) -> None:
    model_cfg = provider("moe")
    apply_moe_config(model_cfg, policy(**{key: value}))
    assert changes(model_cfg, "moe") == {key: value}
    assert RANKS not in os.environ


def test_absent_keys_leave_the_provider_alone() -> None:
    model_cfg = provider("moe")
    apply_moe_config(model_cfg, policy())
    assert changes(model_cfg, "moe") == {}


def test_none_is_honoured() -> None:
    model_cfg = provider("moe")
    model_cfg.moe_router_dtype = "fp32"
    model_cfg.expert_tensor_parallel_size = 2
    apply_moe_config(model_cfg, policy(moe_router_dtype=None, expert_tensor_parallel_size=None))
    assert (model_cfg.moe_router_dtype, model_cfg.expert_tensor_parallel_size) == (None, None)


class TestNumSms:
    """The number of SMs goes to the field that this Megatron has."""

    def test_the_older_key_sets_the_newer_field(self) -> None:
        model_cfg = provider("moe")
        apply_moe_config(model_cfg, policy(moe_hybridep_num_sms=32))
        assert changes(model_cfg, "moe") == {"moe_flex_dispatcher_num_sms": 32}

    def test_the_newer_key_wins_over_the_older(self) -> None:
        model_cfg = provider("moe")
        apply_moe_config(model_cfg, policy(moe_flex_dispatcher_num_sms=8, moe_hybridep_num_sms=32))
        assert model_cfg.moe_flex_dispatcher_num_sms == 8

    @pytest.mark.parametrize("key", ["moe_flex_dispatcher_num_sms", "moe_hybridep_num_sms"])
    def test_on_an_older_megatron_either_key_sets_the_older_field(self, key: str) -> None:
        # A stand-in: the provider of a Megatron before the two were unified cannot be installed beside this one.
        older = dataclasses.make_dataclass("OlderProvider", [("moe_hybridep_num_sms", int, 16)])()
        apply_moe_config(older, policy(**{key: 24}))
        assert vars(older) == {"moe_hybridep_num_sms": 24}


def test_a_field_that_megatron_lacks_is_an_error_when_it_is_on_and_passed_over_when_it_is_off() -> None:
    # A stand-in for an older Megatron, again.
    older = dataclasses.make_dataclass("OlderProvider", [("moe_router_dtype", str, None)])()
    apply_moe_config(older, policy(moe_router_dtype="fp32", moe_enable_deepep=False, moe_router_num_groups=None))
    assert vars(older) == {"moe_router_dtype": "fp32"}
    with pytest.raises(AttributeError, match="2 problems") as raised:
        apply_moe_config(older, policy(moe_enable_deepep=True, moe_router_num_groups=4))
    assert "policy.megatron_cfg.moe_enable_deepep is True: OlderProvider has no field moe_enable_deepep" in str(
        raised.value
    )
    assert isinstance(raised.value, ValueError)


class TestSingleGroup:
    """The inference-optimized router takes no groups, and one group is none."""

    @pytest.mark.parametrize("settings", [{}, {"moe_router_num_groups": 1, "moe_router_group_topk": 1}])
    def test_one_group_is_dropped_for_inference_optimized(self, settings: dict[str, Any]) -> None:
        model_cfg = provider("moe")
        model_cfg.moe_router_num_groups = model_cfg.moe_router_group_topk = 1
        apply_moe_config(model_cfg, policy(transformer_impl="inference_optimized", **settings))
        assert (model_cfg.moe_router_num_groups, model_cfg.moe_router_group_topk) == (None, None)

    def test_several_groups_are_kept(self) -> None:
        model_cfg = provider("moe")
        settings = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
        apply_moe_config(model_cfg, policy(transformer_impl="inference_optimized", **settings))
        assert (model_cfg.moe_router_num_groups, model_cfg.moe_router_group_topk) == (4, 2)

    def test_one_group_is_kept_for_other_implementations(self) -> None:
        model_cfg = provider("moe")
        apply_moe_config(model_cfg, policy(moe_router_num_groups=1, moe_router_group_topk=1))
        assert (model_cfg.moe_router_num_groups, model_cfg.moe_router_group_topk) == (1, 1)


@pytest.mark.parametrize("enabled", [True, False])
def test_routing_replay_follows_router_replay(enabled: bool) -> None:
    model_cfg = provider("moe")
    model_cfg.moe_enable_routing_replay = not enabled
    apply_moe_config(model_cfg, policy() | {"router_replay": {"enabled": enabled}})
    assert model_cfg.moe_enable_routing_replay is enabled


@pytest.mark.parametrize("replay", [None, {}])
def test_an_empty_router_replay_says_nothing(replay: Any) -> None:
    model_cfg = provider("moe")
    model_cfg.moe_enable_routing_replay = True
    apply_moe_config(model_cfg, policy() | {"router_replay": replay})
    assert model_cfg.moe_enable_routing_replay is True


def _generating(impl: str | None = "local", backend: str = "megatron", colocated: bool = True) -> dict[str, Any]:
    settings = {} if impl is None else {"cuda_graph_impl": impl}
    return {
        "generation": {"backend": backend, "colocated": {"enabled": colocated}, "mcore_generation_config": settings}
    }


class TestPaddedExperts:
    """Generation with local CUDA graphs and expert parallelism needs experts with inputs of a fixed size."""

    def test_they_are_switched_on_and_it_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        model_cfg = provider("moe")
        with caplog.at_level(logging.WARNING, logger="megasetup"):
            apply_moe_config(model_cfg, _generating() | policy(expert_model_parallel_size=2))
        assert getattr(model_cfg, PAD) is True
        assert f"policy.megatron_cfg.{PAD} is switched on" in caplog.text

    @pytest.mark.parametrize(("training", "generating", "padded"), [(1, 2, True), (2, 1, False)])
    def test_the_generating_model_s_own_expert_parallelism_decides(
        self, training: int, generating: int, padded: bool
    ) -> None:
        config = _generating() | policy(expert_model_parallel_size=training)
        config["generation"]["mcore_generation_config"]["expert_model_parallel_size"] = generating
        model_cfg = provider("moe")
        apply_moe_config(model_cfg, config)
        assert getattr(model_cfg, PAD) is padded

    def test_the_user_s_own_setting_is_kept(self, caplog: pytest.LogCaptureFixture) -> None:
        model_cfg = provider("moe")
        apply_moe_config(model_cfg, _generating() | policy(expert_model_parallel_size=2, **{PAD: False}))
        assert getattr(model_cfg, PAD) is False
        assert not caplog.records

    @pytest.mark.parametrize(
        ("generation", "size"),
        [
            (_generating(), 1),
            (_generating("none"), 2),
            (_generating(None), 2),
            (_generating("full_iteration"), 2),
            (_generating(backend="vllm"), 2),
            (_generating(colocated=False), 2),
            ({"generation": None}, 2),
        ],
    )
    def test_nothing_else_switches_them_on(self, generation: dict[str, Any], size: int) -> None:
        model_cfg = provider("moe")
        apply_moe_config(model_cfg, generation | policy(expert_model_parallel_size=size))
        assert getattr(model_cfg, PAD) is False


class TestHybridEp:
    """What HybridEP reads from the environment."""

    @pytest.mark.parametrize(
        ("size", "ranks", "mnnvl"), [(1, "1", "0"), (4, "4", "0"), (8, "8", "1"), (128, "64", "1")]
    )
    def test_guesses_come_from_the_expert_parallel_size_with_a_warning(
        self, size: int, ranks: str, mnnvl: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        apply_moe_config(
            provider("moe"), policy(moe_flex_dispatcher_backend="hybridep", expert_model_parallel_size=size)
        )
        assert (os.environ[RANKS], os.environ[MNNVL]) == (ranks, mnnvl)
        assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"] * 2

    def test_the_environment_wins_over_a_guess(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv(RANKS, "36")
        monkeypatch.setenv(MNNVL, "0")
        apply_moe_config(provider("moe"), policy(moe_flex_dispatcher_backend="hybridep", expert_model_parallel_size=8))
        assert (os.environ[RANKS], os.environ[MNNVL]) == ("36", "0")
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    def test_the_config_wins_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(RANKS, "36")
        monkeypatch.setenv(MNNVL, "1")
        apply_moe_config(
            provider("moe"),
            policy(
                moe_flex_dispatcher_backend="hybridep",
                expert_model_parallel_size=8,
                num_of_hybrid_ep_ranks_per_nvlink_domain=8,
                use_mnnvl=False,
            ),
        )
        assert (os.environ[RANKS], os.environ[MNNVL]) == ("8", "0")

    def test_nothing_is_set_when_the_config_is_wrong(self) -> None:
        # A stand-in for an older Megatron.
        older = dataclasses.make_dataclass("OlderProvider", [("moe_flex_dispatcher_backend", str, "hybridep")])()
        with pytest.raises(AttributeError):
            apply_moe_config(older, policy(moe_enable_deepep=True))
        assert RANKS not in os.environ
