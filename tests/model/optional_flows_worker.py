"""Routing replay and fused log-probabilities in a model that the setup has built.

python optional_flows_worker.py FOLDER: FOLDER holds moe/, a Hugging Face model. Prints "all as told" at the end;
anything else ends with a traceback.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from flow_config import policy_config
from flow_models import LENGTH, SEQUENCES, batch
from flow_worker import FOLDER, Run, parallel
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megasetup.model.linear_logprobs import linear_logprobs_of
from megasetup.model.reference import setup_reference_model_state
from megasetup.model.router_replay import clear_router_replay, replaying_routers, router_replay

LAYERS, EXPERTS, TOPK = 2, 4, 2


def log_probabilities(model: Any, processor: Any = None) -> torch.Tensor:
    """[SEQUENCES, LENGTH], FP32."""
    rows = batch(0)
    positions = torch.arange(LENGTH, device="cuda").expand(SEQUENCES, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    found = model(
        rows[:, :-1].contiguous(), positions, mask, labels=rows[:, 1:].contiguous(), output_processor=processor
    )
    return (-found if processor is None else found).float()


def record(model: Any) -> torch.Tensor:
    """The routes that the model takes by itself: [SEQUENCES, LENGTH, LAYERS, TOPK]."""
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    log_probabilities(model)
    layers = [router.router_replay.get_recorded_indices() for router in replaying_routers(model)]
    clear_router_replay()
    return torch.stack([layer.view(LENGTH, SEQUENCES, TOPK) for layer in layers], dim=2).transpose(0, 1)


def check_evaluation(model: Any, processor: Any) -> None:
    plain = log_probabilities(model)
    torch.testing.assert_close(log_probabilities(model, processor), plain, rtol=0, atol=3e-2)
    routes = record(model)
    with router_replay(model, routes):
        torch.testing.assert_close(log_probabilities(model), plain, rtol=0, atol=3e-2)
    with router_replay(model, (routes + 1) % EXPERTS):
        elsewhere = log_probabilities(model)
    assert (elsewhere - plain).abs().max() > 0.1
    torch.testing.assert_close(log_probabilities(model), plain, rtol=0, atol=3e-2)


def check_training(model: Any, processor: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    routes = torch.rand(SEQUENCES, LENGTH, LAYERS, EXPERTS, generator=generator).topk(TOPK, -1).indices
    told = torch.zeros(LENGTH, SEQUENCES, LAYERS, EXPERTS, dtype=torch.bool)
    told.scatter_(3, routes.transpose(0, 1), True)
    calls: list[tuple[int, torch.Tensor]] = []

    def note(router: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        calls.append((router.layer_number - 1, output[1].detach().cpu()))

    routers = list(replaying_routers(model))
    hooks = [router.register_forward_hook(note) for router in routers]
    model.zero_grad_buffer()
    with router_replay(model, routes.to(torch.int16)):
        (-log_probabilities(model, processor).sum()).backward()
    for hook in hooks:
        hook.remove()
    # Forward in order, and recomputed in the other.
    assert [layer for layer, _ in calls] == [0, 1, 1, 0], calls
    for layer, routing_map in calls:
        assert torch.equal(routing_map.bool(), told[:, :, layer].flatten(0, 1)), layer
    for router in routers:
        assert router.weight.main_grad.norm() > 0
        assert router.router_replay.replay_backward_list == []


def check_reference(run: Run) -> None:
    known = list(RouterReplay.global_router_replay_instances)
    assert len(known) == LAYERS
    state = setup_reference_model_state(run.config, run.cfg, run.pretrained)
    assert any("router" in name for name in state)
    assert known == RouterReplay.global_router_replay_instances
    try:
        setup_reference_model_state(run.config, run.cfg, "/nowhere")
    except FileNotFoundError:
        assert known == RouterReplay.global_router_replay_instances
    else:
        raise AssertionError("a reference model from nowhere")


def main() -> None:
    settings = {
        "fraction": None,
        "activation_checkpointing": True,
        "use_fused_linear_logprobs": True,
        "fused_linear_logprobs_chunk_size": 100,
    }
    config = policy_config(str(FOLDER / "moe"), **(settings | parallel()))
    config |= {
        "router_replay": {"enabled": True},
        "generation": {"backend": "vllm", "colocated": {"enabled": True}, "temperature": 1.0},
    }
    run = Run(config)
    (model,) = run.chunks
    processor = linear_logprobs_of(config)
    assert processor is not None
    assert processor.chunk_size == 100
    model.eval()
    with torch.no_grad():
        check_evaluation(model, processor)
    model.train()
    check_training(model, processor)
    clear_router_replay()
    run.step()
    check_reference(run)
    print("all as told", flush=True)
    if dist.is_initialized():  # (the failed reference model may have taken it down)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
