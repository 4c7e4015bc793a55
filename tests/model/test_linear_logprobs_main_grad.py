"""Gradients of fused log-probabilities in the buffers of Megatron's DistributedDataParallel, with and without a GPU.

Fused gradient accumulation needs APEX where layers use it themselves; here only the flag of the output layer is set,
which is all that the processor reads. The model has no attention, which asks for a GPU; without one
`torch.cuda.current_device` answers "cpu".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megasetup.model.linear_logprobs import LinearLogprobs

VOCABULARY, SEQUENCE, BATCH, WIDTH = 96, 12, 3, 32


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where a process group of one rank is, with Megatron's parallel state on it."""
    device = torch.device(request.param)
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield device
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def make_model(*, tied: bool) -> GPTModel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        cuda_graph_modules=[],
    )
    spec = get_gpt_layer_local_spec()
    parts = spec.submodules
    parts.self_attention = parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attn_bda = IdentityFuncOp
    torch.manual_seed(5)
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec], layer_norm=IdentityOp),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute",
    )


def wrap(model: GPTModel, device: torch.device, dtype: torch.dtype = torch.float32, *, in_fp32: bool = True) -> Any:
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32)
    return DistributedDataParallel(model.config, settings, model.to(device, dtype))


def main_grads(ddp: Any, processor: LinearLogprobs | None) -> dict[str, torch.Tensor]:
    """The gradients of two micro-batches."""
    device = next(ddp.parameters()).device
    generator = torch.Generator().manual_seed(7)
    ddp.zero_grad_buffer()
    for _ in range(2):
        tokens, labels = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator).to(device)
        grad = torch.randn(BATCH, SEQUENCE, generator=generator).to(device)
        positions = torch.arange(SEQUENCE, device=device).expand(BATCH, SEQUENCE)
        found = ddp(tokens, positions, None, labels=labels, output_processor=processor)
        # The model's own loss is minus the log-probability.
        (-found if processor is None else found).float().backward(grad)
    assert all(parameter.grad is None for parameter in ddp.parameters())
    return {name: parameter.main_grad.clone() for name, parameter in ddp.module.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("dtype", "in_fp32", "tolerance"),
    [(torch.float32, True, 1e-5), (torch.bfloat16, True, 2**-6), (torch.bfloat16, False, 2**-6)],
)
def test_main_grads_are_those_of_the_plain_path(
    device: torch.device, tied: bool, fused: bool, dtype: torch.dtype, in_fp32: bool, tolerance: float
) -> None:
    plain, ours = (wrap(make_model(tied=tied), device, dtype, in_fp32=in_fp32) for _ in range(2))
    # (Megatron sets it on a weight that is tied)
    weight = ours.module.shared_embedding_or_output_weight() if tied else ours.module.output_layer.weight
    assert getattr(weight, "zero_out_wgrad", False) is tied
    expected = main_grads(plain, None)
    ours.module.output_layer.gradient_accumulation_fusion = fused
    found = main_grads(ours, LinearLogprobs(chunk_size=7))
    assert weight.grad_added_to_main_grad is fused
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert grad.dtype == (torch.float32 if in_fp32 else dtype)
        error = (grad.float() - expected[name].float()).norm() / expected[name].float().norm()
        assert error < tolerance, (name, error)


def test_another_user_of_the_weight_that_fuses_does_not_hide_ours(device: torch.device) -> None:
    """An MTP head adds to main_grad and says so; DistributedDataParallel then passes over autograd's gradient."""
    plain, ours = (wrap(make_model(tied=False), device) for _ in range(2))
    expected = main_grads(plain, None)
    ours.module.output_layer.gradient_accumulation_fusion = True
    zero_grad_buffer = ours.zero_grad_buffer

    def zeroed_then_claimed() -> None:
        zero_grad_buffer()
        ours.module.output_layer.weight.grad_added_to_main_grad = True

    ours.zero_grad_buffer = zeroed_then_claimed
    found = main_grads(ours, LinearLogprobs(chunk_size=7))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_leaves_its_buffer_alone(device: torch.device) -> None:
    model = make_model(tied=False)
    model.output_layer.weight.requires_grad_(False)
    ours = wrap(model, device)
    ours.module.output_layer.gradient_accumulation_fusion = True
    ours.zero_grad_buffer()
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), device=device)
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, SEQUENCE)
    ours(tokens, positions, None, labels=tokens, output_processor=LinearLogprobs()).sum().backward()
    assert ours.module.output_layer.weight.grad is None
    assert ours.module.embedding.word_embeddings.weight.main_grad.norm() > 0
