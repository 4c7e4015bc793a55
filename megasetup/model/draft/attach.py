"""The hook that puts a draft beside the policy before the model is wrapped.

Before, because mixed precision, data parallelism and the optimizer then treat its weights as the policy's own. The
policy's weights must be there first: a checkpoint of a bare policy has no weights for a draft, and a draft without
weights of its own takes its LM head from the policy's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megasetup.config.draft import DRAFT
from megasetup.config.fields import section
from megasetup.model import bridge
from megasetup.model.draft.architecture import architecture_of
from megasetup.model.draft.files import find_draft, read_weights
from megasetup.model.draft.parts import ATTRIBUTE, get_attached_draft_model, language_model, owner_of_draft

_logger = logging.getLogger("megasetup")


def create_draft_pre_wrap_hook(
    policy_cfg: Mapping[str, Any], megatron_cfg: Any, state: Any, *, preload_policy_from_pretrained: bool
) -> Callable[[list[Any]], list[Any]]:
    """A hook that attaches a draft to the policy, as policy.draft describes it.

    The draft is `draft_model` of the chunk that computes the logits. It is built on the ranks of the last pipeline
    stage; the others only load the policy.

    Args:
        policy_cfg: the policy config.
        megatron_cfg: the ConfigContainer; its model provider gives the policy's sizes.
        state: the GlobalState; its checkpoint config names the pretrained checkpoint.
        preload_policy_from_pretrained: whether to load the policy's weights first, as for fine-tuning.

    The hook raises:
        ValueError: the pretrained checkpoint is missing; the policy has a draft already; the draft's config or weights
            do not fit the policy.
        ImportError: ModelOpt or Transformer Engine is not installed.
    """

    def attach_draft(chunks: list[Any]) -> list[Any]:
        if get_attached_draft_model(chunks) is not None:
            raise ValueError(f"{DRAFT}: the policy has a draft model already, and can have one")
        if preload_policy_from_pretrained:
            path = state.cfg.checkpoint.pretrained_checkpoint
            if not bridge.is_checkpoint(path):
                raise ValueError(
                    f"a draft needs its policy's weights, and {path} holds no checkpoint: give pretrained_path, or "
                    "convert the model first (handle_model_import)"
                )
            bridge.load_weights_from(path, state, chunks)
        owner = owner_of_draft(chunks)
        if owner is not None:
            draft = build_draft(policy_cfg, megatron_cfg.model, owner)
            setattr(owner, ATTRIBUTE, draft)
            adapters = getattr(state.cfg, "peft", None)
            if adapters is not None:
                _save_with_adapters(adapters, chunks, draft)
        return chunks

    return attach_draft


def _save_with_adapters(adapters: Any, chunks: list[Any], draft: Any) -> None:
    """Have checkpoints of adapters, which leave out what is not trained, hold the whole draft."""
    adapters.set_params_to_save(chunks)
    # It finds parameters alone; which of the policy's tokens the draft has is a buffer.
    for chunk in chunks:
        adapters.params_to_save |= {
            f"{place}.{name}"
            for place, module in chunk.named_modules()
            if module is draft
            for name, _ in draft.named_buffers()
        }


def build_draft(policy_cfg: Mapping[str, Any], provider: Any, owner: Any) -> Any:
    """The draft of a policy, with its weights.

    Collective over the tensor-parallel ranks of the last pipeline stage.

    Args:
        policy_cfg: the policy config.
        provider: the model provider; its vocab_size is known.
        owner: the bare chunk that computes the policy's logits, with the policy's weights.
    """
    name = section(policy_cfg, "draft").get("model_name")
    folder = None if name is None else find_draft(name)
    architecture = architecture_of(policy_cfg, provider, folder)
    policy = language_model(owner)
    head = _output_weight(policy)

    from megasetup.model.draft.eagle import EagleDraft
    from megasetup.model.draft.weights import load_draft

    rows = len(head) * provider.tensor_model_parallel_size
    draft = EagleDraft(architecture, policy.config, rows, policy.max_sequence_length)
    load_draft(draft, _weights(folder), head, str(folder))
    draft.to(head.device)
    _logger.info(
        "a draft with %s layer(s) and %s parameters on this rank reads the policy's layers %s",
        architecture.num_layers,
        f"{sum(parameter.numel() for parameter in draft.parameters()):,}",
        list(architecture.aux_layers),
    )
    return draft


def _weights(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    found = read_weights(folder)
    if not found:
        _logger.warning("%s.model_name: %s holds a config and no weights: the draft starts afresh", DRAFT, folder)
    return found


def _output_weight(policy: Any) -> Any:
    if policy.share_embeddings_and_output_weights:
        return policy.shared_embedding_or_output_weight().detach()
    return policy.output_layer.weight.detach()
