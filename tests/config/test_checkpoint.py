"""Bridge's CheckpointConfig: what is always so, what the paths decide, and what the config may choose."""

from __future__ import annotations

from typing import Any

import pytest
from bridge_providers import provider

from megasetup.compat.bridge import import_bridge
from megasetup.config.checkpoint import create_checkpoint_config

provider()  # (so that Bridge is imported before any test's clock runs)


def test_what_is_always_so() -> None:
    checkpoint = create_checkpoint_config("/pretrained", "/weights", "/optimizer")
    assert isinstance(checkpoint, import_bridge("megatron.bridge.training.config").CheckpointConfig)
    assert checkpoint.save_interval == 100
    assert (checkpoint.fully_parallel_save, checkpoint.fully_parallel_load) == (True, True)
    assert checkpoint.load_rng is False


def test_paths() -> None:
    checkpoint = create_checkpoint_config("/pretrained", "/weights", "/optimizer")
    assert (checkpoint.save, checkpoint.load, checkpoint.pretrained_checkpoint) == (
        "/weights",
        "/weights",
        "/pretrained",
    )
    fresh = create_checkpoint_config("/pretrained", None, None)
    assert (fresh.save, fresh.load, fresh.pretrained_checkpoint) == (None, None, "/pretrained")


@pytest.mark.parametrize(("optimizer_path", "loaded"), [("/optimizer", True), (None, False)])
def test_optimizer_state_is_loaded_only_from_a_path(optimizer_path: str | None, loaded: bool) -> None:
    assert create_checkpoint_config("/pretrained", "/weights", optimizer_path).load_optim is loaded


@pytest.mark.parametrize("load", [True, False])
def test_main_params(load: bool) -> None:
    checkpoint = create_checkpoint_config("/pretrained", None, None, load_main_params_from_ckpt=load)
    assert checkpoint.load_main_params_from_ckpt is load


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("async_save", True),
        ("async_save", False),
        ("ckpt_assume_constant_structure", True),
        ("ckpt_assume_constant_structure", False),
        ("ckpt_fully_parallel_save_process_group", "ep_dp"),
        ("ckpt_fully_parallel_load_process_group", "ep_dp"),
        ("ckpt_fully_parallel_load_exchange_algo", "gather_object"),
    ],
)
def test_a_key_is_forwarded_only_when_present(key: str, value: Any) -> None:
    default = getattr(import_bridge("megatron.bridge.training.config").CheckpointConfig(), key)
    assert getattr(create_checkpoint_config("/pretrained", "/weights", None), key) == default
    assert getattr(create_checkpoint_config("/pretrained", "/weights", None, ckpt_cfg={}), key) == default
    assert getattr(create_checkpoint_config("/pretrained", "/weights", None, False, {key: value}), key) == value


def test_asynchronous_saving_on_a_fresh_run_borrows_the_pretrained_path() -> None:
    checkpoint = create_checkpoint_config("/pretrained", None, None, ckpt_cfg={"async_save": True})
    assert (checkpoint.save, checkpoint.load) == ("/pretrained", None)
    resumed = create_checkpoint_config("/pretrained", "/weights", None, ckpt_cfg={"async_save": True})
    assert resumed.save == "/weights"
    synchronous = create_checkpoint_config("/pretrained", None, None, ckpt_cfg={"async_save": False})
    assert synchronous.save is None


def test_asynchronous_saving_without_any_path_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.checkpoint\.async_save is True: must be false where"):
        create_checkpoint_config(None, None, None, ckpt_cfg={"async_save": True})
