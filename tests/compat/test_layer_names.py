"""Names of tensors in checkpoints, between local layers and Transformer Engine's; whole models: tests/model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megasetup.compat.layer_names import named_as_saved

PAIRS = [
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("pre_mlp_layernorm.bias", "mlp.linear_fc1.layer_norm_bias"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
]


class Asking(torch.nn.Module):
    """A model, as far as a load asks it: one tensor and one extra state, under Megatron's own objects."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        state = f"{self.name.rpartition('.')[0]}._extra_state"
        return {
            f"{prefix}tensor": ShardedTensor.from_rank_offsets(self.name, torch.zeros(2)),
            f"{prefix}state": ShardedObject(state, None, (2,), (1,)),
        }


def asked(name: str, saved: set[str] | None) -> dict[str, str]:
    model = Asking(name)
    with named_as_saved([model], saved):
        found = {key: value.key for key, value in model.sharded_state_dict(prefix="a.").items()}
    assert "sharded_state_dict" not in vars(model)
    return found


@pytest.mark.parametrize("layer", ["decoder.layers.", "decoder.layers.3.", "mtp.layers.0.transformer_layer."])
@pytest.mark.parametrize(("own", "fused"), PAIRS)
def test_a_tensor_is_asked_for_by_the_name_that_it_has(layer: str, own: str, fused: str) -> None:
    for wanted, there in ((own, fused), (fused, own), (own, own), (fused, fused)):
        assert asked(layer + wanted, {layer + there, "decoder.final_layernorm.weight"}) == {"a.tensor": layer + there}


def test_what_is_there_under_its_own_name_keeps_it() -> None:
    """Norms of queries are no part of a linear layer in plain attention, whatever else is there."""
    own, other = PAIRS[2]
    assert asked(own, {own, other})["a.tensor"] == own


def test_a_tensor_that_is_not_there_is_asked_for_all_the_same() -> None:
    assert asked("decoder.layers.input_layernorm.weight", {"else"}) == {
        "a.tensor": "decoder.layers.input_layernorm.weight"
    }


def test_an_extra_state_that_is_there_is_asked_for() -> None:
    saved = {"decoder.norm.weight", "decoder.norm._extra_state/shard_1_2"}
    assert asked("decoder.norm.weight", saved)["a.state"] == "decoder.norm._extra_state"
    assert "a.state" not in asked("decoder.norm.weight", {"decoder.norm.weight", "decoder.norm._extra_state/shard_0_2"})


def test_a_model_that_is_not_asked_for_a_sharded_state_dict_is_left_alone() -> None:
    """As Megatron-FSDP's, of which that is not asked, and which lacks the method."""
    model = torch.nn.Linear(2, 2)
    with named_as_saved([model, Asking("decoder.norm.weight")], {"model.module.weight"}):
        assert not hasattr(model, "sharded_state_dict")


def test_without_an_index_nothing_is_changed() -> None:
    assert asked("decoder.norm.weight", None) == {
        "a.tensor": "decoder.norm.weight",
        "a.state": "decoder.norm._extra_state",
    }
