"""Every file under tests/configs, from YAML to a ConfigContainer of Megatron-Bridge that passes its own validation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from bridge_providers import write_hf_folder

from megasetup.checkpoint.paths import validate_model_paths
from megasetup.cli.check import examine
from megasetup.config.load import load_config
from megasetup.config.runtime import RuntimeConfig, validate_and_set_config
from megasetup.config.schema import PolicyConfig
from megasetup.config.schema.describe import keys_of, section_in, type_at
from megasetup.config.validate import examine_file
from megasetup.config.value_model import make_policy_like_config

FOLDER = Path(__file__).parents[1] / "configs"

MODELS = {
    "dense": "dense",
    "moe": "moe",
    "vlm": "vision",
    "fp8": "dense",
    "lora": "dense",
    "ppo_value": "dense",
    "colocated_megatron": "dense",
    "sglang": "dense",
}
"""The kind of model that each file is resolved with."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_hf_folder(kind, folder / kind) for kind in set(MODELS.values())}


@pytest.fixture
def load(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    # (attention_backend and colocated generation change the environment)
    for name in ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)

    def load_example(name: str, *overrides: str) -> dict[str, Any]:
        monkeypatch.setenv("MEGASETUP_TEST_MODEL", models[MODELS[name]])
        return load_config(FOLDER / f"{name}.yaml", overrides).config

    return load_example


def build(policy: Mapping[str, Any]) -> RuntimeConfig:
    """What a policy comes to whose weights arrive in another way than from a checkpoint."""
    return validate_and_set_config(policy, 0, policy["model_name"], None, None, None, skip_weight_load=True)


def test_every_file_has_a_model() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} - {"base"} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_wrong_with_it(load: Any, name: str) -> None:
    findings = examine_file(load(name), strict=True)
    assert [str(problem) for problem in findings.problems] == []
    assert findings.warnings == []


@pytest.mark.parametrize("name", [name for name in MODELS if name != "ppo_value"])
def test_it_builds_into_a_container_that_bridge_accepts(load: Any, name: str) -> None:
    policy = load(name)["policy"]
    runtime = build(policy)
    container = runtime.megatron_cfg
    container.validate()
    assert runtime.dtype == torch.bfloat16
    assert runtime.final_padded_vocab_size == 1000
    assert container.model.bf16 is True
    assert container.model.params_dtype == torch.bfloat16
    assert container.optimizer.lr == 5e-6
    assert container.optimizer.clip_grad == 1.0
    assert container.ddp.overlap_param_gather is True
    assert container.train.train_iters == 10
    assert container.train.global_batch_size == 8
    assert container.scheduler.lr_warmup_iters == 2


def test_dense(load: Any) -> None:
    container = build(load("dense")["policy"]).megatron_cfg
    assert container.optimizer.optimizer_cpu_offload is True
    assert container.optimizer.optimizer_offload_fraction == 1.0
    assert container.optimizer.overlap_cpu_optimizer_d2h_h2d is True
    assert (container.model.recompute_granularity, container.model.recompute_method) == ("full", "uniform")
    assert container.checkpoint.ckpt_assume_constant_structure is True


def test_moe(load: Any) -> None:
    model = build(load("moe")["policy"]).megatron_cfg.model
    assert (model.num_moe_experts, model.moe_router_topk) == (8, 2)
    assert model.moe_router_dtype == "fp64"
    assert model.moe_token_dispatcher_type == "alltoall"
    assert model.moe_router_load_balancing_type == "none"
    assert model.moe_enable_routing_replay is True
    assert model.recompute_modules == ["core_attn", "moe_act"]


def test_vision_language_model(load: Any) -> None:
    model = build(load("vlm")["policy"]).megatron_cfg.model
    assert type(model).__name__ == "Qwen25VLModelProvider"
    assert (model.freeze_vision_model, model.freeze_vision_projection) == (True, False)


