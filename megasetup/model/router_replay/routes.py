"""From the routes of whole sequences to what each router of this rank is told.

Generation records [batch, sequence, layers, top-k]. A rank's routers are those of its pipeline stage, see tokens in
Megatron's order, [sequence, batch], and under sequence parallelism only this rank's part of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megasetup.config.router_replay import ENABLED_KEY, unreplayable
from megasetup.moe import find_routers

UNRECORDED = -1
"""Stands in every place of a token's route that was not recorded: the router routes that token itself."""

_DTYPES = (torch.int16, torch.int32, torch.int64)


def collate_routes(recorded: Sequence[torch.Tensor], sequence_length: int) -> torch.Tensor:
    """The routes of several sequences as one tensor, in which what was not recorded says so.

    Generation records a token's route when it computes it, which it never does for the last token that it samples.

    Args:
        recorded: of each sequence, its first tokens' routes: [tokens, layers, top-k], int16, int32 or int64; the
            number of tokens may differ.
        sequence_length: tokens in a row of the batch, padding included.

    Returns:
        [sequences, sequence_length, layers, top-k], the dtype of the first, UNRECORDED where nothing is known.

    Raises:
        ValueError: there are no sequences, one is longer than sequence_length, or layers or top-k differ.
        TypeError: another dtype.
    """
    if not recorded:
        raise ValueError("there are no recorded routes to collate")
    for index, one in enumerate(recorded):
        _check_dtype(one, f"the routes of sequence {index}")
        if one.dim() != 3 or one.shape[1:] != recorded[0].shape[1:] or len(one) > sequence_length:
            raise ValueError(
                f"the routes of sequence {index} have shape {tuple(one.shape)}: expected [up to {sequence_length} "
                f"tokens, layers, top-k], and those of sequence 0 have shape {tuple(recorded[0].shape)}"
            )
    routes = recorded[0].new_full((len(recorded), sequence_length, *recorded[0].shape[1:]), UNRECORDED)
    for row, one in zip(routes, recorded, strict=True):
        row[: len(one)] = one
    return routes


def moe_layers(config: Any) -> list[int]:
    """Which layers of a model have experts, counted from 0 over all pipeline stages, without MTP layers.

    Args:
        config: Megatron's TransformerConfig. moe_layer_freq decides, or the layer pattern of a hybrid model.

    Raises:
        ValueError: moe_layer_freq is a list that is not as long as the model.
    """
    pattern = getattr(config, "hybrid_layer_pattern", None) or getattr(config, "hybrid_override_pattern", None)
    if pattern:
        # "M*E|ME/MM": stages divided by |, MTP layers after /.
        return [layer for layer, kind in enumerate(pattern.split("/")[0].replace("|", "")) if kind == "E"]
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return list(range(0, config.num_layers, frequency))
    if len(frequency) != config.num_layers:
        raise ValueError(f"moe_layer_freq has {len(frequency)} entries, and the model {config.num_layers} layers")
    return [layer for layer, has_experts in enumerate(frequency) if has_experts]


def replaying_routers(model: nn.Module | Sequence[nn.Module]) -> Iterator[Any]:
    """The routers of this rank that routes are recorded for: all with replay but those of MTP layers.

    Args:
        model: the model, wrapped or not, or the list of its chunks.

    Raises:
        ValueError: a router was built without replay, or its settings exclude it.
    """
    for name, router in find_routers(model):
        if getattr(router, "is_mtp_layer", False):
            continue
        if getattr(router, "router_replay", None) is None:
            raise ValueError(f"{name} was built without routing replay: set {ENABLED_KEY} before the model is built")
        for field, value, remedy in unreplayable(vars(router.config)):
            raise ValueError(f"{name} would not replay its routes, because {field} is {value!r}: it {remedy}")
        yield router


