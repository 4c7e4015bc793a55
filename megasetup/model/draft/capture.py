"""What a draft reads of its policy: hidden states of some layers and token embeddings, caught in the forward pass.

Copies are taken by hooks on the layers, so the policy computes what it would without them, and none of it carries a
gradient: training the draft does not move the policy. With sequence parallelism each rank has a part of every sequence,
and the parts are gathered when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megasetup.model.draft.parts import language_model, unwrapped


class CapturedStates:
    """What was caught of the last forward pass.

    Args:
        layers: which layers are caught, counted from 0.
        sequence_parallel: whether each tensor-parallel rank has a part of every sequence.
    """

    def __init__(self, layers: Sequence[int], *, sequence_parallel: bool) -> None:
        self._layers = tuple(layers)
        self._sequence_parallel = sequence_parallel
        self._states: dict[int, torch.Tensor] = {}
        self._embeddings: torch.Tensor | None = None

    def hidden_states(self) -> torch.Tensor:
        """[sequence, batch, layers x hidden size], layer after layer, whole sequences, in the policy's dtype.

        Collective over the tensor-parallel ranks where the policy is sequence parallel.

        Raises:
            RuntimeError: a layer did not run on this rank.
        """
        absent = [layer for layer in self._layers if layer not in self._states]
        if absent:
            raise RuntimeError(
                f"nothing was caught of layers {absent}: the policy must have run inside capture_hidden_states, and "
                "these layers on this pipeline stage"
            )
        return self._whole(torch.cat([self._states[layer] for layer in self._layers], dim=-1))

    def next_embeddings(self) -> torch.Tensor:
        """Of each position the embedding of the token after it, zeros for the last: [sequence, batch, hidden size].

        Collective as hidden_states is.

        Raises:
            RuntimeError: the embedding did not run on this rank.
        """
        if self._embeddings is None:
            raise RuntimeError(
                "no embeddings were caught: the policy must have run inside capture_hidden_states, and its embedding "
                "is on the first pipeline stage"
            )
        following = self._whole(self._embeddings).roll(-1, 0)
        following[-1] = 0
        return following

    def _whole(self, states: torch.Tensor) -> torch.Tensor:
        if not self._sequence_parallel:
            return states.clone() if states is self._embeddings else states
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        gathered: torch.Tensor = gather_from_sequence_parallel_region(states)
        return gathered

    def _keep(self, layer: int, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if _recomputing():
            return
        self._states[layer] = states.detach().clone()

    def _keep_embeddings(self, output: torch.Tensor) -> None:
        if not _recomputing():
            self._states.clear()  # (a new forward pass)
            self._embeddings = output.detach().clone()


def _recomputing() -> bool:
    """Whether this is activation checkpointing's second forward pass, which a backward pass runs."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def capture_hidden_states(model: Any, layers: Sequence[int]) -> Iterator[CapturedStates]:
    """Catch hidden states of the policy's forward passes inside this block.

    Each forward pass takes the place of the one before, so read what was caught before the next micro-batch.

    Args:
        model: the policy: a module, wrapped or not, or a list of chunks.
        layers: after which layers, counted from 0 (`draft.architecture.aux_layers`).

    Raises:
        TypeError: the model is no language model with a decoder.
    """
    chunks = [language_model(unwrapped(chunk)) for chunk in (model if isinstance(model, list | tuple) else [model])]
    captured = CapturedStates(sorted(layers), sequence_parallel=chunks[0].config.sequence_parallel)
    handles = []
    try:
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                number = layer.layer_number - 1  # (Megatron counts from 1, over all stages)
                if number in layers:
                    handles.append(
                        layer.register_forward_hook(lambda _, __, output, n=number: captured._keep(n, output))
                    )
            if getattr(chunk, "pre_process", False):
                handles.append(
                    chunk.embedding.register_forward_hook(lambda _, __, output: captured._keep_embeddings(output))
                )
        yield captured
    finally:
        for handle in handles:
            handle.remove()
