"""One rank of a small MoE model that replays routes: in every layout, with and without recompute.

Called with "cpu" (gloo) or "cuda" (NCCL, rank i on GPU i), and a list of layouts: fields of TransformerConfig as JSON.
On a GPU the layers are Transformer Engine's. Without one, what asks for a GPU stands aside:
`torch.cuda.current_device` answers "cpu", and there is no attention; routers, experts, dispatchers, checkpoints and
schedules are Megatron's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from typing import Any

import torch
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.moe.router import TopKRouter

from megasetup.model.router_replay import (
    UNRECORDED,
    clear_router_replay,
    forget_routers_made_inside,
    set_router_replay,
)

VOCABULARY, SEQUENCE, BATCH, WIDTH = 64, 16, 2, 32
LAYERS, EXPERTS, TOPK, MICRO_BATCHES = 4, 8, 2, 3
FREQUENCY = [0, 1, 1, 1]
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}

type Maps = list[tuple[bool, int, torch.Tensor]]
"""Whether in a backward pass, the layer counted from 0, the routing map [tokens, experts]: of each call of a router."""


class OnCpu(TorchFunctionMode):
    """What is asked for on "cuda" is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


def make_model(layout: dict[str, Any], recompute: str, device: torch.device) -> GPTModel:
    on_gpu = device.type == "cuda"
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_layer_freq=FREQUENCY,
        moe_ffn_hidden_size=WIDTH,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall" if on_gpu else "allgather",
        moe_enable_routing_replay=True,
        add_bias_linear=False,
        use_cpu_initialization=not on_gpu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        batch_p2p_sync=on_gpu,
        pipeline_dtype=torch.float32,
        **layout,
        **RECOMPUTE[recompute],
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=on_gpu)
    if not on_gpu:
        spec.layer_norm = IdentityOp
        for layer in spec.layer_specs:
            parts = layer.submodules
            parts.self_attention = parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
            parts.self_attn_bda = IdentityFuncOp
    torch.manual_seed(5)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        position_embedding_type="learned_absolute",
    ).to(device)


def routers_of(model: GPTModel) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def step(model: GPTModel, routes: torch.Tensor | None, *, train: bool = True) -> Maps:
    """A forward and (train) a backward pass of all micro-batches by Megatron's schedule. Gradients are left."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (MICRO_BATCHES, BATCH, SEQUENCE), generator=generator).to(device)
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    calls: Maps = []

    def note(router: TopKRouter, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        calls.append((in_backward, router.layer_number - 1, output[1].detach().cpu()))

    def forward(numbers: Any, model: GPTModel) -> tuple[torch.Tensor, Any]:
        number = next(numbers)
        if routes is not None:
            set_router_replay(model, routes[number])
        losses = model(tokens[number], positions, mask, labels=tokens[number].roll(-1, 1))
        return losses, lambda output: (output.float().mean(), {})

    model.zero_grad(set_to_none=True)
    hooks = [router.register_forward_hook(note) for router in routers_of(model)]
    try:
        with contextlib.nullcontext() if train else torch.no_grad():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(range(MICRO_BATCHES)),
                model=[model],
                num_microbatches=MICRO_BATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=not train,
            )
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def told_maps(model: GPTModel, routes: torch.Tensor, layer: int) -> list[torch.Tensor]:
    """By hand: the routing map [tokens of this rank, experts] of each micro-batch; a row without a route is empty."""
    maps = []
    for of_micro_batch in routes:
        if model.config.sequence_parallel:
            size = SEQUENCE // model.config.tensor_model_parallel_size
            first = parallel_state.get_tensor_model_parallel_rank() * size
            of_micro_batch = of_micro_batch[:, first : first + size]
        rows = []
        for token in range(of_micro_batch.shape[1]):
            for sequence in range(BATCH):
                row = torch.zeros(EXPERTS, dtype=torch.bool)
                for expert in of_micro_batch[sequence, token, layer].tolist():
                    if expert >= 0:
                        row[expert] = True
                rows.append(row)
        maps.append(torch.stack(rows))
    return maps


def random_routes(missing: float = 0.0) -> torch.Tensor:
    """[micro-batches, batch, sequence, layers, top-k], the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    shape = (MICRO_BATCHES, BATCH, SEQUENCE, LAYERS)
    routes = torch.rand(*shape, EXPERTS, generator=generator).topk(TOPK, -1).indices.to(torch.int16)
    unrecorded = torch.rand(shape[:3], generator=generator) < missing
    routes[unrecorded] = UNRECORDED
    return routes


