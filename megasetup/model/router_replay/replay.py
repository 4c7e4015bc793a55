"""Routes given to Megatron's routers, followed in the forward pass and again where it is recomputed.

Megatron keeps a RouterReplay beside each router, which is asked for the top-k. It wants a recorded route for every
token, and its caller must say between forward and backward passes which of the two comes next, which nobody can in a
pipeline where they alternate. Here each object becomes one that fills in missing routes from the router's own top-k and
sees for itself that it is asked during a backward pass: a recompute. Only routers that were given routes change, so a
run without replay has Megatron's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megasetup.model.router_replay.routes import build_replay_tensors
from megasetup.moe import find_routers


def _in_backward() -> bool:
    # The number of the graph task that this thread runs, -1 where it runs none; torch's own checkpoints ask for it.
    return torch._C._current_graph_task_id() != -1


@functools.cache
def _followed_routes() -> type[Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    class FollowedRoutes(RouterReplay):  # type: ignore[misc]
        """A RouterReplay that lets the router route tokens without a recorded route, and knows a recompute."""

        # Whether the routes were set where a backward pass may follow.
        _for_backward = False

        def set_target_indices(self, topk_indices: torch.Tensor) -> None:
            # (Megatron's would keep the routes of every micro-batch until they are cleared)
            self.target_topk_idx = topk_indices
            self._for_backward = torch.is_grad_enabled()

        def get_replay_topk(
            self,
            scores: torch.Tensor,
            topk: int,
            num_groups: int | None = None,
            group_topk: int | None = None,
            default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if self.router_replay_action not in (
                RouterReplayAction.REPLAY_FORWARD,
                RouterReplayAction.REPLAY_BACKWARD,
            ):
                found: tuple[torch.Tensor, torch.Tensor] = super().get_replay_topk(
                    scores, topk, num_groups, group_topk, default_compute_topk
                )
                return found
            routes = self._next_routes(len(scores), topk).to(scores.device, torch.int64)
            if default_compute_topk is not None:
                own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
                routes = torch.where(routes >= 0, routes, own)
            return scores.gather(1, routes), routes

        def _next_routes(self, tokens: int, topk: int) -> torch.Tensor:
            if self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD or _in_backward():
                if not self.replay_backward_list:
                    raise RuntimeError(
                        f"the recompute of layer {self.layer_number} finds no routes: clear them when the backward "
                        "pass is over, and set them where gradients are enabled"
                    )
                routes: torch.Tensor = self.replay_backward_list.pop(0)
            else:
                if self.target_topk_idx is None:
                    raise RuntimeError(f"layer {self.layer_number} has no routes to replay: call set_router_replay")
                routes = self.target_topk_idx
                if self._for_backward and not torch.is_grad_enabled():
                    # Inside a checkpoint: this forward pass will be done again. Backward passes come in the order of
                    # the forward passes, so what is recomputed next is what has waited longest.
                    self.replay_backward_list.append(routes)
            if routes.shape != (tokens, topk):
                raise RuntimeError(
                    f"layer {self.layer_number} is given {tokens} tokens of top-k {topk}, and has routes of shape "
                    f"{tuple(routes.shape)}: set those of this micro-batch before its forward pass"
                )
            return routes

    return FollowedRoutes


def set_router_replay(model: nn.Module | Sequence[nn.Module], routed_experts: torch.Tensor) -> None:
    """Have the next forward pass of the model, and every recompute of it, route tokens as they were routed.

    Call it before each forward pass, under the same no_grad if there is one (in the forward step function of a
    pipeline schedule, just before the model). Routers of MTP layers, and tokens without a route, are routed as always.

    Args:
        model: the model, wrapped or not, or the list of its one chunk.
        routed_experts: [batch, sequence, layers, top-k], int16, int32 or int64: see `build_replay_tensors`.

    Raises:
        ValueError: shapes that do not fit the model, experts that it does not have, an expert twice in a route, a
            route that is recorded in part; routers that cannot replay. Nothing has been set then.
        TypeError: another dtype.
    """
    told = build_replay_tensors(model, routed_experts)
    if not told:
        return
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    for router, routes in told:
        replay = router.router_replay
        if type(replay) is RouterReplay:
            # The object stays itself: the router and Megatron's list of all of them hold it.
            replay.__class__ = _followed_routes()
        replay.set_target_indices(routes)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def clear_router_replay(model: nn.Module | Sequence[nn.Module] | None = None) -> None:
    """Drop all routes: from here on tokens are routed as always.

    To be called when the step is over, and not between a forward pass and the recompute of it. Calling it twice does
    no harm.

    Args:
        model: the model, wrapped or not, or the list of its chunks; None for every router of this process.
    """
    if model is None:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        replays = list(RouterReplay.global_router_replay_instances)
    else:
        replays = [getattr(router, "router_replay", None) for _, router in find_routers(model)]
    for replay in replays:
        if replay is None:
            continue
        replay.clear_indices()
        replay.clear_router_replay_action()


@contextmanager
def router_replay(model: nn.Module | Sequence[nn.Module], routed_experts: torch.Tensor) -> Iterator[None]:
    """set_router_replay for a `with` block that holds a forward pass and its backward pass; cleared also when it fails.

    Args:
        model: as for `set_router_replay`.
        routed_experts: likewise.

    Raises:
        ValueError, TypeError: as `set_router_replay`.
    """
    set_router_replay(model, routed_experts)
    try:
        yield
    finally:
        clear_router_replay(model)


@contextmanager
def forget_routers_made_inside() -> Iterator[None]:
    """Keep routers that the block makes out of Megatron's list of all replaying routers, also when the block fails.

    The list keeps them alive, and Megatron's own functions give routes to whatever is in it: a model that is built
    beside the policy must leave no trace there.
    """
    try:
        from megatron.core.transformer.moe.router_replay import RouterReplay
    except ImportError:  # (Megatron before 0.17)
        yield
        return
    known = list(RouterReplay.global_router_replay_instances)
    try:
        yield
    finally:
        RouterReplay.global_router_replay_instances[:] = known
