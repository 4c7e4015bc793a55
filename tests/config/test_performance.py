"""Speed and memory: recomputation, fusions, attention, layers, CUDA graphs, fp8, activation offloading."""

from __future__ import annotations

import os
from typing import Any

import pytest
from bridge_providers import changes, policy, provider
from megatron.core.transformer.enums import AttnBackend

from megasetup.compat.bridge import import_bridge
from megasetup.config.performance import apply_performance_config, fp8_settings

NVTE = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN")


def test_parallel_output_is_on_and_nothing_else_changes() -> None:
    model_cfg = provider()
    model_cfg.parallel_output = False
    apply_performance_config(model_cfg, policy())
    assert changes(model_cfg) == {}
    assert model_cfg.parallel_output is True


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("apply_rope_fusion", True),
        ("apply_rope_fusion", False),
        ("bias_activation_fusion", True),
        ("bias_activation_fusion", False),
        ("gradient_accumulation_fusion", True),
        ("gradient_accumulation_fusion", False),
        ("use_fused_weighted_squared_relu", True),
        ("use_fused_weighted_squared_relu", False),
        ("cuda_graph_modules", ["attn"]),
        ("cuda_graph_scope", ["attn", "mlp"]),
        ("cuda_graph_warmup_steps", 0),
        ("min_offloaded_tensor_size", 4096),
        ("activation_offload_fraction", 0.5),
        ("transformer_impl", "inference_optimized"),
    ],
)
def test_a_key_sets_its_field(key: str, value: Any) -> None:
    model_cfg = provider()
    if isinstance(value, bool):
        setattr(model_cfg, key, not value)
    apply_performance_config(model_cfg, policy(**{key: value}))
    assert getattr(model_cfg, key) == value
    assert set(changes(model_cfg)) <= {key}


RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


class TestActivationCheckpointing:
    """full: uniform, layer by layer; selective: the given modules."""

    @pytest.mark.parametrize("value", [True, "full"])
    def test_full(self, value: Any) -> None:
        model_cfg = provider()
        apply_performance_config(model_cfg, policy(activation_checkpointing=value))
        assert [getattr(model_cfg, name) for name in RECOMPUTE] == ["full", "uniform", 1, None]

    def test_selective_with_modules(self) -> None:
        model_cfg = provider()
        settings = {"activation_checkpointing": "selective", "recompute_modules": ["core_attn", "layernorm"]}
        apply_performance_config(model_cfg, policy(**settings))
        assert [getattr(model_cfg, name) for name in RECOMPUTE] == ["selective", None, None, ["core_attn", "layernorm"]]

    def test_selective_without_modules_leaves_them_to_megatron(self) -> None:
        model_cfg = provider()
        apply_performance_config(model_cfg, policy(activation_checkpointing="selective"))
        assert [getattr(model_cfg, name) for name in RECOMPUTE] == ["selective", None, None, None]

    @pytest.mark.parametrize("value", [False, None])
    def test_off_clears_what_the_checkpoint_had(self, value: Any) -> None:
        model_cfg = provider()
        model_cfg.recompute_granularity, model_cfg.recompute_method, model_cfg.recompute_num_layers = "full", "block", 4
        apply_performance_config(model_cfg, policy(activation_checkpointing=value))
        assert [getattr(model_cfg, name) for name in RECOMPUTE] == [None, None, None, None]

    def test_absent_leaves_what_the_checkpoint_had(self) -> None:
        model_cfg = provider()
        model_cfg.recompute_granularity, model_cfg.recompute_method, model_cfg.recompute_num_layers = "full", "block", 4
        apply_performance_config(model_cfg, policy())
        assert [getattr(model_cfg, name) for name in RECOMPUTE] == ["full", "block", 4, None]

    @pytest.mark.parametrize("value", ["half", "", 1.5])
    def test_anything_else_is_a_value_error(self, value: Any) -> None:
        message = r"policy\.megatron_cfg\.activation_checkpointing is .*: must be true or 'full', 'selective', or false"
        with pytest.raises(ValueError, match=message):
            apply_performance_config(provider(), policy(activation_checkpointing=value))


