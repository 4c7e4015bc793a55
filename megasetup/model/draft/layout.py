"""How a draft's tensors on disk and its parameters correspond: which are fused, and how tensor parallelism cuts them.

Megatron holds query, key and value in one matrix, group by group of heads, and gate and up in another; each tensor-
parallel rank has a part of both. What stands here are pure functions of tensors, both ways, so that what is exported is
what was loaded, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megasetup.model.draft.architecture import DraftArchitecture

type Shape = tuple[int, ...]
type Tensors = Mapping[str, torch.Tensor]

HEAD = "lm_head.weight"
D2T = "d2t"  # of each token of the draft, how much must be added for the policy's


@dataclass(frozen=True)
class Piece(ABC):
    """One parameter of the draft on a tensor-parallel rank.

    Attributes:
        parameter: its name in ModelOpt's module.
        shapes: the shape of each tensor on disk that it is made of, by name.
    """

    parameter: str
    shapes: Mapping[str, Shape]

    @abstractmethod
    def cut(self, tensors: Tensors, rank: int, world: int) -> torch.Tensor:
        """The parameter's value on one rank, of what stands on disk."""

    @abstractmethod
    def join(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What stands on disk, of the parameter's values on all ranks."""

    def _name(self) -> str:
        (name,) = self.shapes
        return name


@dataclass(frozen=True)
class Whole(Piece):
    """A tensor that every rank has all of."""

    def cut(self, tensors: Tensors, rank: int, world: int) -> torch.Tensor:
        return tensors[self._name()]

    def join(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self._name(): parts[0]}


@dataclass(frozen=True)
class Rows(Piece):
    """A matrix whose rows are shared out, after rows of zeros at its end.

    Attributes:
        rows: how many there are with those.
    """

    rows: int

    def cut(self, tensors: Tensors, rank: int, world: int) -> torch.Tensor:
        matrix = tensors[self._name()]
        return F.pad(matrix, (0, 0, 0, self.rows - len(matrix))).chunk(world)[rank]

    def join(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        ((name, shape),) = self.shapes.items()
        return {name: torch.cat(tuple(parts))[: shape[0]]}


@dataclass(frozen=True)
class Columns(Piece):
    """A matrix whose columns are shared out."""

    def cut(self, tensors: Tensors, rank: int, world: int) -> torch.Tensor:
        return tensors[self._name()].chunk(world, dim=1)[rank]

    def join(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self._name(): torch.cat(tuple(parts), dim=1)}


@dataclass(frozen=True)
class GateUp(Piece):
    """Two matrices, each shared out by rows; a rank has its part of the first above its part of the second."""

    def cut(self, tensors: Tensors, rank: int, world: int) -> torch.Tensor:
        return torch.cat([tensors[name].chunk(world)[rank] for name in self.shapes])

    def join(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        halves = [part.chunk(2) for part in parts]
        return {name: torch.cat([half[index] for half in halves]) for index, name in enumerate(self.shapes)}


@dataclass(frozen=True)
class QueryKeyValue(Piece):
    """Query, key and value, group by group: a group's queries, its key, its value. Groups are shared out.

    Attributes:
        groups: how many groups of heads there are.
    """

    groups: int

    def cut(self, tensors: Tensors, rank: int, world: int) -> torch.Tensor:
        grouped = [tensors[name].reshape(self.groups, -1, tensors[name].shape[1]) for name in self.shapes]
        return torch.cat(grouped, dim=1).chunk(world)[rank].flatten(0, 1)

    def join(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        fused = torch.cat(tuple(parts))
        grouped = fused.reshape(self.groups, -1, fused.shape[1])
        sizes = [shape[0] // self.groups for shape in self.shapes.values()]
        split = torch.split(grouped, sizes, dim=1)
        return {name: part.flatten(0, 1) for name, part in zip(self.shapes, split, strict=True)}


def pieces_of(draft: DraftArchitecture, head_rows: int) -> Iterator[Piece]:
    """All parameters of a draft, with the names that an Eagle-3 draft's files use (the first layer as "layers.0").

    Args:
        draft: its shape.
        head_rows: the rows of the LM head on all ranks together, padding included.
    """
    width, inner, head = draft.hidden_size, draft.ffn_hidden_size, draft.kv_channels
    queries, keys = draft.num_attention_heads * head, draft.num_query_groups * head
    yield Whole("fc.weight", {"fc.weight": (width, len(draft.aux_layers) * width)})
    yield Whole("enorm.weight", {"layers.0.input_layernorm.weight": (width,)})
    for layer in range(draft.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"layers.{layer}."
        attention = f"{theirs}self_attn."
        # The first attention reads the token's embedding beside the hidden state.
        read = 2 * width if layer == 0 else width
        norm = "hidden_norm" if layer == 0 else "input_layernorm"
        yield Whole(f"{ours}input_layernorm.weight", {f"{theirs}{norm}.weight": (width,)})
        yield QueryKeyValue(
            f"{ours}self_attention.linear_qkv.weight",
            {
                f"{attention}q_proj.weight": (queries, read),
                f"{attention}k_proj.weight": (keys, read),
                f"{attention}v_proj.weight": (keys, read),
            },
            draft.num_query_groups,
        )
        yield Columns(f"{ours}self_attention.linear_proj.weight", {f"{attention}o_proj.weight": (width, queries)})
        yield Whole(f"{ours}pre_mlp_layernorm.weight", {f"{theirs}post_attention_layernorm.weight": (width,)})
        yield GateUp(
            f"{ours}mlp.linear_fc1.weight",
            {f"{theirs}mlp.gate_proj.weight": (inner, width), f"{theirs}mlp.up_proj.weight": (inner, width)},
        )
        yield Columns(f"{ours}mlp.linear_fc2.weight", {f"{theirs}mlp.down_proj.weight": (width, inner)})
    yield Whole("decoder.final_layernorm.weight", {"norm.weight": (width,)})
    yield Rows("eagle_output_layer.weight", {HEAD: (draft.draft_vocab_size, width)}, head_rows)
    if draft.draft_vocab_size != draft.vocab_size:
        yield Whole(D2T, {D2T: (draft.draft_vocab_size,)})
