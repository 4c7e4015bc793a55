"""model_overrides: merged into a copy, level by level, and never where a setting decides."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
from bridge_providers import HF_CONFIGS, changes, policy, provider

from megasetup.config.errors import Problems
from megasetup.config.fields import MEGATRON
from megasetup.config.overrides import (
    SETTINGS,
    merge_model_override_value,
    merge_model_overrides,
    validate_model_override_conflicts,
)

PATH = "policy.megatron_cfg.model_overrides"


class TestConflicts:
    """A field is decided in one place."""

    @pytest.mark.parametrize(
        ("field", "setting"),
        [
            ("tensor_model_parallel_size", "policy.megatron_cfg.tensor_model_parallel_size"),
            ("sequence_parallel", "policy.megatron_cfg.sequence_parallel"),
            ("moe_router_dtype", "policy.megatron_cfg.moe_router_dtype"),
            ("moe_flex_dispatcher_num_sms", "policy.megatron_cfg.moe_flex_dispatcher_num_sms"),
            ("moe_enable_routing_replay", "policy.router_replay.enabled"),
            ("mtp_num_layers", "policy.megatron_cfg.mtp_num_layers"),
            ("bf16", "policy.precision"),
            ("params_dtype", "policy.precision"),
            ("pipeline_dtype", "policy.megatron_cfg.pipeline_dtype"),
            ("recompute_granularity", "policy.megatron_cfg.activation_checkpointing"),
            ("attention_backend", "policy.megatron_cfg.attention_backend"),
            ("cuda_graph_impl", "policy.megatron_cfg.cuda_graph_impl"),
            ("fp8", "policy.megatron_cfg.fp8_cfg.fp8"),
            ("fp8_param", "policy.megatron_cfg.fp8_cfg.fp8_param"),
            ("offload_modules", "policy.megatron_cfg.offload_modules"),
            ("layernorm_epsilon", "policy.megatron_cfg.layernorm_epsilon"),
            ("freeze_vision_model", "policy.megatron_cfg.freeze_vision_model"),
            ("calculate_per_token_loss", "megasetup"),
        ],
    )
    def test_a_field_with_a_setting_is_a_value_error_that_names_both(self, field: str, setting: str) -> None:
        with pytest.raises(ValueError, match="must not be given here") as raised:
            validate_model_override_conflicts({}, {field: 1})
        assert f"{PATH}.{field} is 1" in str(raised.value)
        assert setting in str(raised.value)

    def test_a_key_that_only_the_config_knows_clashes_too(self) -> None:
        with pytest.raises(ValueError, match=rf"{PATH}\.own is 2: .* policy\.megatron_cfg\.own"):
            validate_model_override_conflicts({"own": 1}, {"own": 2})

    def test_other_fields_pass(self) -> None:
        validate_model_override_conflicts(
            {"tensor_model_parallel_size": 2}, {"qk_layernorm": True, "softmax_scale": 1.0}
        )
        validate_model_override_conflicts({}, {})

    def test_all_clashes_come_together(self) -> None:
        with pytest.raises(ValueError, match="2 problems"):
            validate_model_override_conflicts({}, {"bf16": True, "qk_layernorm": True, "context_parallel_size": 2})

    def test_every_field_that_a_concern_sets_is_among_the_settings(self) -> None:
        # What the concerns change, found by running them, not by reading their tables.
        from megasetup.config.container import validate_training_config
        from megasetup.config.moe import apply_moe_config
        from megasetup.config.parallelism import apply_parallelism_config
        from megasetup.config.performance import apply_performance_config

        model_cfg = provider("moe")
        model_cfg.parallel_output = model_cfg.perform_initialization = None
        config = policy(
            train_iters=1,
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            activation_checkpointing=True,
            recompute_modules=["mlp"],
            cuda_graph_impl="local",
            attention_backend="fused",
            transformer_impl="inference_optimized",
            sequence_parallel=True,
            fp8_cfg={"enabled": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True},
            fine_grained_activation_offloading=True,
            offload_modules=["moe_act"],
        ) | {"router_replay": {"enabled": True}}
        apply_parallelism_config(model_cfg, config)
        apply_moe_config(model_cfg, config)
        apply_performance_config(model_cfg, config)
        validate_training_config(config, model_cfg)
        assert set(changes(model_cfg, "moe")) - set(SETTINGS) == set()


@dataclasses.dataclass
class Leaf:
    """A nested config."""

    width: int = 1
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    computed: int = dataclasses.field(default=7, init=False)


@dataclasses.dataclass(frozen=True)
class FrozenLeaf:
    """A nested config that cannot be changed in place."""

    width: int = 1


class Plain:
    """A nested config that is no dataclass, like Hugging Face's."""

    def __init__(self) -> None:
        self.depth = 3
        self.leaf = Leaf()


