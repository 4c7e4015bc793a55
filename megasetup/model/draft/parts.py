"""Where in a model's wrappers the policy sits, and where in the policy a draft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ATTRIBUTE = "draft_model"


def unwrapped(chunk: Any) -> Any:
    """A chunk without its wrappers for mixed precision and data parallelism."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def language_model(chunk: Any) -> Any:
    """The part of a bare chunk that has a decoder: itself, or the language model inside a multimodal one.

    Raises:
        TypeError: there is none.
    """
    found = chunk
    while not hasattr(found, "decoder"):
        if not hasattr(found, "language_model"):
            raise TypeError(f"{type(chunk).__name__} has no decoder whose hidden states a draft could read")
        found = found.language_model
    return found


def owner_of_draft(chunks: Iterable[Any]) -> Any | None:
    """The bare chunk that computes the policy's logits, which a draft belongs beside: in the last pipeline stage.

    Args:
        chunks: this rank's, wrapped or not.

    Returns:
        The chunk, or None where no chunk of this rank computes logits.
    """
    for chunk in map(unwrapped, chunks):
        if getattr(language_model(chunk), "post_process", False):
            return chunk
    return None


def get_attached_draft_model(model: Any) -> Any | None:
    """The draft of a policy.

    Args:
        model: the policy, a module or a list of chunks, wrapped or not; or what setup_model_and_optimizer returned.

    Returns:
        The draft; None where there is none, which includes every pipeline stage but the last.
    """
    if hasattr(model, "colocated_reshard_plan"):
        model = model.model
    for chunk in map(unwrapped, model if isinstance(model, list | tuple) else [model]):
        found = getattr(chunk, ATTRIBUTE, None)
        if found is not None:
            return found
    return None
