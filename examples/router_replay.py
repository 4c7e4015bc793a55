"""Two of Megatron's routers send tokens where a recording says, and one token, which was not recorded, where they like.

Runs anywhere; needs megatron-core. In a training run the routers are in a model and generation makes the recording:
docs/router_replay.md.
"""

import warnings

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

from megasetup.model.router_replay import collate_routes, router_replay

EXPERTS, TOPK, WIDTH, LAYERS = 8, 2, 16, 2


def make_routers() -> nn.ModuleList:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=WIDTH,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        moe_enable_routing_replay=True,  # what policy.router_replay.enabled sets
        add_bias_linear=False,
    )
    groups = ProcessGroupCollection(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    routers = nn.ModuleList(TopKRouter(config, pg_collection=groups) for _ in range(LAYERS))
    for number, router in enumerate(routers, start=1):
        router.set_layer_number(number)
    return routers


def experts_of(router: nn.Module, hidden: torch.Tensor) -> list[list[int]]:
    """What the router decides, without what moves its weight to a GPU."""
    _, routing_map = router.routing(hidden @ router.weight.T)
    return [row.nonzero()[:, 0].tolist() for row in routing_map]


def main() -> None:
    torch.manual_seed(0)
    routers = make_routers()
    hidden = torch.randn(3, 1, WIDTH)  # [sequence, batch, hidden size]: three tokens
    # Generation computed the first two tokens and only sampled the third: [tokens, layers, top-k].
    recorded = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], dtype=torch.int16)
    routes = collate_routes([recorded], sequence_length=3)
    for layer, router in enumerate(routers):
        own = experts_of(router, hidden)
        with router_replay(routers, routes):
            replayed = experts_of(router, hidden)
        told = recorded[:, layer].tolist()
        if replayed != [*told, own[2]]:
            raise SystemExit(f"layer {layer} went to {replayed}, and was told {told}")
        print(f"layer {layer}: alone {own}, replayed {replayed}")


if __name__ == "__main__":
    main()
