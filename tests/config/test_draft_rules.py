"""Which settings of a draft are refused, and which layers its hidden states come from."""

from __future__ import annotations

from typing import Any

import pytest

from megasetup.config.draft import aux_layers, default_aux_layers, draft_enabled, validate_draft_config
from megasetup.config.errors import ConfigError
from megasetup.config.validate import examine_policy


def config(draft: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"draft": {"enabled": True, **(draft or {})}, "megatron_cfg": {"enabled": True}, **changes}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 2, 3]), (7, [0, 3, 6]), (8, [1, 3, 4]), (36, [1, 17, 32])],
)
def test_default_layers_are_early_middle_and_late(layers: int, expected: list[int]) -> None:
    assert default_aux_layers(layers) == expected
    assert aux_layers(config(), layers) == expected


def test_chosen_layers_go_before_the_drafts_own() -> None:
    assert aux_layers(config(), 20, [5, 3]) == [3, 5]
    assert aux_layers(config({"aux_layer_indices": [9, 1]}), 20, [5, 3]) == [1, 9]


def test_layers_that_the_policy_lacks_are_named() -> None:
    with pytest.raises(ConfigError, match=r"policy\.draft\.aux_layer_indices is \[1, 20\]: .*0 to 19.*not \[20\]"):
        aux_layers(config({"aux_layer_indices": [1, 20]}), 20)
    with pytest.raises(ConfigError, match=r"policy\.draft\.model_name is \[30\]"):
        aux_layers(config(), 20, [30])


def test_a_plain_draft_passes() -> None:
    validate_draft_config(
        config({"loss_weight": 0.0, "num_layers": 2, "aux_layer_indices": [0, 3], "model_name": "a/b"})
    )
    assert draft_enabled(config())
    assert not draft_enabled({"draft": None})
    validate_draft_config({"draft": {"enabled": False, "loss_weight": -1.0}})


MEGATRON = "policy.megatron_cfg"


@pytest.mark.parametrize(
    ("found", "path", "kind"),
    [
        (config({"loss_weight": -0.1}), "policy.draft.loss_weight is -0.1", ValueError),
        (config({"loss_weight": float("inf")}), "policy.draft.loss_weight is inf", ValueError),
        (config({"aux_layer_indices": []}), "policy.draft.aux_layer_indices is []", ValueError),
        (config({"aux_layer_indices": [1, 1]}), "policy.draft.aux_layer_indices is [1, 1]", ValueError),
        (config({"aux_layer_indices": [-1]}), "policy.draft.aux_layer_indices is [-1]", ValueError),
        (config({"aux_layer_indices": "1"}), "policy.draft.aux_layer_indices is '1'", ValueError),
        (config(megatron_cfg={"enabled": False}), f"{MEGATRON}.enabled is False", AssertionError),
        (
            config(megatron_cfg={"context_parallel_size": 2}),
            f"{MEGATRON}.context_parallel_size is 2",
            NotImplementedError,
        ),
        (config(megatron_cfg={"cuda_graph_impl": "local"}), f"{MEGATRON}.cuda_graph_impl is 'local'", AssertionError),
        (
            config(megatron_cfg={"model_overrides": {"cuda_graph_impl": "local"}}),
            f"{MEGATRON}.model_overrides.cuda_graph_impl is 'local'",
            AssertionError,
        ),
        (
            config(megatron_cfg={"distributed_data_parallel_config": {"use_megatron_fsdp": True}}),
            f"{MEGATRON}.distributed_data_parallel_config.use_megatron_fsdp is True",
            AssertionError,
        ),
    ],
)
def test_what_is_refused(found: dict[str, Any], path: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as raised:
        validate_draft_config(found)
    assert isinstance(raised.value, ConfigError)
    assert str(raised.value).startswith(path)


def test_the_check_of_a_policy_reaches_it() -> None:
    findings = examine_policy(config({"loss_weight": -1.0, "aux_layer_indices": []}))
    problems = [str(problem) for problem in findings.problems]
    assert any(problem.startswith("policy.draft.loss_weight is -1.0") for problem in problems)
    assert any(problem.startswith("policy.draft.aux_layer_indices is []") for problem in problems)
