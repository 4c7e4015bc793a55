"""The seed's name and signature, and what it does and leaves."""

from __future__ import annotations

import inspect
import logging

import pytest

pytest.importorskip("megatron.core")

from standins import Block, assert_exact, bits, chain, copies_of, distributed_over, load_new_weights

from megasetup.nemo_rl import _force_sync_optimizer_fp32_from_model


def test_signature() -> None:
    assert list(inspect.signature(_force_sync_optimizer_fp32_from_model).parameters) == ["optimizer", "model"]


@pytest.mark.parametrize("precision_aware", [False, True])
def test_all_levels_hold_the_loaded_weights(precision_aware: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    optimizer = distributed_over([model], precision_aware=precision_aware)
    load_new_weights(model)
    with caplog.at_level(logging.INFO, logger="megasetup"):
        assert _force_sync_optimizer_fp32_from_model(chain(optimizer), [model]) is None
    assert_exact(optimizer)
    (record,) = caplog.records
    assert record.name == "megasetup"
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("refreshed 5 weights (287 elements)")


def test_sub_optimizers_without_a_hybrid_optimizer_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    offloaded, plain = Block(), Block()
    optimizer = distributed_over([offloaded])
    other = distributed_over([plain], fraction=None)
    load_new_weights(offloaded, plain)
    before = bits(*copies_of(other))
    with caplog.at_level(logging.INFO, logger="megasetup"):
        _force_sync_optimizer_fp32_from_model(optimizer=chain(optimizer, other), model=[offloaded, plain])
    assert bits(*copies_of(other)) == before
    assert_exact(optimizer)
    assert "untouched: optimizer.chained_optimizers[1]" in caplog.text


def test_no_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megasetup"):
        _force_sync_optimizer_fp32_from_model(None, Block())
    assert "no optimizer" in caplog.text


def test_another_object_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="pass a Megatron optimizer"):
        _force_sync_optimizer_fp32_from_model(object(), None)