def by_layer(calls: Maps, *, in_backward: bool) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for backward, layer, routing_map in calls:
        if backward is in_backward:
            found.setdefault(layer, []).append(routing_map)
    return found


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    if len(found) != len(expected):
        raise AssertionError(f"{what}: {len(found)} calls, expected {len(expected)}")
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(one.bool(), other.bool()):
            raise AssertionError(f"{what}, micro-batch {number}: {(one != other).any(-1).sum()} tokens go elsewhere")


def check_replay(model: GPTModel, recompute: str, natural: dict[int, list[torch.Tensor]]) -> None:
    local = sorted(natural)
    for routes in (random_routes(), random_routes()[:, :, :, 1:]):  # of all layers, then of those with experts
        offset = LAYERS - routes.shape[3]
        calls = step(model, routes)
        for in_backward in (False, True):
            found = by_layer(calls, in_backward=in_backward)
            if in_backward and recompute == "none":
                assert found == {}
                continue
            assert sorted(found) == local, (sorted(found), local)
            for layer in local:
                check_equal(found[layer], told_maps(model, routes, layer - offset), f"layer {layer}, {in_backward=}")
        for router in routers_of(model):
            assert router.router_replay.replay_backward_list == []
    # Tokens without a route.
    partial = random_routes(missing=0.4)
    calls = by_layer(step(model, partial), in_backward=False)
    for layer in local:
        # Attention mixes tokens, so behind the first replayed layer what others were told counts too.
        alone = layer == 1 or not next(model.parameters()).is_cuda
        for told, own, found in zip(told_maps(model, partial, layer), natural[layer], calls[layer], strict=True):
            recorded = told.any(-1, keepdim=True)
            assert 0 < recorded.sum() < len(recorded)
            check_equal([found & recorded], [told], f"layer {layer}, recorded tokens")
            if alone:
                check_equal([found], [torch.where(recorded, told, own.bool())], f"layer {layer}, all tokens")
    # No routes at all, and a forward pass alone, inside which nothing waits for a backward pass.
    nothing = torch.full_like(random_routes(), UNRECORDED)
    for routes, train in ((nothing, True), (random_routes(), False)):
        calls = by_layer(step(model, routes, train=train), in_backward=False)
        for layer in local:
            expected = told_maps(model, routes, layer) if not train else natural[layer]
            check_equal(calls[layer], expected, f"layer {layer}, {train=}")
        for router in routers_of(model):
            assert router.router_replay.replay_backward_list == []
    clear_router_replay(model)
    calls = by_layer(step(model, None), in_backward=False)
    for layer in local:
        check_equal(calls[layer], natural[layer], f"layer {layer}, cleared")


def gradients(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def follow(layout: dict[str, Any], device: torch.device) -> None:
    """Check one layout."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    parallel_state.initialize_model_parallel(
        **{name: layout.get(name, 1) for name in sizes},
        expert_tensor_parallel_size=layout.get("expert_tensor_parallel_size"),
    )
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(7)
    expected: dict[str, torch.Tensor] | None = None
    weights: dict[str, Any] | None = None
    for recompute in RECOMPUTE:
        with forget_routers_made_inside():
            model = make_model(layout, recompute, device)
        if weights is None:
            weights = model.state_dict()
        model.load_state_dict(weights)
        natural = by_layer(step(model, None), in_backward=False)
        check_replay(model, recompute, natural)
        step(model, random_routes())
        clear_router_replay(model)
        found = gradients(model)
        expected = found if expected is None else expected
        assert any("router" in name for name in found)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        print(f"rank {dist.get_rank()}: {json.dumps(layout)} {recompute} layers {sorted(natural)}", flush=True)
    parallel_state.destroy_model_parallel()


def main() -> None:
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if sys.argv[1] == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.cuda.current_device = lambda: device  # type: ignore[assignment]
        torch.cuda.random.get_rng_state = torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
        CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # (there is no dropout)
        OnCpu().__enter__()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for layout in json.loads(sys.argv[2]):
        follow(layout, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
