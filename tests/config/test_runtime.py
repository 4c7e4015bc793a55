"""From a policy config to the RuntimeConfig, on real providers: from a Hugging Face folder and from run_config.yaml."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bridge_providers import provider, write_hf_folder

from megasetup.compat.bridge import import_bridge
from megasetup.config.provider import provider_from_hf
from megasetup.config.runtime import RuntimeConfig, SamplingParams, validate_and_set_config
from megasetup.config.setup import setup_model_config

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e6,
    "original_max_position_embeddings": 128,
    "truncate": True,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_hf_folder("dense", tmp_path_factory.mktemp("hf"))


def base(**megatron_cfg: Any) -> dict[str, Any]:
    """The least that sets a policy up."""
    return {
        "precision": "bfloat16",
        "train_global_batch_size": 8,
        "megatron_cfg": {
            "train_iters": 5,
            # (what this machine cannot do without Transformer Engine)
            "gradient_accumulation_fusion": False,
            "optimizer": {"lr": 1e-5, "min_lr": 0.0, "bf16": True},
            **megatron_cfg,
        },
    }


Write = Callable[..., str]


@pytest.fixture
def write_checkpoint(hf_folder: str, tmp_path: Path) -> Write:
    """Writes the run_config.yaml that Bridge saves with a checkpoint, and returns the checkpoint's folder."""

    def write(name: str = "checkpoint", iteration: str | None = "iter_0000000", **fields: Any) -> str:
        container, model_cfg = setup_model_config(base(), 0, torch.bfloat16, hf_folder, None, skip_weight_load=True)
        for field, value in fields.items():
            setattr(model_cfg, field, value)
        folder = tmp_path / name
        target = folder if iteration is None else folder / iteration
        target.mkdir(parents=True)
        container.to_yaml(str(target / "run_config.yaml"))
        return str(folder)

    return write


def run(config: dict[str, Any], hf_folder: str, **arguments: Any) -> RuntimeConfig:
    return validate_and_set_config(config, 0, hf_folder, None, None, None, skip_weight_load=True, **arguments)