@dataclasses.dataclass
class Root:
    """A provider with one nested config of each kind."""

    size: int = 1
    leaf: Leaf = dataclasses.field(default_factory=Leaf)
    frozen: FrozenLeaf = dataclasses.field(default_factory=FrozenLeaf)
    plain: Plain = dataclasses.field(default_factory=Plain)
    table: dict[str, Any] = dataclasses.field(default_factory=lambda: {"a": {"b": 1, "c": 2}, "leaf": Leaf()})
    nothing: Any = None


class TestMerging:
    """Into a copy, whatever the level."""

    def test_a_real_provider(self) -> None:
        model_cfg = provider()
        merged = merge_model_overrides(model_cfg, {"qk_layernorm": False, "softmax_scale": 0.5})
        assert type(merged) is type(model_cfg)
        assert changes(merged) == {"qk_layernorm": False, "softmax_scale": 0.5}
        assert changes(model_cfg) == {}

    def test_hooks_and_whatever_else_a_provider_keeps_beside_its_fields(self) -> None:
        model_cfg = provider()
        model_cfg.register_pre_wrap_hook(lambda model: model)
        merged = merge_model_overrides(model_cfg, {"softmax_scale": 0.5})
        assert merged._pre_wrap_hooks == model_cfg._pre_wrap_hooks
        merged.register_pre_wrap_hook(lambda model: model)
        assert len(model_cfg._pre_wrap_hooks) == 1

    def test_a_nested_hugging_face_config(self) -> None:
        model_cfg = provider("vision")
        depth = HF_CONFIGS["vision"]["vision_config"]["depth"]
        merged = merge_model_overrides(model_cfg, {"vision_config": {"depth": depth + 1}})
        assert merged.vision_config.depth == depth + 1
        assert type(merged.vision_config) is type(model_cfg.vision_config)
        assert model_cfg.vision_config.depth == depth

    def test_every_kind_of_nested_config(self) -> None:
        root = Root()
        overrides = {
            "size": 2,
            "leaf": {"width": 5},
            "frozen": {"width": 6},
            "plain": {"depth": 4, "leaf": {"width": 7}},
            "table": {"a": {"b": 9}, "new": {"x": 1}, "leaf": {"width": 8}},
            "nothing": {"now": "something"},
        }
        merged = merge_model_overrides(root, overrides)
        assert (merged.size, merged.leaf.width, merged.frozen.width) == (2, 5, 6)
        assert (merged.plain.depth, merged.plain.leaf.width) == (4, 7)
        assert merged.table["a"] == {"b": 9, "c": 2}
        assert merged.table["new"] == {"x": 1}
        assert merged.table["leaf"].width == 8
        assert merged.nothing == {"now": "something"}
        # The input is as it was.
        assert (root.size, root.leaf, root.frozen, root.nothing) == (1, Leaf(), FrozenLeaf(), None)
        assert (root.plain.depth, root.plain.leaf) == (3, Leaf())
        assert root.table == {"a": {"b": 1, "c": 2}, "leaf": Leaf()}

    def test_the_result_shares_no_list_with_the_config(self) -> None:
        overrides: dict[str, Any] = {"leaf": {"names": ["x"]}, "nothing": {"list": [1]}}
        merged = merge_model_overrides(Root(), overrides)
        merged.leaf.names.append("y")
        merged.nothing["list"].append(2)
        assert overrides == {"leaf": {"names": ["x"]}, "nothing": {"list": [1]}}

    @pytest.mark.parametrize("value", [False, 0, None, [], ""])
    def test_values_that_are_false_are_honoured(self, value: Any) -> None:
        assert merge_model_overrides(Root(size=5), {"size": value}).size == value

    def test_a_field_that_is_no_argument(self) -> None:
        assert merge_model_overrides(Root(), {"leaf": {"computed": 1}}).leaf.computed == 1

    def test_a_mapping_takes_the_place_of_a_value_that_has_no_fields(self) -> None:
        assert merge_model_override_value(3, {"a": 1}, PATH) == {"a": 1}
        assert merge_model_override_value(len, {"a": 1}, PATH) == {"a": 1}
        assert merge_model_override_value({"a": 1, "b": 2}, {"a": None}, PATH) == {"a": None, "b": 2}

    @pytest.mark.parametrize(
        ("overrides", "path", "owner"),
        [
            ({"sizes": 2}, f"{PATH}.sizes", "Root"),
            ({"leaf": {"depth": 2}}, f"{PATH}.leaf.depth", "Leaf"),
            ({"plain": {"leaf": {"depth": 2}}}, f"{PATH}.plain.leaf.depth", "Leaf"),
            ({"table": {"leaf": {"depth": 2}}}, f"{PATH}.table.leaf.depth", "Leaf"),
            ({"__class__": 2}, f"{PATH}.__class__", "Root"),
        ],
    )
    def test_an_unknown_field_is_an_attribute_error_with_its_path_and_its_class(
        self, overrides: dict[str, Any], path: str, owner: str
    ) -> None:
        with pytest.raises(AttributeError) as raised:
            merge_model_overrides(Root(), overrides)
        assert f"{path} is 2: {owner} has no such field" in str(raised.value)

    def test_unknown_fields_of_every_level_come_together(self) -> None:
        with pytest.raises(AttributeError, match="3 problems"):
            merge_model_overrides(Root(), {"sizes": 2, "leaf": {"depth": 2}, "plain": {"leaf": {"depth": 2}}})

    def test_an_unknown_field_names_the_provider_s_class(self) -> None:
        with pytest.raises(AttributeError, match=rf"{PATH}\.nope is 1: GPTModelProvider has no such field"):
            merge_model_overrides(provider(), {"nope": 1})

    @pytest.mark.parametrize("target", [types.SimpleNamespace(size=1), {"size": 1}, Root, None])
    def test_a_provider_that_is_no_dataclass_is_a_type_error(self, target: Any) -> None:
        with pytest.raises(TypeError, match=PATH):
            merge_model_overrides(target, {"size": 2})

    def test_another_path_stands_in_the_errors(self) -> None:
        with pytest.raises(AttributeError, match=r"mine\.sizes is 2"):
            merge_model_overrides(Root(), {"sizes": 2}, "mine")


def test_settings_name_keys_of_the_schema() -> None:
    """Whoever follows a path that an error names finds the key there."""
    from megasetup.config.schema import PolicyConfig
    from megasetup.config.schema.conform import check

    problems = Problems()
    for path in set(SETTINGS.values()):
        if not path.startswith("policy."):
            continue
        config: Any = 1
        for name in reversed(path.removeprefix("policy.").split(".")):
            config = {name: config}
        unknown = [problem.path for problem in check(config, PolicyConfig, "policy", problems)]
        assert unknown == [], path
    assert MEGATRON == "policy.megatron_cfg"
