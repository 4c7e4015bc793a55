"""Everything wrong with a config is found in one pass, with its path, the value found and what would be right."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megasetup.compat.bridge import import_bridge
from megasetup.config.errors import (
    MISSING,
    ConfigAssertionError,
    ConfigAttributeError,
    ConfigError,
    ConfigKeyError,
    ConfigNotImplementedError,
    ConfigTypeError,
    Problem,
)
from megasetup.config.load import load_config
from megasetup.config.validate import examine_file, examine_policy, examine_value

M = "policy.megatron_cfg"


def policy(megatron: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"model_name": "some/model", "precision": "bfloat16", "megatron_cfg": megatron or {}, **keys}


def problems(config: Any, **arguments: Any) -> list[Problem]:
    return list(examine_policy(config, **arguments).problems)


def warnings(config: Any) -> list[Problem]:
    findings = examine_policy(config)
    assert list(findings.problems) == []
    return findings.warnings


def test_the_least_that_a_policy_may_be() -> None:
    findings = examine_policy(policy(), strict=True)
    assert not findings.problems
    assert findings.warnings == []
    findings.raise_any()


@pytest.mark.parametrize(
    ("config", "path", "found", "remedy"),
    [
        (policy(precision="bf16"), "policy.precision", "bf16", "must be float32, bfloat16 or float16"),
        (policy(model_name=3), "policy.model_name", 3, "must be text"),
        (policy(generation=[]), "policy.generation", [], "must be a mapping or null"),
        (
            policy(train_global_batch_size=0),
            "policy.train_global_batch_size",
            0,
            "must be a whole number of at least 1",
        ),
        (
            policy({"tensor_model_parallel_size": True}),
            f"{M}.tensor_model_parallel_size",
            True,
            "must be a whole number of at least 1",
        ),
        (
            policy({"tensor_model_parallel_size": 2.0}),
            f"{M}.tensor_model_parallel_size",
            2.0,
            "must be a whole number of at least 1",
        ),
        (
            policy({"tensor_model_parallel_size": None}),
            f"{M}.tensor_model_parallel_size",
            None,
            "must be a whole number of at least 1; leave the key out for its default",
        ),
        (
            policy({"optimizer": {"lr": "1e-5"}}),
            f"{M}.optimizer.lr",
            "1e-5",
            "must be a number or null; YAML read 1e-5 as text: write 1e-05 without quotes",
        ),
        (policy({"optimizer": {"lr": "nan"}}), f"{M}.optimizer.lr", "nan", "must be a number or null"),
        (
            policy({"optimizer": {"lr": float("inf")}}),
            f"{M}.optimizer.lr",
            float("inf"),
            "must be a number or null",
        ),
        (policy(precision=None), "policy.precision", None, "must be float32, bfloat16 or float16"),
        (
            policy({"sequence_parallel": "true"}),
            f"{M}.sequence_parallel",
            "true",
            "must be true or false; 'true' in quotes is text",
        ),
        (
            policy({"activation_checkpointing": "ful"}),
            f"{M}.activation_checkpointing",
            "ful",
            "must be true, false, full, selective or null",
        ),
        (
            policy({"optimizer": {"params_dtype": "float8"}}),
            f"{M}.optimizer.params_dtype",
            "float8",
            "must be the name of a dtype (float32, bfloat16, float16)",
        ),
        (
            policy({"recompute_modules": ["mlp", 3]}),
            f"{M}.recompute_modules[1]",
            3,
            "must be text",
        ),
        (
            policy({"moe_router_load_balancing_type": 3}),
            f"{M}.moe_router_load_balancing_type",
            3,
            "must be text or a list of text",
        ),
        (
            policy(generation={"colocated": {}}),
            "policy.generation.colocated.enabled",
            MISSING,
            "must be given: true or false",
        ),
    ],
)
def test_a_value_of_the_wrong_type(config: Any, path: str, found: Any, remedy: str) -> None:
    assert problems(config) == [Problem(path, found, remedy)]


def test_what_is_missing() -> None:
    assert problems({}) == [
        Problem("policy.model_name", MISSING, "must be given: text"),
        Problem("policy.precision", MISSING, "must be given: float32, bfloat16 or float16"),
        Problem("policy.megatron_cfg", MISSING, "must be given: a mapping"),
    ]


def test_a_missing_key_that_is_there_by_another_name() -> None:
    config = policy()
    config["modelname"] = config.pop("model_name")
    findings = examine_policy(config)
    assert [problem.remedy for problem in findings.problems] == [
        "must be given: text; policy.modelname looks like a slip of the pen"
    ]
    assert [problem.path for problem in findings.warnings] == ["policy.modelname"]


def test_what_is_no_mapping_at_all() -> None:
    assert problems([1]) == [Problem("policy", [1], "must be a mapping")]
    assert list(examine_file("text").problems) == [Problem("the config", "text", "must be a mapping")]  # type: ignore[arg-type]


def test_problems_of_every_kind_come_together() -> None:
    config = policy(
        {
            "tensor_model_parallel_size": "two",
            "context_parallel_size": 2,
            "fp8_cfg": {"enabled": True, "fp8": "e4m3"},
            "optimizer": {"optimizer_cpu_offload": True, "optimizer": "muon"},
            "use_fused_linear_logprobs": True,
            "distributed_data_parallel_config": {"overlap_param_gather": True},
            "model_overrides": {"sequence_parallel": True},
            "peft": {"enabled": True, "dim": 8},
        },
        logprob_chunk_size=4,
        reward_model_cfg={"enabled": True},
        hf_config_overrides={"rope_scaling": {"rope_type": "yarn"}},
    )
    findings = examine_policy(config)
    assert {problem.path for problem in findings.problems} == {
        f"{M}.tensor_model_parallel_size",
        "policy.sequence_packing.enabled",
        f"{M}.use_fused_linear_logprobs",
        f"{M}.fp8_cfg.fp8_recipe",
        f"{M}.fp8_cfg.fp8_param",
        f"{M}.optimizer.optimizer_offload_fraction",
        f"{M}.optimizer.use_distributed_optimizer",
        f"{M}.optimizer.optimizer",
        f"{M}.distributed_data_parallel_config.overlap_param_gather",
        f"{M}.defer_fp32_logits",
        f"{M}.model_overrides.sequence_parallel",
        f"{M}.peft.alpha",
        "policy.reward_model_cfg.enabled",
        *(
            f"policy.hf_config_overrides.rope_scaling.{name}"
            for name in (
                "factor",
                "rope_theta",
                "original_max_position_embeddings",
                "truncate",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
            )
        ),
    }
    with pytest.raises(ConfigError) as error:
        findings.raise_any()
    for kind in (ConfigTypeError, ConfigKeyError, ConfigAssertionError, ConfigNotImplementedError):
        assert isinstance(error.value, kind)
    for problem in findings.problems:
        assert str(problem) in str(error.value)


def test_a_rule_that_trips_over_a_wrong_type_does_not_hide_it() -> None:
    config = policy({"context_parallel_size": "2"}, logprob_chunk_size="4")
    assert {problem.path for problem in problems(config)} == {f"{M}.context_parallel_size", "policy.logprob_chunk_size"}


@pytest.mark.parametrize(
    ("config", "path", "remedy"),
    [
        (
            policy({"tensor_parallel_size": 2}),
            f"{M}.tensor_parallel_size",
            f"not a known key; did you mean {M}.tensor_model_parallel_size?",
        ),
        (
            policy(tensor_model_parallel_size=2),
            "policy.tensor_model_parallel_size",
            f"not a known key; did you mean {M}.tensor_model_parallel_size?",
        ),
        (
            policy({"optimizer": {"optimiser_cpu_offload": False}}),
            f"{M}.optimizer.optimiser_cpu_offload",
            f"not a known key; did you mean {M}.optimizer.optimizer_cpu_offload?",
        ),
        (
            policy({"optimizer": {"lr": 1.0}, "optimzer": {"lr": 2.0}}),
            f"{M}.optimzer",
            f"not a known key; did you mean {M}.optimizer?",
        ),
        (policy({"zzz": 1}), f"{M}.zzz", "not a known key"),
    ],
)
def test_a_key_that_nobody_knows(config: Any, path: str, remedy: str) -> None:
    assert [(problem.path, problem.remedy) for problem in warnings(config)] == [(path, remedy)]
    findings = examine_policy(config, strict=True)
    assert [(problem.path, problem.remedy) for problem in findings.problems] == [(path, remedy)]
    assert findings.warnings == []
    with pytest.raises(ConfigAttributeError):
        findings.raise_any()


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megasetup"):
        examine_policy(policy({"zzz": 1})).raise_any()
    assert caplog.messages == [f"{M}.zzz is 1: not a known key"]


def test_keys_that_are_passed_on_are_no_surprise() -> None:
    anything = {"any": {"thing": [1]}, "lr": 1}
    config = policy(
        {
            "env_vars": {"ANY_NAME": 1},
            "model_overrides": {"rotary_base": 5},
            "freeze_config": {"freeze_any": True},
            "optimizer": {"a_field_of_a_later_megatron": 1},
        },
        hf_config_overrides=anything,
        dtensor_cfg=anything,
        generation={
            "colocated": {"enabled": False},
            "vllm_cfg": anything,
            "sglang_cfg": anything,
            "mcore_generation_config": anything,
            "quantisation": 1,
        },
    )
    assert warnings(config) == []


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("optimizer", "OptimizerConfig"),
        ("scheduler", "SchedulerConfig"),
        ("distributed_data_parallel_config", "DistributedDataParallelConfig"),
    ],
)
def test_no_field_of_megatron_is_taken_for_a_slip(section: str, name: str) -> None:
    cls = getattr(import_bridge("megatron.bridge.training.config"), name)
    for field in (field for field in dataclasses.fields(cls) if field.init):
        assert examine_policy(policy({section: {field.name: None}})).warnings == [], field.name


def test_configs_that_are_made_in_python() -> None:
    config = policy({"optimizer": {"params_dtype": torch.float32}, "recompute_modules": ("mlp",)})
    before = copy.deepcopy(config)
    assert problems(config, strict=True) == []
    assert config == before


def test_a_value_model() -> None:
    config = policy({"optimizer": {"optimizer_cpu_offload": True, "lr": "1"}, "trainiters": 3})
    findings = examine_value(config)
    assert {problem.path for problem in findings.problems} == {
        "value.megatron_cfg.optimizer.lr",
        "value.megatron_cfg.optimizer.optimizer_offload_fraction",
        "value.megatron_cfg.optimizer.use_distributed_optimizer",
    }
    assert [problem.remedy for problem in findings.warnings] == [
        "not a known key; did you mean value.megatron_cfg.train_iters?"
    ]


def test_a_whole_file() -> None:
    value = policy({"optimizer": {"overlap_cpu_optimizer_d2h_h2d": True}})
    config = {"grpo": {"anything": 1}, "policy": policy(precision="double"), "value": value}
    findings = examine_file(config, strict=True)
    assert [problem.path for problem in findings.problems] == [
        "policy.precision",
        "value.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d",
    ]


def test_a_file_without_a_policy() -> None:
    findings = examine_file({"polcy": policy(), "cluster": {}})
    assert [str(problem) for problem in findings.problems] == [
        "policy is missing: must be given: a mapping; polcy looks like a slip of the pen"
    ]


def test_problems_say_where_their_values_come_from(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("policy:\n  model_name: 1\n  megatron_cfg:\n    train_iter: 1\n    optimizer:\n      lr: x\n")
    loaded = load_config(path, ["policy.megatron_cfg.optimizer.lr=y"])
    findings = examine_file(loaded.config, locate=loaded.located)
    assert [str(problem) for problem in findings.problems] == [
        f"policy.model_name is 1: must be text ({path}:2)",
        f"policy.precision is missing: must be given: float32, bfloat16 or float16 ({path}:1)",
        "policy.megatron_cfg.optimizer.lr is 'y': must be a number or null (command line)",
    ]
    assert [str(warning) for warning in findings.warnings] == [
        f"policy.megatron_cfg.train_iter is 1: not a known key; did you mean {M}.train_iters? ({path}:4)"
    ]


def test_what_is_missing_is_said_once() -> None:
    assert problems(policy(generation={"backend": "vllm"})) == [
        Problem("policy.generation.colocated", MISSING, "must be given: a mapping")
    ]


def test_a_member_of_an_enum_is_its_name() -> None:
    from megatron.core.transformer.enums import AttnBackend

    assert problems(policy({"attention_backend": AttnBackend.flash})) == []
