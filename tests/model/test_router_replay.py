"""Routes for Megatron's own routers on the CPU: what each is told, what is refused, and when routes are dropped.

`torch.cuda.current_device`, by which Megatron chooses where router weights live, answers "cpu".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from router_replay_layouts import PIPELINE, SEQUENCE_EXPERT, check_layouts
from torch import nn

pytest.importorskip("megatron.core")

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from megasetup.model.router_replay import (
    UNRECORDED,
    build_replay_tensors,
    clear_router_replay,
    collate_routes,
    forget_routers_made_inside,
    moe_layers,
    replaying_routers,
    router_replay,
    set_router_replay,
)

EXPERTS, TOPK, WIDTH = 6, 2, 8


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with forget_routers_made_inside():
        yield


def make_config(**changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": WIDTH,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_layer_freq": [0, 1, 0, 1],
        "moe_ffn_hidden_size": WIDTH,
        "moe_router_topk": TOPK,
        "moe_router_load_balancing_type": "none",
        "moe_enable_routing_replay": True,
        "add_bias_linear": False,
        "cuda_graph_modules": [],
    }
    return TransformerConfig(**(settings | changes))


def make_model(layers: tuple[int, ...] = (1, 3), *, is_mtp_layer: bool = False, **changes: Any) -> nn.Sequential:
    """Routers of these layers, counted from 0."""
    groups = ProcessGroupCollection(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    config = make_config(**changes)
    routers = []
    torch.manual_seed(3)
    for layer in layers:
        router = TopKRouter(config, pg_collection=groups, is_mtp_layer=is_mtp_layer)
        router.set_layer_number(layer + 1)
        routers.append(router)
    return nn.Sequential(*routers)


def make_routes(batch: int = 2, sequence: int = 3, layers: int = 4, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch, sequence, layers, EXPERTS, generator=generator).topk(TOPK, -1).indices.to(dtype)


def chosen(router: nn.Module, hidden: torch.Tensor) -> list[set[int]]:
    """The experts that a router sends each token to."""
    _, routing_map = router(hidden)
    return [set(row.nonzero()[:, 0].tolist()) for row in routing_map]


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3]), ([0, 1, 0, 1], [1, 3]), ([0, 0, 0, 1], [3])],
)
def test_layers_with_experts(frequency: Any, expected: list[int]) -> None:
    assert moe_layers(make_config(moe_layer_freq=frequency)) == expected


def test_layers_with_experts_of_a_hybrid_model() -> None:
    config = make_config()
    config.hybrid_layer_pattern = "M*E|ME-E/MM"
    assert moe_layers(config) == [2, 4, 6]


def test_routes_of_several_sequences() -> None:
    first, second = make_routes(sequence=3)[0], make_routes(sequence=2)[1]
    routes = collate_routes([first, second], 5)
    assert routes.shape == (2, 5, 4, TOPK)
    assert routes.dtype == torch.int32
    assert torch.equal(routes[0, :3], first)
    assert torch.equal(routes[1, :2], second)
    assert (routes[0, 3:] == UNRECORDED).all()
    assert (routes[1, 2:] == UNRECORDED).all()


@pytest.mark.parametrize(
    ("recorded", "error", "message"),
    [
        ([], ValueError, "no recorded routes"),
        ([torch.zeros(6, 4, TOPK, dtype=torch.int32)], ValueError, r"sequence 0 have shape \(6, 4, 2\): .*up to 5"),
        ([torch.zeros(2, 4, 2, dtype=torch.int32), torch.zeros(2, 3, 2, dtype=torch.int32)], ValueError, "sequence 1"),
        ([torch.zeros(2, 4, TOPK, dtype=torch.uint8)], TypeError, "torch.uint8"),
    ],
)
def test_routes_that_do_not_collate(recorded: list[torch.Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collate_routes(recorded, 5)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("all_layers", [True, False])
def test_each_router_is_told_its_layer_in_megatrons_order(all_layers: bool, dtype: torch.dtype) -> None:
    model, routes = make_model((3,)), make_routes(dtype=dtype)
    given = routes if all_layers else routes[:, :, [1, 3]]
    ((router, told),) = build_replay_tensors(model, given)
    assert router is model[0]
    assert told.dtype == dtype
    # token by token, and of each the sequences of the batch
    assert told.tolist() == [routes[row, token, 3].tolist() for token in range(3) for row in range(2)]


def test_the_router_goes_where_it_is_told() -> None:
    model, routes = make_model(), make_routes()
    hidden = torch.randn(3, 2, WIDTH)
    own = [chosen(router, hidden) for router in model]
    set_router_replay(model, routes)
    for router, layer in zip(model, (1, 3), strict=True):
        told = [set(routes[row, token, layer].tolist()) for token in range(3) for row in range(2)]
        assert chosen(router, hidden) == told
    assert [chosen(router, hidden) for router in model] != own
    clear_router_replay(model)
    assert [chosen(router, hidden) for router in model] == own


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_router_pre_softmax": True},
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_num_groups": 3, "moe_router_group_topk": 2},
    ],
)
def test_weights_and_gradients_of_the_routers_own_route_are_its_own(settings: dict[str, Any]) -> None:
    model = make_model((1,), **settings)
    (router,) = model
    hidden = torch.randn(3, 2, WIDTH)
    probabilities, routing_map = router(hidden)
    weights = torch.randn_like(probabilities)
    (expected,) = torch.autograd.grad((probabilities * weights).sum(), router.weight)
    routes = torch.full((2, 3, 4, TOPK), 0, dtype=torch.int32)
    routes[:, :, 1] = routing_map.nonzero()[:, 1].view(3, 2, TOPK).transpose(0, 1)
    set_router_replay(model, routes)
    replayed, replayed_map = router(hidden)
    assert torch.equal(replayed_map, routing_map)
    torch.testing.assert_close(replayed, probabilities)
    (found,) = torch.autograd.grad((replayed * weights).sum(), router.weight)
    torch.testing.assert_close(found, expected)


def test_a_token_without_a_route_goes_its_own_way() -> None:
    model, routes = make_model((1,)), make_routes()
    hidden = torch.randn(3, 2, WIDTH)
    own = chosen(model[0], hidden)
    routes[1, 2] = UNRECORDED
    routes[0, 0] = UNRECORDED
    set_router_replay(model, routes)
    told = [set(routes[row, token, 1].tolist()) for token in range(3) for row in range(2)]
    expected = [*own[:1], *told[1:5], *own[5:]]
    assert chosen(model[0], hidden) == expected


def test_layers_without_experts_may_hold_anything() -> None:
    routes = make_routes()
    routes[:, :, [0, 2]] = 99
    assert len(build_replay_tensors(make_model(), routes)) == 2


@pytest.mark.parametrize("fails", [True, False])
def test_a_block_clears_its_routes(fails: bool) -> None:
    model = make_model()
    with contextlib.suppress(KeyError), router_replay(model, make_routes()):
        assert model[0].router_replay.target_topk_idx is not None
        if fails:
            raise KeyError
    assert all(router.router_replay.target_topk_idx is None for router in model)
    assert all(router.router_replay.router_replay_action is None for router in model)


def test_clearing_one_model_leaves_the_other() -> None:
    first, second = make_model(), make_model()
    for model in (first, second):
        set_router_replay(model, make_routes())
    clear_router_replay(first)
    assert first[0].router_replay.target_topk_idx is None
    assert second[0].router_replay.target_topk_idx is not None
    clear_router_replay()
    clear_router_replay()
    assert second[0].router_replay.target_topk_idx is None
    assert second[0].router_replay.router_replay_action is None


def test_megatrons_list_forgets_what_a_block_made_even_when_it_fails() -> None:
    kept = make_model()

    def build_and_fail() -> None:
        with forget_routers_made_inside():
            make_model()
            assert len(RouterReplay.global_router_replay_instances) == 4
            raise KeyError

    with pytest.raises(KeyError):
        build_and_fail()
    assert RouterReplay.global_router_replay_instances == [router.router_replay for router in kept]


def test_routers_of_mtp_layers_are_left_alone() -> None:
    model = nn.Sequential(make_model((1,)), make_model((0,), is_mtp_layer=True))
    assert list(replaying_routers(model)) == [model[0][0]]
    set_router_replay(model, make_routes())
    assert model[1][0].router_replay.router_replay_action is None
    assert type(model[1][0].router_replay) is RouterReplay


def test_a_stage_without_experts_has_nothing_to_replay() -> None:
    set_router_replay(nn.Linear(2, 2), make_routes())
    clear_router_replay(nn.Linear(2, 2))


def test_recording_and_normal_routing_stay_megatrons() -> None:
    model = make_model((1,))
    hidden = torch.randn(3, 2, WIDTH)
    own = chosen(model[0], hidden)
    set_router_replay(model, make_routes())
    replay = model[0].router_replay
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    assert chosen(model[0], hidden) == own
    assert [set(row) for row in replay.get_recorded_indices().tolist()] == own


def _with(place: tuple[int, ...], value: Any) -> torch.Tensor:
    routes = make_routes()
    routes[place] = torch.tensor(value, dtype=routes.dtype)
    return routes


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (make_routes()[0], r"shape \(3, 4, 2\): expected \[batch, sequence, layers, top-k\]"),
        (make_routes()[..., :1], r"with the model's top-k of 2"),
        (make_routes(layers=3), r"has 3 layers: expected 4, all of the model's, or the 2 that have experts"),
        (_with((1, 2, 3), [4, 6]), r"batch row 1, token 2 of this rank's, layer 3 .* \[4, 6\]: .* experts 0 to 5"),
        (_with((0, 1, 1), [-2, 1]), r"\[-2, 1\]: the model has experts 0 to 5"),
        (_with((0, 1, 1), [5, 5]), r"\[5, 5\]: no expert is chosen twice"),
        (_with((0, 1, 1), [-1, 5]), r"\[-1, 5\]: a route is recorded whole or not at all"),
    ],
)
def test_routes_that_cannot_be_followed(routes: torch.Tensor, message: str) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=message):
        set_router_replay(model, routes)
    assert all(router.router_replay.target_topk_idx is None for router in model)


def test_routes_of_another_dtype() -> None:
    with pytest.raises(TypeError, match=r"routed_experts: torch.float32, expected one of torch.int16"):
        set_router_replay(make_model(), make_routes().float())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_enable_routing_replay": False}, r"0 was built without routing replay: set policy.router_replay.enabled"),
        ({"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}, "balancing_type is 'sinkhorn'"),
    ],
)
def test_routers_that_cannot_replay(settings: dict[str, Any], message: str) -> None:
    model = make_model((1,), **settings)
    with pytest.raises(ValueError, match=message):
        set_router_replay(model, make_routes())
    clear_router_replay(model)


def test_a_forward_pass_of_other_tokens() -> None:
    model = make_model((1,))
    set_router_replay(model, make_routes())
    with pytest.raises(RuntimeError, match=r"layer 2 is given 4 tokens of top-k 2, and has routes of shape \(6, 2\)"):
        model[0](torch.randn(2, 2, WIDTH))


def test_routes_that_were_cleared_too_early() -> None:
    from megatron.core.tensor_parallel import random

    model = make_model((1,))
    hidden = torch.randn(3, 2, WIDTH, requires_grad=True)
    set_router_replay(model, make_routes())
    replay = model[0].router_replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.random, "get_rng_state", lambda device=None: torch.get_rng_state())
        probabilities, _ = random.checkpoint(model[0], False, hidden)
        replay.clear_indices()
        with pytest.raises(RuntimeError, match="the recompute of layer 2 finds no routes"):
            probabilities.sum().backward()


def test_an_action_without_routes() -> None:
    model = make_model((1,))
    set_router_replay(model, make_routes())
    model[0].router_replay.clear_indices()
    with pytest.raises(RuntimeError, match="layer 2 has no routes to replay: call set_router_replay"):
        model[0](torch.randn(3, 2, WIDTH))


def test_forward_backward_and_recompute_of_whole_models_over_two_ranks() -> None:
    check_layouts(2, "cpu", [SEQUENCE_EXPERT, PIPELINE])
