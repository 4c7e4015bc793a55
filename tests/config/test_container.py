"""The ConfigContainer: what one part decides for another, and the checks that need several parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bridge_providers import changes, policy, provider

from megasetup.compat.bridge import import_bridge
from megasetup.config.checkpoint import create_checkpoint_config
from megasetup.config.container import create_megatron_config, validate_training_config
from megasetup.config.precision import apply_precision_config

BF16 = {"optimizer": {"bf16": True, "lr": 1e-5, "min_lr": 0.0}}


def _container(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, fp8_param: bool = False) -> Any:
    model_cfg = provider()
    apply_precision_config(model_cfg, config, dtype)
    checkpoint = create_checkpoint_config(None, None, None)
    return create_megatron_config(model_cfg, checkpoint, config, "some/model", dtype, fp8_param)


class TestTrainingCheck:
    """train_iters is needed; the loss is per token, and parameters are initialised."""

    def test_it_sets_what_training_needs(self) -> None:
        model_cfg = provider()
        model_cfg.perform_initialization = False
        validate_training_config(policy(train_iters=5), model_cfg)
        assert changes(model_cfg) == {"calculate_per_token_loss": True}
        assert model_cfg.perform_initialization is True

    @pytest.mark.parametrize(("settings", "found"), [({}, "missing"), ({"train_iters": None}, "None")])
    def test_no_train_iters(self, settings: dict[str, Any], found: str) -> None:
        with pytest.raises(AssertionError, match=rf"policy\.megatron_cfg\.train_iters is {found}: must be") as raised:
            validate_training_config(policy(**settings), provider())
        assert isinstance(raised.value, ValueError)


def test_the_parts() -> None:
    container = _container(policy(train_iters=7, **BF16) | {"train_global_batch_size": 8, "train_micro_batch_size": 2})
    assert isinstance(container, import_bridge("megatron.bridge.training.config").ConfigContainer)
    assert (container.train.train_iters, container.train.global_batch_size, container.train.micro_batch_size) == (
        7,
        8,
        2,
    )
    assert (container.tokenizer.tokenizer_type, container.tokenizer.tokenizer_model) == (
        "HuggingFaceTokenizer",
        "some/model",
    )
    assert container.dataset is None
    assert (container.ddp.average_in_collective, container.ddp.check_for_nan_in_grad) == (False, True)
    assert container.checkpoint.save_interval == 100


@pytest.mark.parametrize("section", ["sequence_packing", "dynamic_batching"])
def test_batches_that_are_cut_by_tokens_have_no_number_of_samples(section: str) -> None:
    config = policy(train_iters=7, **BF16) | {"train_global_batch_size": 9, "train_micro_batch_size": 2}
    assert _container(config | {section: {"enabled": True}}).train.micro_batch_size == 1
    assert _container(config | {section: {"enabled": False}}).train.micro_batch_size == 2


def test_overlap_and_the_distributed_optimizer_are_the_same_in_ddp_and_optimizer() -> None:
    container = _container(
        policy(
            train_iters=7,
            optimizer={"bf16": True, "use_distributed_optimizer": True},
            distributed_data_parallel_config={"overlap_param_gather": True},
        )
    )
    assert (container.ddp.overlap_param_gather, container.optimizer.overlap_param_gather) == (True, True)
    assert (container.ddp.use_distributed_optimizer, container.optimizer.use_distributed_optimizer) == (True, True)


@pytest.mark.parametrize(
    ("recipe", "param", "gather", "reuse"),
    [("mxfp8", True, True, True), ("mxfp8", False, False, False), ("blockwise", True, True, False)],
)
def test_what_fp8_decides(recipe: str, param: bool, gather: bool, reuse: bool) -> None:
    fp8 = {"enabled": True, "fp8": "e4m3", "fp8_recipe": recipe, "fp8_param": param}
    container = _container(policy(train_iters=7, fp8_cfg=fp8, **BF16), fp8_param=param)
    assert container.ddp.fp8_param_gather is gather
    assert container.ddp.reuse_grad_buf_for_mxfp8_param_ag is reuse
    assert container.optimizer.reuse_grad_buf_for_mxfp8_param_ag is reuse
    assert container.optimizer.fp8_recipe == recipe


def test_without_fp8_nothing_of_it_is_set() -> None:
    fp8 = {"enabled": False, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}
    container = _container(policy(train_iters=7, fp8_cfg=fp8, **BF16))
    assert (container.ddp.fp8_param_gather, container.ddp.reuse_grad_buf_for_mxfp8_param_ag) == (False, False)
    assert container.optimizer.fp8_recipe is None


@pytest.mark.parametrize("value", [True, False])
def test_gloo_groups_only_if_present(value: bool) -> None:
    default = import_bridge("megatron.bridge.training.config").DistributedInitConfig().use_gloo_process_groups
    assert _container(policy(train_iters=7, **BF16)).dist.use_gloo_process_groups is default
    container = _container(policy(train_iters=7, use_gloo_process_groups=value, **BF16))
    assert container.dist.use_gloo_process_groups is value


def test_trust_remote_code_reaches_the_tokenizer() -> None:
    container = _container(policy(train_iters=7, trust_remote_code=True, **BF16))
    assert container.tokenizer.hf_tokenizer_kwargs == {"trust_remote_code": True}


def test_fused_linear_logprobs_and_overlapped_gathering() -> None:
    config = policy(
        train_iters=7, use_fused_linear_logprobs=True, distributed_data_parallel_config={"overlap_param_gather": True}
    )
    with pytest.raises(AssertionError, match="overlap_param_gather is True: must be false"):
        _container(config)


def test_flags_that_do_not_agree_with_the_dtype() -> None:
    config = policy(
        train_iters=7,
        optimizer={"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, "fp16": True},
    )
    with pytest.raises(AssertionError, match="2 problems"):
        _container(config)


def test_problems_of_all_parts_come_together() -> None:
    config = policy(
        optimizer={"rate": 1},
        scheduler={"decay": 1},
        distributed_data_parallel_config={"overlap": True, "average_in_collective": True},
        fp8_cfg={"enabled": True, "fp8": "e4m3", "fp8_param": False},
    )
    with pytest.raises(ValueError, match="5 problems") as raised:
        _container(config)
    assert isinstance(raised.value, AttributeError)
    assert isinstance(raised.value, KeyError)


@pytest.mark.parametrize("offload", [True, False])
def test_bridge_finds_nothing_to_mend(offload: bool) -> None:
    config = policy(
        train_iters=7,
        optimizer=BF16["optimizer"]
        | {
            "use_distributed_optimizer": True,
            "optimizer_cpu_offload": offload,
            "optimizer_offload_fraction": 1.0 if offload else 0.0,
            "use_precision_aware_optimizer": offload,
        },
        scheduler={"lr_warmup_iters": 2},
        distributed_data_parallel_config={"overlap_grad_reduce": True, "overlap_param_gather": True},
    ) | {"train_global_batch_size": 8, "train_micro_batch_size": 2}
    container = _container(config)
    container.validate()
    assert (container.scheduler.lr_decay_steps, container.scheduler.lr_warmup_steps) == (7 * 8, 2 * 8)
    assert container.ddp.overlap_param_gather is container.optimizer.overlap_param_gather is True
