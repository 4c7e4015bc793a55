"""A model finds its tensors in a checkpoint that layers of another kind were saved from.

Megatron's local layers and Transformer Engine's hold the same weights under different names: Transformer Engine fuses a
norm into the linear layer after it, where there is one. Megatron gives local layers those names for plain attention and
dense layers, gives the norm before experts a name that neither kind of layers asks for, and gives those of multi-latent
attention none. Transformer Engine's modules also have an extra state each, empty without FP8, that local ones lack.

Which names a checkpoint has is not written in its config: conversions have Transformer Engine's, a run with local
layers has its own. So its index is asked, and for the time of a load the model asks for what the index has.

Needed with megatron-core 0.19; may go when its local layers have Transformer Engine's names for all of these.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from unittest import mock

from megasetup.compat.bridge import import_bridge

# A layer's norms by their own names, and each fused into the linear layer after it.
FUSED_NORMS: Mapping[str, str] = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_EXTRA_STATE = "_extra_state"


@contextlib.contextmanager
def named_as_saved(chunks: list[Any], saved: Collection[str] | None) -> Iterator[None]:
    """Have a model load its tensors by the names that a checkpoint has for them.

    Extra states that the checkpoint does not have are not asked for. Tensors that it has under no name known here are
    asked for by the model's own, so that whoever loads says what is missing.

    Args:
        chunks: the model's chunks, wrapped or not.
        saved: the names in the checkpoint's index; None where it has none.
    """
    unwrap = import_bridge("megatron.core.utils").unwrap_model
    if saved is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            model = unwrap(chunk)
            if not hasattr(model, "sharded_state_dict"):
                continue  # (Megatron-FSDP's, which loads by the names of torch's state dict)
            asking = functools.partial(_sharded_state_dict, model.sharded_state_dict, saved)
            stack.enter_context(mock.patch.object(model, "sharded_state_dict", asking))
        yield


def _sharded_state_dict(ask: Any, saved: Collection[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
    mapping = import_bridge("megatron.core.dist_checkpointing.mapping")
    asked: dict[str, Any] = {}
    for name, value in ask(*args, **kwargs).items():
        if isinstance(value, mapping.ShardedTensor):
            value.key = _name_in(saved, value.key)
        elif isinstance(value, mapping.ShardedObject) and value.key.endswith(_EXTRA_STATE):
            value.key = _name_in(saved, value.key, value.unique_key.removeprefix(value.key))
            if value.unique_key not in saved:
                continue
        asked[name] = value
    return asked


def _name_in(saved: Collection[str], name: str, shard: str = "") -> str:
    if name + shard in saved:
        return name
    for pair in FUSED_NORMS.items():
        for own, other in (pair, pair[::-1]):
            renamed = f".{other}".join(name.rsplit(f".{own}", 1))
            if renamed != name and renamed + shard in saved:
                return renamed
    return name
