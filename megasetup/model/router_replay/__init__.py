"""Routing replay: tokens go to the same experts in training as they did in generation.

Two programs that compute the same router in BF16 do not agree on every token's experts, and a token that goes elsewhere
in training than in generation has other log-probabilities than those that were sampled. So generation records its
routes, and training replays them: the experts are those recorded, their weights and gradients are training's own.

    routes = collate_routes(recorded, sequence_length)      # once a micro-batch, with its tokens
    set_router_replay(model, routes)                        # before each forward pass
    ...                                                     # forward, backward, recompute
    clear_router_replay(model)                              # when the step is over
"""

from megasetup.model.router_replay.replay import (
    clear_router_replay,
    forget_routers_made_inside,
    router_replay,
    set_router_replay,
)
from megasetup.model.router_replay.routes import (
    UNRECORDED,
    build_replay_tensors,
    collate_routes,
    moe_layers,
    replaying_routers,
)

__all__ = [
    "UNRECORDED",
    "build_replay_tensors",
    "clear_router_replay",
    "collate_routes",
    "forget_routers_made_inside",
    "moe_layers",
    "replaying_routers",
    "router_replay",
    "set_router_replay",
]
