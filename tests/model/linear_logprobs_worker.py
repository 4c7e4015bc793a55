"""One rank of a small GPTModel: log-probabilities and all gradients, with and without its logits.

Called with "cpu" (gloo; Megatron's sequence parallelism does not work there) or "cuda" (NCCL, rank i on GPU i).
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
from torch import distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megasetup.model.linear_logprobs import LinearLogprobs

VOCABULARY, SEQUENCE, BATCH, WIDTH = 96, 12, 3, 32


def _model(world: int, *, sequence_parallel: bool, tied: bool) -> GPTModel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=world,
        sequence_parallel=sequence_parallel and world > 1,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    # Megatron's own attention asks for a GPU and torch's norms do not know sequence parallelism; what is tested begins
    # after the last layer.
    parts = spec.submodules
    parts.self_attention = parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attn_bda = IdentityFuncOp
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec], layer_norm=IdentityOp),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute",  # (Megatron's rotary embedding asks for a GPU)
    )


def _found(
    world: int, device: torch.device, processor: LinearLogprobs | None, *, sequence_parallel: bool, tied: bool
) -> dict[str, torch.Tensor]:
    """The log-probabilities and every gradient, of the last hidden states (this rank's part of them) too."""
    torch.manual_seed(5)
    model = _model(world, sequence_parallel=sequence_parallel, tied=tied).to(device)
    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
    hidden = torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator)
    grad = torch.randn(BATCH, SEQUENCE, generator=generator)
    tokens, labels, hidden, grad = (each.to(device) for each in (tokens, labels, hidden, grad))
    if model.config.sequence_parallel:
        hidden = hidden.chunk(world)[dist.get_rank()].clone()
    hidden.requires_grad_()
    # From the last layer on: what comes before changes nothing here, and asks for a GPU.
    found = model._postprocess(hidden, tokens, None, labels, None, None, None, output_processor=processor)
    # The model's own loss is minus the log-probability: Megatron's vocabulary-parallel cross entropy.
    logprobs = -found if processor is None else found
    logprobs.backward(grad)
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"logprobs": logprobs.detach(), "hidden": hidden.grad, **grads}


def _agrees(world: int, device: torch.device, *, sequence_parallel: bool, tied: bool) -> bool:
    # Sequence parallelism changes no value, so one plain way serves both.
    plain = _found(world, device, None, sequence_parallel=False, tied=tied)
    if sequence_parallel and world > 1:
        plain["hidden"] = plain["hidden"].chunk(world)[dist.get_rank()]
    fused = _found(world, device, LinearLogprobs(chunk_size=7), sequence_parallel=sequence_parallel, tied=tied)
    torch.testing.assert_close(fused, plain, rtol=2e-5, atol=2e-5)
    return True


def main() -> None:
    rank, world, on_gpu = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    agreed = [
        _agrees(world, device, sequence_parallel=sequence_parallel, tied=tied)
        for sequence_parallel in (False, True)[: 1 + on_gpu]
        for tied in (False, True)
    ]
    print(f"rank {rank}: {sum(agreed)} of {len(agreed)} agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
