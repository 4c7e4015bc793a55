"""Megatron-Bridge's own setup with our refresh: what Bridge calls after a load, on stand-ins for its optimizers."""

from __future__ import annotations

import importlib.util
import inspect
import logging

import pytest

pytest.importorskip("megatron.core")

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from standins import Block, assert_exact, bits, chain, copies_of, distributed_over, load_new_weights, train_a_little

from megasetup.compat import bridge_sync
from megasetup.compat.bridge import import_bridge
from megasetup.masters import sync_master_weights

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)

NAME = "sync_hybrid_device_optimizer_fp32_master_copies"


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    """use_in_megatron_bridge() was called; undone afterwards."""
    for name in bridge_sync._HOLDERS:
        holder = import_bridge(name)
        monkeypatch.setattr(holder, NAME, getattr(holder, NAME))
    bridge_sync.use_in_megatron_bridge()


def after_load(optimizer: object) -> bool:
    """What Bridge's setup calls when it has loaded a checkpoint."""
    called: bool = getattr(import_bridge("megatron.bridge.training.setup"), NAME)(optimizer)
    return called


def test_bridge_setup_calls_it_by_that_name() -> None:
    source = inspect.getsource(import_bridge("megatron.bridge.training.setup").setup)
    assert f"{NAME}(optimizer)" in source


@pytest.mark.parametrize("precision_aware", [False, True])
def test_a_fine_tuning_load_becomes_exact(used: None, precision_aware: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    optimizer = distributed_over([model], precision_aware=precision_aware)
    load_new_weights(model)
    with caplog.at_level(logging.INFO, logger="megasetup"):
        assert after_load(chain(optimizer)) is True
    assert_exact(optimizer)
    assert "repaired" in caplog.text


def resumed() -> DistributedOptimizer:
    """An optimizer as a resume leaves it: masters more precise than the model."""
    model = Block()
    optimizer = distributed_over([model])
    load_new_weights(model)
    sync_master_weights(optimizer)
    train_a_little(optimizer)
    return optimizer


def test_a_resume_keeps_every_bit_of_the_masters(used: None) -> None:
    optimizer = resumed()
    before = bits(*copies_of(optimizer))
    assert after_load(chain(optimizer)) is True
    assert bits(*copies_of(optimizer)) == before


def test_bridges_own_sync_rounds_them() -> None:
    """Why ours is needed. When this fails, Bridge has mended it, and the file under test may go."""
    optimizer = resumed()
    before = bits(*copies_of(optimizer))
    assert after_load(chain(optimizer)) is True
    assert bits(*copies_of(optimizer)) != before


def test_without_an_offloaded_optimizer_there_is_nothing_to_do(used: None) -> None:
    assert after_load(None) is False
    assert after_load(chain(distributed_over([Block()], fraction=None))) is False


def test_twice_is_once(used: None) -> None:
    bridge_sync.use_in_megatron_bridge()
    for name in bridge_sync._HOLDERS:
        assert getattr(import_bridge(name), NAME) is bridge_sync._ensure


def test_a_bridge_without_the_hook_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(import_bridge("megatron.bridge.training.setup"), NAME)
    with pytest.raises(RuntimeError, match=r"call megasetup\.ensure_master_weights\(optimizer\) after its setup"):
        bridge_sync.use_in_megatron_bridge()
