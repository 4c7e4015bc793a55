"""Router buffers recast on a GPU: 60 real Megatron routers of 256 experts, in one call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasetup import moe

pytest.importorskip("megatron.core")

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

ROUTERS, EXPERTS = 60, 256

Call = tuple[str, torch.dtype, int]


def make_config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=16,
        moe_router_topk=8,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )


def make_routers(count: int, device: str = "cuda:0") -> nn.ModuleList:
    groups = ProcessGroupCollection(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    config = make_config()
    routers = nn.ModuleList([TopKRouter(config, pg_collection=groups) for _ in range(count)]).to(device)
    for router in routers:
        # Values that BF16 cannot hold.
        router.expert_bias.copy_(1 + torch.rand(EXPERTS, device=device) * 2**-9)
        router.local_tokens_per_expert.copy_(torch.randint(2**16, 2**20, (EXPERTS,), device=device))
    return routers


def test_one_call_recasts_every_router(widen_calls: list[Call]) -> None:
    model = make_routers(ROUTERS).bfloat16()
    before = [
        (router, name, router._buffers[name]) for router in model for name in ("expert_bias", "local_tokens_per_expert")
    ]
    expected = [buffer.to(torch.float32) for _, _, buffer in before]
    assert moe.recast_expert_bias(model) == 2 * ROUTERS
    assert widen_calls == [("cuda:0", torch.bfloat16, 2 * ROUTERS)]
    for (router, name, buffer), right in zip(before, expected, strict=True):
        assert router._buffers[name] is buffer
        assert (buffer.dtype, buffer.device) == (torch.float32, torch.device("cuda:0"))
        assert buffer.data_ptr() % 16 == 0
        assert torch.equal(buffer, right)
    assert moe.recast_expert_bias(model) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [EXPERTS, 250, 1])
def test_recast_buffers_against_to(dtype: torch.dtype, experts: int, widen_calls: list[Call]) -> None:
    buffers = [torch.randn(experts, device="cuda").to(dtype) for _ in range(ROUTERS)]
    expected = [buffer.to(torch.float32) for buffer in buffers]
    moe.recast_buffers(buffers)
    assert widen_calls == [("cuda:0", dtype, ROUTERS)]
    for buffer, right in zip(buffers, expected, strict=True):
        assert buffer.data_ptr() % 16 == 0
        assert torch.equal(buffer, right)


def test_follows_the_current_stream() -> None:
    buffers = [torch.zeros(EXPERTS, dtype=torch.bfloat16, device="cuda") for _ in range(ROUTERS)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The values arrive late on this stream: a recast on another stream would read the zeros.
        torch.cuda._sleep(50_000_000)
        for index, buffer in enumerate(buffers):
            buffer.fill_(index + 1)
        moe.recast_buffers(buffers)
    stream.synchronize()
    for index, buffer in enumerate(buffers):
        assert torch.equal(buffer, torch.full((EXPERTS,), index + 1.0, device="cuda"))


def test_wrap_keeps_all_bits(widen_calls: list[Call]) -> None:
    model = make_routers(ROUTERS)
    kept = [(router.expert_bias, router.expert_bias.clone()) for router in model]
    counts = [(router.local_tokens_per_expert, router.local_tokens_per_expert.clone()) for router in model]
    moe.MoEFloat16Module(make_config(), model)
    for router, (bias, right), (count, right_count) in zip(model, kept, counts, strict=True):
        assert router.expert_bias is bias
        assert router.local_tokens_per_expert is count
        assert torch.equal(bias, right)
        assert torch.equal(count, right_count)
        assert router.weight.dtype == torch.bfloat16
    assert widen_calls == []


def test_gpu_and_cpu_take_a_call_each(widen_calls: list[Call]) -> None:
    model = nn.ModuleList([*make_routers(2), *make_routers(2, "cpu")]).bfloat16()
    assert moe.recast_expert_bias(model) == 8
    assert widen_calls == [("cuda:0", torch.bfloat16, 4), ("cpu", torch.bfloat16, 4)]
    assert {router.expert_bias.dtype for router in model} == {torch.float32}


def test_bf16_and_fp16_take_a_call_each(widen_calls: list[Call]) -> None:
    model = nn.ModuleList([make_routers(2).bfloat16(), make_routers(2).half()])
    routers = [*model[0], *model[1]]
    expected = [router.expert_bias.float() for router in routers]
    assert moe.recast_expert_bias(model) == 8
    assert widen_calls == [("cuda:0", torch.bfloat16, 4), ("cuda:0", torch.float16, 4)]
    for router, right in zip(routers, expected, strict=True):
        assert router.expert_bias.dtype == torch.float32
        assert torch.equal(router.expert_bias, right)


@pytest.mark.multigpu
def test_two_gpus_take_a_call_each(widen_calls: list[Call]) -> None:
    model = nn.ModuleList([*make_routers(2, "cuda:0"), *make_routers(2, "cuda:1")]).bfloat16()
    expected = [router.expert_bias.float() for router in model]
    assert moe.recast_expert_bias(model) == 8
    assert widen_calls == [("cuda:0", torch.bfloat16, 4), ("cuda:1", torch.bfloat16, 4)]
    for router, right in zip(model, expected, strict=True):
        assert torch.equal(router.expert_bias, right)
    assert torch.cuda.current_device() == 0
