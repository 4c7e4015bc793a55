"""What is done about torch's Adam before and after a load; real loads are in tests/model/test_flow_on_cpu.py.

DistributedOptimizer cannot be made without CUDA: these are of its class, made without its constructor.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer import distrib_optimizer

from megasetup.compat.optimizer_state import loading_state_of_torch_adam


@pytest.fixture(autouse=True)
def _no_fused_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)


def distributed(inner: Any) -> Any:
    made = distrib_optimizer.DistributedOptimizer.__new__(distrib_optimizer.DistributedOptimizer)
    made.optimizer = inner
    return made


def adam() -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5))], lr=0.1)


def test_another_optimizer_is_refused_by_name() -> None:
    optimizer = distributed(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
    with (
        pytest.raises(NotImplementedError, match=r"state of SGD.*optimizer\.optimizer must be adam"),
        loading_state_of_torch_adam(optimizer, [True]),
    ):
        pytest.fail("it was to be loaded")


def test_counts_of_steps_are_those_of_the_groups_and_no_two_are_one() -> None:
    inner, shared = adam(), torch.tensor(0.0)
    with loading_state_of_torch_adam(distributed(inner), [True]):
        assert [entry["step"].item() for entry in inner.state.values()] == [0.0, 0.0]
        inner.param_groups[0]["step"] = 7
        for entry in inner.state.values():
            entry["step"] = shared
    steps = [entry["step"] for entry in inner.state.values()]
    assert [step.item() for step in steps] == [7.0, 7.0]
    assert steps[0] is not steps[1]


def test_state_that_nothing_was_loaded_into_is_taken_away() -> None:
    inner = adam()
    with loading_state_of_torch_adam(distributed(inner), []):
        assert len(inner.state) == 2
    assert not inner.state


def test_a_rank_that_trains_none_of_the_parameters_has_nothing_to_load() -> None:
    """DistributedOptimizer is there all the same, without an optimizer."""
    inner = adam()
    chained = SimpleNamespace(chained_optimizers=[distributed(None), distributed(inner)])
    with loading_state_of_torch_adam(chained, [True]):
        assert len(inner.state) == 2
    with loading_state_of_torch_adam(distributed(None), []):
        pass


def test_with_a_fused_adam_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    inner = adam()
    with loading_state_of_torch_adam(distributed(inner), [True]):
        assert not inner.state
