"""A draft's weights into the draft and out again."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megasetup.model.draft.eagle import EagleDraft
from megasetup.model.draft.files import DraftWeightsError
from megasetup.model.draft.layout import D2T, HEAD, Piece, pieces_of

_logger = logging.getLogger("megasetup")

# What a draft's file may hold beside its weights: the policy's embedding, which the draft reads from the policy; the
# inverse of d2t; and buffers that are computed.
_T2D = re.compile(r"(^|\.)t2d$")
_PASSED_OVER = re.compile(r"(^|\.)(embed_tokens\.weight|t2d|rotary_emb\.inv_freq)$")
# (a quantised weight means nothing without its scales)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)


def load_draft(draft: EagleDraft, tensors: Mapping[str, torch.Tensor], policy_head: torch.Tensor, source: str) -> None:
    """Write weights into a draft; every shape is checked before anything is written.

    Collective over the tensor-parallel ranks.

    Args:
        draft: the draft.
        tensors: its weights, whole, by the names of an Eagle-3 draft's files, the same on every rank. Empty for none:
            all but the LM head stays as initialised.
        policy_head: this rank's part of the policy's output layer, [padded vocabulary / tensor-parallel size, hidden
            size]. The draft's LM head is taken from it where `tensors` has none.
        source: where they come from, for messages.

    Raises:
        DraftWeightsError: tensors are missing, unknown, or of other shapes or kinds of dtypes; names all of them. Or
            d2t, which says what tokens the draft has, names some that the policy lacks, some twice, or others than t2d.
    """
    rank, world = _rank_and_size()
    pieces = list(pieces_of(draft.architecture, draft.head_rows))
    found, names = _by_our_names(tensors)
    if found:
        _check(found, names, pieces, source)
        _check_tokens(found, tensors, draft.architecture.vocab_size, source)
    parameters = dict(draft.eagle.named_parameters()) | dict(draft.eagle.named_buffers())
    with torch.no_grad():
        for piece in pieces:
            if piece.shapes.keys() <= found.keys():
                parameters[piece.parameter].copy_(piece.cut(found, rank, world))
        if HEAD not in found:
            parameters["eagle_output_layer.weight"].copy_(_head_from_policy(draft, policy_head, rank, world))
    draft.names = names
    _logger.info(
        "the draft's weights come from %s%s",
        source if found else "initialisation",
        "" if HEAD in found else ", its LM head from the policy",
    )


def export_draft(draft: EagleDraft) -> dict[str, torch.Tensor]:
    """A draft's weights as its files hold them, whole, on this rank's device.

    Collective over the tensor-parallel ranks.

    Returns:
        Tensors by name: the names that it was loaded under, otherwise "midlayer." for a single layer and "layers.N."
        for several. With d2t where the draft has tokens of its own, and its inverse t2d.
    """
    _, world = _rank_and_size()
    parameters = dict(draft.eagle.named_parameters()) | dict(draft.eagle.named_buffers())
    exported: dict[str, torch.Tensor] = {}
    for piece in pieces_of(draft.architecture, draft.head_rows):
        parts = _on_all_ranks(parameters[piece.parameter].detach(), world)
        exported |= {_their_name(draft, name): tensor.clone() for name, tensor in piece.join(parts).items()}
    if D2T in exported:
        known = torch.zeros(draft.architecture.vocab_size, dtype=torch.bool, device=exported[D2T].device)
        known[draft.policy_tokens()] = True
        exported["t2d"] = known
    return exported


def _rank_and_size() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _on_all_ranks(local: torch.Tensor, world: int) -> list[torch.Tensor]:
    if world == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(parts, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return parts


def _by_our_names(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    found: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for theirs, tensor in tensors.items():
        if not _PASSED_OVER.search(theirs):
            ours = _our_name(theirs)
            if ours in found:
                raise DraftWeightsError(f"{names[ours]} and {theirs} are the same weight of a draft: one must go")
            found[ours], names[ours] = tensor, theirs
    return found, names


def _our_name(theirs: str) -> str:
    """Layers are "midlayer", "midlayer.N" or "layers.N"; with "midlayer.N" every layer's first norm is hidden_norm."""
    name = theirs.removeprefix("model.")
    several = re.match(r"midlayer\.(\d+)\.", name)
    if several:
        name = f"layers.{name.removeprefix('midlayer.')}"
        return name if several[1] == "0" else name.replace(".hidden_norm.", ".input_layernorm.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _their_name(draft: EagleDraft, ours: str) -> str:
    if ours in draft.names:
        return draft.names[ours]
    single = draft.architecture.num_layers == 1 and ours.startswith("layers.0.")
    return f"midlayer.{ours.removeprefix('layers.0.')}" if single else ours


def _check(found: Mapping[str, torch.Tensor], names: Mapping[str, str], pieces: list[Piece], source: str) -> None:
    wanted = {name: shape for piece in pieces for name, shape in piece.shapes.items()}
    missing = [name for name in wanted.keys() - found.keys() if name != HEAD]
    wrong = [f"{name} is missing" for name in sorted(missing)]
    for name, tensor in found.items():
        if name not in wanted:
            wrong.append(f"{names[name]} {tuple(tensor.shape)} is no weight of this draft")
        elif tuple(tensor.shape) != wanted[name]:
            wrong.append(f"{names[name]} is {tuple(tensor.shape)}, and the draft's is {wanted[name]}")
        elif tensor.dtype not in (_INTEGERS if name == D2T else _FLOATS):
            kinds = ", ".join(map(str, _INTEGERS if name == D2T else _FLOATS))
            wrong.append(f"{names[name]} is {tensor.dtype}, expected one of {kinds}")
    if wrong:
        raise DraftWeightsError(
            f"{source} does not fit the draft that its config and policy.draft describe: {'; '.join(wrong)}"
        )


def _check_tokens(
    found: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], size: int, source: str
) -> None:
    if D2T not in found:
        return
    tokens = found[D2T].long() + torch.arange(len(found[D2T]))
    outside = tokens[(tokens < 0) | (tokens >= size)]
    if len(outside):
        raise DraftWeightsError(
            f"{source}: d2t leads to {len(outside)} tokens that the policy does not have, as {outside[0].item()}: "
            f"expected what must be added to a draft's token for the policy's, 0 to {size - 1}"
        )
    tokens = tokens.sort().values
    if (tokens[1:] == tokens[:-1]).any():
        raise DraftWeightsError(f"{source}: d2t leads to some of the policy's tokens twice")
    known = next((tensor for name, tensor in tensors.items() if _T2D.search(name)), None)
    if known is not None and not torch.equal(known.nonzero().flatten(), tokens):
        raise DraftWeightsError(f"{source}: t2d names other tokens than d2t, whose inverse it is: one of them is wrong")


def _head_from_policy(draft: EagleDraft, head: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    if draft.architecture.draft_vocab_size == draft.architecture.vocab_size:
        return head
    parts = _on_all_ranks(head, world)
    return torch.cat(parts)[draft.policy_tokens()].chunk(world)[rank]
