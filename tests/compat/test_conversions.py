"""What conversions borrow from Megatron and torch for their time: it works, and it is put back."""

from __future__ import annotations

import queue

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from megatron.core.dist_checkpointing.strategies import filesystem_async

from megasetup.compat.bridge import import_bridge
from megasetup.compat.local_layers import fields_of_the_machine, local_layer_settings
from megasetup.compat.no_gpu import no_gpu
from megasetup.compat.write_queue import plain_write_queue


def test_the_cpu_is_the_current_device_and_then_no_more() -> None:
    names = ("current_device", "synchronize", "get_rng_state", "is_available")
    before = [getattr(torch.cuda, name) for name in names]
    tensor = torch.ones(3)
    with no_gpu():
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        torch.cuda.synchronize()
        assert torch.cuda.get_rng_state().numel() == 0
        assert tensor.cuda() is tensor
        assert torch.nn.Parameter(tensor).cuda(non_blocking=True).device.type == "cpu"
        assert torch.cuda.is_available is before[3]
    assert [getattr(torch.cuda, name) for name in names] == before
    assert "cuda" not in vars(torch.Tensor)


def test_a_plain_queue_for_the_time_of_a_save() -> None:
    before = filesystem_async._results_queue
    with plain_write_queue():
        results = filesystem_async.get_write_results_queue()
        assert type(results) is queue.Queue
        results.put({0: []})
        assert results.get_nowait() == {0: []}
    assert filesystem_async._results_queue is before


def test_local_layers_in_place_of_the_usual_ones_only() -> None:
    module = import_bridge("megatron.bridge.models.gpt_provider")
    provider = module.GPTModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4)
    provider.moe_permute_fusion = True
    before = dict(vars(provider))
    settings = local_layer_settings(provider)
    assert vars(provider) == before
    assert settings["transformer_layer_spec"] is module.local_layer_spec
    assert settings["transformer_impl"] == "local"
    assert settings["moe_permute_fusion"] is False
    assert settings["moe_token_dispatcher_type"] == "allgather"
    assert all(hasattr(provider, name) for name in settings)

    def own_layers(_config: object) -> None:
        """A spec of the model's own."""

    provider.transformer_layer_spec = own_layers
    assert "transformer_layer_spec" not in local_layer_settings(provider)


def test_fields_that_bridge_takes_from_the_machine() -> None:
    module = import_bridge("megatron.bridge.models.gpt_provider")
    provider = module.GPTModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4)
    assert fields_of_the_machine(provider) == ["gradient_accumulation_fusion"]