def test_fp8(load: Any) -> None:
    container = build(load("fp8")["policy"]).megatron_cfg
    assert (container.model.fp8, container.model.fp8_recipe, container.model.fp8_param) == ("e4m3", "blockwise", True)
    assert container.ddp.fp8_param_gather is True
    assert container.ddp.reuse_grad_buf_for_mxfp8_param_ag is False


def test_ppo_value_model(load: Any) -> None:
    config = load("ppo_value")
    policy = make_policy_like_config(config["value"])
    runtime = build(policy)
    runtime.megatron_cfg.validate()
    assert runtime.megatron_cfg.optimizer.lr == 1e-5
    assert runtime.sampling_params is None
    assert build(config["policy"]).megatron_cfg.optimizer.lr == 5e-6


def test_colocated_generation_by_megatron(load: Any) -> None:
    runtime = build(load("colocated_megatron")["policy"])
    assert runtime.is_generation_colocated is True
    assert runtime.sampling_params == (20, 0.95, 0.8)
    assert runtime.offload_optimizer_for_refit is False
    assert runtime.megatron_cfg.model.use_te_rng_tracker is True


def test_sglang(load: Any) -> None:
    runtime = build(load("sglang")["policy"])
    assert runtime.is_generation_colocated is False
    assert runtime.sampling_params == (None, 1.0, 1.0)
    assert runtime.megatron_cfg.model.use_te_rng_tracker is False


@pytest.mark.parametrize("name", MODELS)
def test_the_check_command_finds_it_right_and_leaves_no_trace(
    models: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MEGASETUP_TEST_MODEL", models[MODELS[name]])
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    before = dict(os.environ)
    check = examine(FOLDER / f"{name}.yaml", (), strict=True)
    assert (check.problems, check.warnings, check.remarks) == ([], [], [])
    assert [model.name for model in check.models] == (["policy", "value"] if name == "ppo_value" else ["policy"])
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", "")
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class _Recording(Mapping[str, Any]):
    """A config that remembers which keys were asked for, present or not."""

    def __init__(self, values: Mapping[str, Any], path: tuple[str, ...], asked: set[tuple[str, ...]]) -> None:
        self._values, self._path, self._asked = values, path, asked

    def __getitem__(self, key: str) -> Any:
        self._asked.add((*self._path, key))
        value = self._values[key]
        return _Recording(value, (*self._path, key), self._asked) if isinstance(value, Mapping) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


# With everything present that a file may have, so that the keys inside are asked for too.
_MORE = (
    "+policy.generation={backend: megatron, colocated: {enabled: true}, mcore_generation_config: {max_tokens: 8}}",
    "+policy.reward_model_cfg={enabled: false}",
    "+policy.pretrained_checkpoint={path: nowhere, format: megatron_lm}",
    "+policy.draft={enabled: false}",
    "+policy.megatron_cfg.fine_grained_activation_offloading=false",
    "+policy.megatron_cfg.peft={enabled: false}",
    "+policy.megatron_cfg.fp8_cfg={enabled: false}",
    "+policy.megatron_cfg.model_overrides={}",
    "+policy.hf_config_overrides={}",
)


@pytest.mark.parametrize(("name", "overrides"), [(name, ()) for name in MODELS] + [("dense", _MORE)])
def test_every_key_that_is_read_is_in_the_schema(load: Any, name: str, overrides: tuple[str, ...]) -> None:
    asked: set[tuple[str, ...]] = set()
    policy = _Recording(load(name, *overrides)["policy"], (), asked)
    build(policy)
    with contextlib.suppress(FileNotFoundError):  # (the checkpoint of the last case is nowhere)
        validate_model_paths(policy)
    assert ("megatron_cfg", "tensor_model_parallel_size") in asked
    assert ("megatron_cfg", "optimizer", "lr") in asked
    assert ("pretrained_checkpoint",) in asked
    unknown = set()
    for *inner, key in asked:
        section = section_in(type_at(PolicyConfig, inner))
        if section is not None and key not in keys_of(section):
            unknown.add(".".join((*inner, key)))
    assert unknown == set()