class TestRuntimeConfig:
    """What the trainer learns."""

    def test_fields_in_their_order(self) -> None:
        assert RuntimeConfig._fields == (
            "megatron_cfg",
            "model_cfg",
            "dtype",
            "optimizer_cpu_offload",
            "offload_optimizer_for_logprob",
            "offload_optimizer_for_refit",
            "is_generation_colocated",
            "sampling_params",
            "final_padded_vocab_size",
        )

    def test_defaults(self, hf_folder: str) -> None:
        runtime = run(base(), hf_folder)
        assert isinstance(runtime.megatron_cfg, import_bridge("megatron.bridge.training.config").ConfigContainer)
        assert runtime.megatron_cfg.model is runtime.model_cfg
        assert runtime.dtype is torch.bfloat16
        assert (runtime.optimizer_cpu_offload, runtime.offload_optimizer_for_logprob) == (False, False)
        assert runtime.offload_optimizer_for_refit is True
        assert (runtime.is_generation_colocated, runtime.sampling_params) == (None, None)

    @pytest.mark.parametrize(
        ("precision", "dtype"),
        [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
    )
    def test_precision(self, hf_folder: str, precision: str, dtype: torch.dtype) -> None:
        config = base(optimizer={"bf16": precision == "bfloat16", "fp16": precision == "float16"})
        runtime = run(config | {"precision": precision}, hf_folder)
        assert runtime.dtype is runtime.model_cfg.params_dtype is dtype

    def test_offloading(self, hf_folder: str) -> None:
        offloading = {
            "bf16": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "use_distributed_optimizer": True,
        }
        config = base(optimizer=offloading)
        runtime = run(config | {"offload_optimizer_for_logprob": True, "offload_optimizer_for_refit": False}, hf_folder)
        assert (runtime.optimizer_cpu_offload, runtime.offload_optimizer_for_logprob) == (True, True)
        assert runtime.offload_optimizer_for_refit is False

    @pytest.mark.parametrize("colocated", [True, False])
    def test_generation(self, hf_folder: str, colocated: bool) -> None:
        generation = {"colocated": {"enabled": colocated}, "top_k": 20, "top_p": 0.9, "temperature": 0.7}
        runtime = run(base() | {"generation": generation}, hf_folder)
        assert runtime.is_generation_colocated is colocated
        assert runtime.sampling_params == SamplingParams(top_k=20, top_p=0.9, temperature=0.7)

    def test_generation_that_samples_from_everything(self, hf_folder: str) -> None:
        runtime = run(base() | {"generation": {"colocated": {"enabled": True}, "top_k": None}}, hf_folder)
        assert runtime.sampling_params == SamplingParams(top_k=None, top_p=1.0, temperature=1.0)

    def test_generation_that_does_not_say_where(self, hf_folder: str) -> None:
        with pytest.raises(KeyError) as raised:
            run(base() | {"generation": {"backend": "vllm"}}, hf_folder)
        assert "policy.generation.colocated is missing: must be given" in str(raised.value)

    @pytest.mark.parametrize(("size", "rows"), [(1, 1008), (2, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024)])
    def test_padded_vocabulary(self, hf_folder: str, size: int, rows: int) -> None:
        # 1000 tokens, in multiples of 16 times the tensor-parallel size
        config = base(
            tensor_model_parallel_size=size,
            sequence_parallel=False,
            model_overrides={
                "make_vocab_size_divisible_by": 16,
                "num_attention_heads": 64,
                "num_query_groups": 64,
                "kv_channels": 4,
            },
        )
        assert run(config, hf_folder).final_padded_vocab_size == rows


class TestRejections:
    """What is not set up at all."""

    @pytest.mark.parametrize("settings", [{}, {"sequence_parallel": False}])
    def test_inference_optimized_with_tensor_and_no_sequence_parallelism(
        self, hf_folder: str, settings: dict[str, Any]
    ) -> None:
        config = base(transformer_impl="inference_optimized", tensor_model_parallel_size=2, **settings)
        with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.sequence_parallel is .*: must be true") as raised:
            run(config, hf_folder)
        assert isinstance(raised.value, AssertionError)

    def test_reward_models(self, hf_folder: str) -> None:
        with pytest.raises(NotImplementedError, match=r"policy\.reward_model_cfg\.enabled is True: must be false"):
            run(base() | {"reward_model_cfg": {"enabled": True}}, hf_folder)

    @pytest.mark.parametrize("config", [[], "text", None, 3])
    def test_what_is_no_mapping(self, hf_folder: str, config: Any) -> None:
        with pytest.raises(TypeError, match=r"policy is .*: must be a mapping"):
            run(config, hf_folder)

    def test_problems_of_all_concerns_come_together(self, hf_folder: str) -> None:
        config = base(
            context_parallel_size=2,
            activation_checkpointing="half",
            pipeline_dtype="half",
            freeze_vision_model=True,
            model_overrides={"bf16": True, "nope": 1},
            optimizer={"bf16": True, "overlap_cpu_optimizer_d2h_h2d": True, "rate": 1, "lr": "1e-5"},
            peft={"enabled": True, "dim": 4, "alpha": 8, "rank": 4},
            checkpoint={"async_save": True},
        ) | {"precision": "bf16", "reward_model_cfg": {"enabled": True}, "logprob_chunk_size": 8, "generation": {}}
        del config["megatron_cfg"]["train_iters"]
        before = copy.deepcopy(config)
        with pytest.raises(ValueError, match="15 problems") as raised:
            run(config, hf_folder)
        for kind in (AssertionError, KeyError, AttributeError, NotImplementedError):
            assert isinstance(raised.value, kind)
        assert [problem.path.removeprefix("policy.") for problem in raised.value.problems] == [
            # the schema's
            "precision",
            "megatron_cfg.pipeline_dtype",
            "megatron_cfg.activation_checkpointing",
            "megatron_cfg.optimizer.lr",
            "generation.colocated",
            # the rules between settings
            "reward_model_cfg.enabled",
            "sequence_packing.enabled",
            "megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d",
            "megatron_cfg.defer_fp32_logits",
            "megatron_cfg.model_overrides.bf16",
            # what this model's provider and this Megatron have to say
            "megatron_cfg.model_overrides.nope",
            "megatron_cfg.freeze_vision_model",
            "megatron_cfg.peft.rank",
            "megatron_cfg.train_iters",
            "megatron_cfg.optimizer.rate",
        ]
        assert config == before


class TestProvider:
    """Where the provider comes from."""

    def test_from_the_folder_of_a_conversion(self, write_checkpoint: Write) -> None:
        path = write_checkpoint(ffn_hidden_size=192)
        container, model_cfg = setup_model_config(base(), 0, torch.bfloat16, "no/such/model", path)
        assert type(model_cfg).__name__ == "GPTModelProvider"
        assert (model_cfg.num_layers, model_cfg.ffn_hidden_size) == (4, 192)
        assert container.checkpoint.pretrained_checkpoint == path

    def test_from_an_iteration_of_a_megatron_bridge_checkpoint(
        self, write_checkpoint: Write, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_checkpoint(iteration=None, ffn_hidden_size=192)
        config = base() | {"pretrained_checkpoint": {"path": path, "format": "megatron_bridge"}}
        _, model_cfg = setup_model_config(config, 0, torch.bfloat16, "no/such/model", path)
        assert model_cfg.ffn_hidden_size == 192
        assert "hf_config_overrides" not in caplog.text

    def test_hugging_face_overrides_of_a_megatron_bridge_checkpoint_are_ignored_with_a_warning(
        self, write_checkpoint: Write, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_checkpoint(iteration=None)
        config = base() | {
            "pretrained_checkpoint": {"path": path, "format": "megatron_bridge"},
            "hf_config_overrides": {"num_hidden_layers": 2},
        }
        with caplog.at_level(logging.WARNING, logger="megasetup"):
            _, model_cfg = setup_model_config(config, 0, torch.bfloat16, "no/such/model", path)
        assert model_cfg.num_layers == 4
        assert "policy.hf_config_overrides are ignored" in caplog.text

    def test_megatron_lm_takes_the_hugging_face_architecture(self, hf_folder: str, tmp_path: Path) -> None:
        config = base() | {
            "pretrained_checkpoint": {"path": str(tmp_path), "format": "megatron_lm"},
            "hf_config_overrides": {"num_hidden_layers": 2},
        }
        container, model_cfg = setup_model_config(config, 0, torch.bfloat16, hf_folder, str(tmp_path))
        assert model_cfg.num_layers == 2
        assert container.checkpoint.pretrained_checkpoint == str(tmp_path)

    def test_nested_hugging_face_overrides_reach_the_provider_and_stay_as_they_are(
        self, hf_folder: str, tmp_path: Path
    ) -> None:
        config = base() | {
            "pretrained_checkpoint": {"path": str(tmp_path), "format": "megatron_lm"},
            "hf_config_overrides": {"rope_scaling": dict(YARN)},
        }
        before = copy.deepcopy(config)
        _, model_cfg = setup_model_config(config, 0, torch.bfloat16, hf_folder, str(tmp_path))
        assert (model_cfg.position_embedding_type, model_cfg.yarn_rotary_scaling_factor) == ("yarn", 4.0)
        assert config == before

    def test_a_missing_run_config_names_the_rank_and_the_usual_cause(self, hf_folder: str, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as raised:
            setup_model_config(base(), 3, torch.bfloat16, hf_folder, str(tmp_path))
        assert f"rank 3 finds no {tmp_path}/iter_0000000/run_config.yaml" in str(raised.value)
        assert "not mounted" in str(raised.value)

    def test_a_loader_that_fails_gets_a_note(self, hf_folder: str, write_checkpoint: Write) -> None:
        path = write_checkpoint()
        file = Path(path, "iter_0000000", "run_config.yaml")
        run_config = yaml.safe_load(file.read_text())
        run_config["model"]["_target_"] = "megatron.bridge.models.gpt_provider.NoLongerThere"
        file.write_text(yaml.safe_dump(run_config))
        with pytest.raises(Exception, match="NoLongerThere") as raised:
            setup_model_config(base(), 0, torch.bfloat16, hf_folder, path)
        assert "older Megatron-Bridge: delete" in raised.value.__notes__[0]
        assert path in raised.value.__notes__[0]

    def test_bridge_s_migrations_run(self, hf_folder: str, write_checkpoint: Write) -> None:
        path = write_checkpoint()
        file = Path(path, "iter_0000000", "run_config.yaml")
        run_config = yaml.safe_load(file.read_text())
        run_config["model"] |= {"moe_flex_dispatcher_num_sms": None, "moe_deepep_num_sms": 20}
        file.write_text(yaml.safe_dump(run_config))
        _, model_cfg = setup_model_config(base(), 0, torch.bfloat16, hf_folder, path)
        assert (model_cfg.moe_flex_dispatcher_num_sms, model_cfg.moe_deepep_num_sms) == (20, None)

    def test_no_path_is_a_value_error(self, hf_folder: str) -> None:
        with pytest.raises(ValueError, match="pretrained_path is None"):
            setup_model_config(base(), 0, torch.bfloat16, hf_folder, None)

    @pytest.mark.parametrize("path", [None, "/no/such/folder"])
    def test_skipping_the_load_reads_no_checkpoint(self, hf_folder: str, path: str | None) -> None:
        container, model_cfg = setup_model_config(base(), 0, torch.bfloat16, hf_folder, path, skip_weight_load=True)
        assert model_cfg.num_layers == 4
        assert container.checkpoint.pretrained_checkpoint is None

    def test_skipping_the_load_with_asynchronous_saving(self, hf_folder: str) -> None:
        config = base(checkpoint={"async_save": True})
        container, _ = setup_model_config(config, 0, torch.bfloat16, hf_folder, None, skip_weight_load=True)
        assert (container.checkpoint.async_save, container.checkpoint.save) == (False, None)


class TestFinalize:
    """A provider is finalized when nobody has done it since its fields were set."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        calls: list[str] = []
        kind = type(provider())
        for name in ("finalize", "__post_init__"):
            method = getattr(kind, name)
            monkeypatch.setattr(kind, name, lambda self, n=name, m=method: (calls.append(n), m(self))[1])
        return calls

    def test_not_for_a_checkpoint(self, hf_folder: str, write_checkpoint: Write, calls: list[str]) -> None:
        path = write_checkpoint()
        calls.clear()
        setup_model_config(base(), 0, torch.bfloat16, hf_folder, path)
        assert calls == ["__post_init__", "__post_init__"]  # (the first when Bridge's loader makes the object)

    def test_for_a_checkpoint_with_overrides(self, hf_folder: str, write_checkpoint: Write, calls: list[str]) -> None:
        path = write_checkpoint()
        calls.clear()
        config = base(model_overrides={"ffn_hidden_size": None})
        _, model_cfg = setup_model_config(config, 0, torch.bfloat16, hf_folder, path)
        assert calls[-2:] == ["finalize", "__post_init__"]
        assert model_cfg.ffn_hidden_size == 4 * model_cfg.hidden_size  # (what finalize derives)

    def test_for_megatron_lm(self, hf_folder: str, tmp_path: Path, calls: list[str]) -> None:
        config = base() | {"pretrained_checkpoint": {"path": str(tmp_path), "format": "megatron_lm"}}
        setup_model_config(config, 0, torch.bfloat16, hf_folder, str(tmp_path))
        assert calls[-2:] == ["finalize", "__post_init__"]


MEGATRON_ASSERTS = pytest.mark.skipif(not __debug__, reason="Megatron checks it with an assert, which -O removes")


class TestRefusals:
    """What Megatron itself does not take is said in the words of the config."""

    @pytest.mark.parametrize(
        ("settings", "path", "found", "text"),
        [
            # (of 4 heads)
            ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size", 3, "must be a multiple of"),
            # (a KeyError of the value alone)
            ({"cuda_graph_impl": "local", "cuda_graph_modules": "nope"}, "cuda_graph_modules", "nope", "nope"),
            pytest.param(
                {"activation_checkpointing": "selective", "recompute_modules": ["x"]},
                "recompute_modules",
                ["x"],
                "x",
                marks=MEGATRON_ASSERTS,
            ),
            ({"num_layers_in_first_pipeline_stage": 7}, "", "refused", "middle layers"),
            # (a bare assert)
            pytest.param(
                {"transformer_impl": "inference_optimized", "model_overrides": {"add_qkv_bias": True}},
                "model_overrides.add_qkv_bias",
                True,
                "assert not self.add_qkv_bias",
                marks=MEGATRON_ASSERTS,
            ),
        ],
    )
    def test_the_key_is_named(self, hf_folder: str, settings: Any, path: str, found: Any, text: str) -> None:
        with pytest.raises(ValueError, match="Megatron says of ") as raised:
            setup_model_config(base(**settings), 0, torch.bfloat16, hf_folder, None, skip_weight_load=True)
        (problem,) = raised.value.problems
        assert problem.path == f"policy.megatron_cfg.{path}".rstrip(".")
        assert problem.found == found
        assert text in problem.remedy
        assert raised.value.__cause__ is not None

    def test_settings_of_a_wrong_type(self, hf_folder: str) -> None:
        config = base(model_overrides={"num_attention_heads": "many"})
        with pytest.raises(TypeError, match="Megatron says of ") as raised:
            run(config, hf_folder)
        assert isinstance(raised.value, ValueError)


class TestModelName:
    """A model that is not there is said to be so, at once and beside all else that is wrong."""

    @pytest.mark.parametrize("name", ["", "/nowhere/model", "./nowhere", "~/nowhere"])
    def test_a_folder_that_is_not_there(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"policy\.model_name is '.*': must be a Hugging Face id or a folder"):
            run(base(), name)

    def test_a_folder_without_an_architecture(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"must be a folder with a config\.json: this one has none"):
            run(base(), str(tmp_path))

    def test_beside_other_problems(self) -> None:
        with pytest.raises(ValueError, match="2 problems") as raised:
            run(base() | {"precision": "half"}, "/nowhere/model")
        assert [problem.path for problem in raised.value.problems] == ["policy.precision", "policy.model_name"]

    def test_an_architecture_that_bridge_does_not_know(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
        with pytest.raises(ValueError, match=r"policy\.model_name is .*: cannot be made a Megatron model: "):
            run(base(), str(tmp_path))


def test_a_missing_checkpoint_beside_a_wrong_config(hf_folder: str, tmp_path: Path) -> None:
    config = base() | {"precision": "half"}
    with pytest.raises(ValueError, match=r"policy\.precision is 'half'") as raised:
        validate_and_set_config(config, 0, hf_folder, str(tmp_path), None, None)
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_unknown_keys_are_warned_of_once(hf_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    config = base(tensor_parallel_size=2)
    for rank in (0, 1):
        with caplog.at_level(logging.WARNING, "megasetup"):
            validate_and_set_config(config, rank, hf_folder, None, None, None, skip_weight_load=True)
    said = [message for message in caplog.messages if "tensor_parallel_size" in message]
    assert said == [
        "policy.megatron_cfg.tensor_parallel_size is 2: not a known key; did you mean "
        "policy.megatron_cfg.tensor_model_parallel_size?"
    ]


FP8 = {"enabled": True, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}


class TestMainParams:
    """Master weights come from the checkpoint only for FP8 parameters on a fresh run."""

    def load(self, hf_folder: str, path: str | None, fp8: Any, weights: Any, optimizer: Any, **arguments: Any) -> bool:
        container, _ = setup_model_config(
            base(fp8_cfg=fp8), 0, torch.bfloat16, hf_folder, path, weights, optimizer, **arguments
        )
        loads: bool = container.checkpoint.load_main_params_from_ckpt
        return loads

    @pytest.mark.parametrize(
        ("fp8", "weights", "optimizer", "loads"),
        [
            (FP8, None, None, True),
            (FP8 | {"fp8_param": False}, None, None, False),
            (FP8 | {"enabled": False}, None, None, False),
            (None, None, None, False),
            (FP8, "/weights", None, False),
            (FP8, None, "/optimizer", False),
            (FP8, "/weights", "/optimizer", False),
        ],
    )
    def test_with_a_checkpoint(
        self, hf_folder: str, write_checkpoint: Write, fp8: Any, weights: Any, optimizer: Any, loads: bool
    ) -> None:
        assert self.load(hf_folder, write_checkpoint(), fp8, weights, optimizer) is loads


def test_a_provider_s_settings_survive_where_the_config_says_nothing(hf_folder: str, write_checkpoint: Write) -> None:
    path = write_checkpoint(layernorm_epsilon=1e-3, moe_router_bias_update_rate=0.5, softmax_scale=0.25)
    _, model_cfg = setup_model_config(base(), 0, torch.bfloat16, hf_folder, path)
    assert (model_cfg.layernorm_epsilon, model_cfg.moe_router_bias_update_rate) == (1e-3, 0.5)
    _, model_cfg = setup_model_config(base(layernorm_epsilon=1e-6), 0, torch.bfloat16, hf_folder, path)
    assert (model_cfg.layernorm_epsilon, model_cfg.softmax_scale) == (1e-6, 0.25)


def test_the_container_passes_bridge_s_own_validation(hf_folder: str) -> None:
    config = base(scheduler={"lr_warmup_iters": 1}, tensor_model_parallel_size=1)
    runtime = run(config, hf_folder)
    runtime.megatron_cfg.validate()
    assert runtime.megatron_cfg.validation.eval_global_batch_size == 8


def test_no_environment_is_left_changed(hf_folder: str) -> None:
    before = dict(os.environ)
    run(base(), hf_folder)
    assert dict(os.environ) == before


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="needs no Transformer Engine")
def test_a_mixture_of_experts_can_be_set_up_without_transformer_engine(tmp_path: Path) -> None:
    folder = write_hf_folder("moe", tmp_path)
    assert provider_from_hf({}, folder).moe_permute_fusion is True  # (Bridge's default)
    megatron = {"train_iters": 1, "optimizer": {"bf16": True}}
    config = {"precision": "bfloat16", "megatron_cfg": megatron}
    _, provider = setup_model_config(config, 0, torch.bfloat16, folder, None, skip_weight_load=True)
    assert provider.moe_permute_fusion is False
    with pytest.raises(
        ValueError, match=r"policy\.megatron_cfg\.moe_permute_fusion is True: must be false: .* Transformer Engine"
    ):
        setup_model_config(
            config | {"megatron_cfg": {**megatron, "moe_permute_fusion": True}},
            0,
            torch.bfloat16,
            folder,
            None,
            skip_weight_load=True,
        )