class TestActivation:
    """A model without a gated linear unit needs its activation function."""

    def test_a_gated_model_does_without(self) -> None:
        model_cfg = provider()
        model_cfg.activation_func = None
        apply_performance_config(model_cfg, policy())

    def test_another_does_not(self) -> None:
        model_cfg = provider()
        model_cfg.gated_linear_unit, model_cfg.activation_func = False, None
        with pytest.raises(AssertionError, match="activation_func is None: must be a function") as raised:
            apply_performance_config(model_cfg, policy())
        assert isinstance(raised.value, ValueError)

    def test_with_one_it_passes(self) -> None:
        model_cfg = provider()
        model_cfg.gated_linear_unit = False
        apply_performance_config(model_cfg, policy())


class TestAttentionBackend:
    """A name that Megatron knows; Transformer Engine's own variables make way for it."""

    @pytest.mark.parametrize("name", ["flash", "fused", "unfused", "local", "auto"])
    def test_every_name_of_megatron(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for variable in NVTE:
            monkeypatch.setenv(variable, "1")
        model_cfg = provider()
        apply_performance_config(model_cfg, policy(attention_backend=name))
        assert model_cfg.attention_backend is AttnBackend[name]
        assert [variable for variable in NVTE if variable in os.environ] == []

    @pytest.mark.parametrize("value", ["flashy", "", None, 1])
    def test_another_name_is_a_value_error_and_the_environment_stays(
        self, value: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
        message = r"policy\.megatron_cfg\.attention_backend is .*: must be one of flash, fused, unfused, local, auto"
        with pytest.raises(ValueError, match=message):
            apply_performance_config(provider(), policy(attention_backend=value))
        assert os.environ["NVTE_FLASH_ATTN"] == "1"

    def test_without_the_key_environment_and_provider_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
        model_cfg = provider()
        model_cfg.attention_backend = AttnBackend.fused
        apply_performance_config(model_cfg, policy())
        assert model_cfg.attention_backend is AttnBackend.fused
        assert os.environ["NVTE_FLASH_ATTN"] == "1"

    def test_an_expanded_sequence_model_defaults_to_auto(self) -> None:
        model_cfg = provider("omni")
        model_cfg.nemotron_omni_contract = "expanded_sequence_v1"
        assert model_cfg.attention_backend is AttnBackend.flash
        apply_performance_config(model_cfg, policy())
        assert model_cfg.attention_backend is AttnBackend.auto

    def test_an_expanded_sequence_model_rejects_flash(self) -> None:
        model_cfg = provider("omni")
        model_cfg.nemotron_omni_contract = "expanded_sequence_v1"
        with pytest.raises(ValueError, match=r"attention_backend is 'flash': .* expanded_sequence_v1"):
            apply_performance_config(model_cfg, policy(attention_backend="flash"))
        apply_performance_config(model_cfg, policy(attention_backend="fused"))
        assert model_cfg.attention_backend is AttnBackend.fused

    def test_an_omni_model_of_another_contract_takes_flash(self) -> None:
        model_cfg = provider("omni")
        apply_performance_config(model_cfg, policy())
        assert model_cfg.attention_backend is AttnBackend.flash
        apply_performance_config(model_cfg, policy(attention_backend="flash"))


class TestTransformerImpl:
    """Bridge's layer spec follows, because it, and not transformer_impl, decides what layers are made of."""

    def test_local_builds_local_layers(self) -> None:
        specs = import_bridge("megatron.bridge.models.gpt_provider")
        model_cfg = provider("moe")
        apply_performance_config(model_cfg, policy(transformer_impl="local"))
        assert model_cfg.transformer_impl == "local"
        assert model_cfg.transformer_layer_spec is specs.local_layer_spec

    def test_transformer_engine_builds_its_layers(self) -> None:
        specs = import_bridge("megatron.bridge.models.gpt_provider")
        model_cfg = provider()
        apply_performance_config(model_cfg, policy(transformer_impl="local"))
        apply_performance_config(model_cfg, policy(transformer_impl="transformer_engine"))
        assert model_cfg.transformer_layer_spec is specs.default_layer_spec

    def test_a_spec_of_the_model_s_own_stays(self) -> None:
        model_cfg = provider()
        model_cfg.transformer_layer_spec = own = lambda config: None
        apply_performance_config(model_cfg, policy(transformer_impl="local"))
        assert model_cfg.transformer_layer_spec is own


def _generation(impl: str, backend: str = "megatron", colocated: bool = True) -> dict[str, Any]:
    settings = {"cuda_graph_impl": impl}
    return {
        "generation": {"backend": backend, "colocated": {"enabled": colocated}, "mcore_generation_config": settings}
    }


class TestCudaGraphs:
    """Any graph, for training or for colocated Megatron generation, needs Transformer Engine's RNG tracker."""

    @pytest.mark.parametrize("impl", ["local", "transformer_engine", "full_iteration"])
    def test_a_training_graph(self, impl: str) -> None:
        model_cfg = provider()
        apply_performance_config(model_cfg, policy(cuda_graph_impl=impl))
        assert (model_cfg.cuda_graph_impl, model_cfg.use_te_rng_tracker) == (impl, True)

    @pytest.mark.parametrize("name", ["enable_cuda_graph", "external_cuda_graph"])
    def test_a_graph_under_an_older_name(self, name: str) -> None:
        model_cfg = provider()
        setattr(model_cfg, name, True)
        apply_performance_config(model_cfg, policy())
        assert model_cfg.use_te_rng_tracker is True

    def test_a_graph_of_colocated_megatron_generation(self) -> None:
        model_cfg = provider()
        apply_performance_config(model_cfg, _generation("local") | policy())
        assert (model_cfg.cuda_graph_impl, model_cfg.use_te_rng_tracker) == ("none", True)

    @pytest.mark.parametrize(
        "generation",
        [
            {},
            {"generation": None},
            _generation("none"),
            _generation("local", backend="vllm"),
            _generation("local", colocated=False),
        ],
    )
    def test_no_graph(self, generation: dict[str, Any]) -> None:
        model_cfg = provider()
        apply_performance_config(model_cfg, generation | policy(cuda_graph_impl="none"))
        assert model_cfg.use_te_rng_tracker is False


FP8 = {"enabled": True, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}


class TestFp8:
    """Enabled, it needs all three; disabled, it is off."""

    def test_enabled(self) -> None:
        model_cfg = provider()
        apply_performance_config(model_cfg, policy(fp8_cfg=FP8))
        assert (model_cfg.fp8, model_cfg.fp8_recipe, model_cfg.fp8_param) == ("e4m3", "blockwise", True)

    @pytest.mark.parametrize("key", ["fp8", "fp8_recipe", "fp8_param"])
    def test_enabled_without_one_is_a_key_error(self, key: str) -> None:
        settings = {name: value for name, value in FP8.items() if name != key}
        with pytest.raises(KeyError) as raised:
            apply_performance_config(provider(), policy(fp8_cfg=settings))
        assert f"policy.megatron_cfg.fp8_cfg.{key} is missing" in str(raised.value)
        assert isinstance(raised.value, ValueError)

    def test_all_that_are_missing_are_named(self) -> None:
        with pytest.raises(KeyError) as raised:
            fp8_settings(policy(fp8_cfg={"enabled": True}))
        assert len(raised.value.problems) == 3

    @pytest.mark.parametrize("settings", [{"enabled": False}, FP8 | {"enabled": False}])
    def test_disabled_switches_off_what_the_checkpoint_had(self, settings: dict[str, Any]) -> None:
        model_cfg = provider()
        model_cfg.fp8, model_cfg.fp8_param = "hybrid", True
        apply_performance_config(model_cfg, policy(fp8_cfg=settings))
        assert (model_cfg.fp8, model_cfg.fp8_param) == (None, False)
        assert fp8_settings(policy(fp8_cfg=settings)) == {}

    @pytest.mark.parametrize("settings", [{}, {"fp8_cfg": None}, {"fp8_cfg": {}}])
    def test_absent_leaves_what_the_checkpoint_had(self, settings: dict[str, Any]) -> None:
        model_cfg = provider()
        model_cfg.fp8 = "hybrid"
        apply_performance_config(model_cfg, policy(**settings))
        assert model_cfg.fp8 == "hybrid"

    def test_without_enabled_nobody_knows(self) -> None:
        with pytest.raises(KeyError) as raised:
            apply_performance_config(provider(), policy(fp8_cfg={"fp8": "e4m3"}))
        assert "policy.megatron_cfg.fp8_cfg.enabled is missing" in str(raised.value)


class TestActivationOffloading:
    """False clears it; True needs modules, and those of experts an MoE model."""

    def test_on(self) -> None:
        model_cfg = provider()
        settings = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_proj"]}
        apply_performance_config(model_cfg, policy(**settings))
        assert changes(model_cfg) == settings

    def test_on_with_the_modules_of_the_checkpoint(self) -> None:
        model_cfg = provider()
        model_cfg.offload_modules = ["mlp_norm"]
        apply_performance_config(model_cfg, policy(fine_grained_activation_offloading=True))
        assert (model_cfg.fine_grained_activation_offloading, model_cfg.offload_modules) == (True, ["mlp_norm"])

    @pytest.mark.parametrize("settings", [{}, {"offload_modules": ["core_attn"]}])
    def test_off_clears_the_modules(self, settings: dict[str, Any]) -> None:
        model_cfg = provider()
        model_cfg.fine_grained_activation_offloading, model_cfg.offload_modules = True, ["mlp_norm"]
        apply_performance_config(model_cfg, policy(fine_grained_activation_offloading=False, **settings))
        assert (model_cfg.fine_grained_activation_offloading, model_cfg.offload_modules) == (False, [])

    def test_absent_leaves_it_alone(self) -> None:
        model_cfg = provider()
        model_cfg.fine_grained_activation_offloading, model_cfg.offload_modules = True, ["mlp_norm"]
        apply_performance_config(model_cfg, policy())
        assert (model_cfg.fine_grained_activation_offloading, model_cfg.offload_modules) == (True, ["mlp_norm"])

    @pytest.mark.parametrize(
        "settings", [{}, {"offload_modules": []}, {"offload_modules": None}, {"offload_modules": "core_attn"}]
    )
    def test_on_without_a_list_of_modules(self, settings: dict[str, Any]) -> None:
        message = r"policy\.megatron_cfg\.offload_modules is .*: must be a list of at least one module"
        with pytest.raises(ValueError, match=message):
            apply_performance_config(provider(), policy(fine_grained_activation_offloading=True, **settings))

    @pytest.mark.parametrize("module", ["expert_fc1", "moe_act", "fused_group_mlp"])
    def test_modules_of_experts_need_experts(self, module: str) -> None:
        settings = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", module]}
        with pytest.raises(ValueError, match=rf"must do without {module}: the model has no experts"):
            apply_performance_config(provider(), policy(**settings))
        model_cfg = provider("moe")
        apply_performance_config(model_cfg, policy(**settings))
        assert model_cfg.offload_modules == ["core_attn", module]


def test_all_problems_come_together() -> None:
    config = policy(
        activation_checkpointing="half",
        attention_backend="flashy",
        fp8_cfg={"enabled": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
        fine_grained_activation_offloading=True,
    )
    with pytest.raises(ValueError, match="4 problems") as raised:
        apply_performance_config(provider(), config)
    assert [problem.path.removeprefix("policy.megatron_cfg.") for problem in raised.value.problems] == [
        "activation_checkpointing",
        "attention_backend",
        "fp8_cfg.fp8_param",
        "offload_modules",
    ]