def build_replay_tensors(
    model: nn.Module | Sequence[nn.Module], routed_experts: torch.Tensor
) -> list[tuple[Any, torch.Tensor]]:
    """What each router of this rank is to be told for one micro-batch.

    Args:
        model: the model, wrapped or not, or the list of its one chunk.
        routed_experts: [batch, sequence, layers, top-k], int16, int32 or int64, on any device: the experts of every
            token that the model is given on this rank, in the order of its input_ids. (With sequence parallelism
            that is still the whole sequence, as it is for input_ids; with context parallelism, or several sequences
            packed into one row, it is cut and packed as input_ids are.) Layers are all layers of the model, those
            without experts being passed over, or those with experts alone. A token without a route has UNRECORDED
            in all its places. The order within a token's top-k does not matter.

    Returns:
        (router, routes) of each replaying router, in the order of the model. routes: [tokens of this rank, top-k] in
        the order in which the router sees them, the dtype of routed_experts, on the router's device.

    Raises:
        ValueError: shapes that do not fit the model, experts that it does not have, an expert twice in a route, a
            route that is recorded in part; routers that cannot replay.
        TypeError: another dtype.

    Waits for the device once, to look at the values.
    """
    routers = list(replaying_routers(model))
    if not routers:
        return []
    _check_dtype(routed_experts, "routed_experts")
    config, group = routers[0].config, routers[0].tp_group
    parts, part = 1, 0
    if config.sequence_parallel and group is not None:
        parts, part = group.size(), group.rank()
    _check_shape(routed_experts, routers[0].topk, parts)
    layers = [_place_of(router, routed_experts.shape[2]) for router in routers]
    local = routed_experts.chunk(parts, dim=1)[part]
    local = local[:, :, torch.tensor(layers, device=local.device)].to(routers[0].weight.device, non_blocking=True)
    # [layers, sequence, batch, top-k]
    by_layer = local.permute(2, 1, 0, 3).contiguous()
    _check_values(by_layer, layers, routers[0].num_experts)
    return [(router, routes.flatten(0, 1)) for router, routes in zip(routers, by_layer, strict=True)]


def _check_dtype(routes: torch.Tensor, name: str) -> None:
    if routes.dtype not in _DTYPES:
        raise TypeError(f"{name}: {routes.dtype}, expected one of {', '.join(map(str, _DTYPES))}")


def _check_shape(routes: torch.Tensor, topk: int, parts: int) -> None:
    if routes.dim() != 4 or routes.shape[3] != topk:
        raise ValueError(
            f"routed_experts has shape {tuple(routes.shape)}: expected [batch, sequence, layers, top-k], "
            f"with the model's top-k of {topk}"
        )
    if routes.shape[1] % parts:
        raise ValueError(
            f"routed_experts has {routes.shape[1]} tokens a sequence, which sequence parallelism cannot cut into "
            f"{parts} equal parts: pad it as input_ids is padded"
        )


def _place_of(router: Any, recorded_layers: int) -> int:
    """Where in the recorded layers those of a router are."""
    if router.layer_number is None:
        raise ValueError("a router does not know its layer: build it in a transformer layer, or call set_layer_number")
    layer, with_experts = router.layer_number - 1, moe_layers(router.config)
    if recorded_layers == router.config.num_layers:
        return int(layer)
    if recorded_layers == len(with_experts):
        return with_experts.index(layer)
    raise ValueError(
        f"routed_experts has {recorded_layers} layers: expected {router.config.num_layers}, all of the model's, or the "
        f"{len(with_experts)} that have experts"
    )


def _check_values(by_layer: torch.Tensor, layers: Sequence[int], experts: int) -> None:
    """Raise where a route cannot be followed. by_layer: [layers, sequence, batch, top-k]."""
    missing = by_layer == UNRECORDED
    twice = torch.zeros_like(by_layer[..., 0], dtype=torch.bool)
    for distance in range(1, by_layer.shape[-1]):
        same = by_layer[..., distance:] == by_layer[..., :-distance]
        twice |= (same & ~missing[..., distance:]).any(-1)
    wrong = torch.stack(
        (
            ((by_layer < UNRECORDED) | (by_layer >= experts)).any(-1),
            missing.any(-1) != missing.all(-1),
            twice,
        )
    )
    # (one look at the device's memory for all of them)
    if not wrong.any():
        return
    kind, place, token, row = (int(each) for each in wrong.nonzero()[0])
    remedy = (
        f"the model has experts 0 to {experts - 1}",
        "a route is recorded whole or not at all",
        "no expert is chosen twice",
    )[kind]
    raise ValueError(
        f"the route of batch row {row}, token {token} of this rank's, layer {layers[place]} (recorded) is "
        f"{by_layer[place, token, row].tolist()}: {remedy}; a token without a route has {UNRECORDED} in all its places"
    )
