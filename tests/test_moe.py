"""Routers found anywhere, and their FP32 state kept, on the CPU.

The routers, MoE layers and the GPT model are Megatron's own. Two things stand in where no real part can run without a
GPU: `torch.cuda.current_device`, by which Megatron chooses where router buffers live, answers "cpu"; and vision, omni
and hybrid models are plain modules that hold a real router under the attribute names of the real models.
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed
from torch import nn

from megasetup import moe

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS = 8
needs_quantile_balancing = pytest.mark.skipif(
    not hasattr(TopKRouter, "quantile_balancing"), reason="this Megatron has no quantile balancing (0.19 has)"
)

Call = tuple[str, torch.dtype, int]


@pytest.fixture(autouse=True)
def _router_buffers_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


@pytest.fixture(scope="module")
def _model_parallel() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def make_config(**overrides: object) -> TransformerConfig:
    settings: dict[str, object] = {
        "num_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_layer_freq": [0, 1, 1],
        "moe_ffn_hidden_size": 16,
        "moe_router_topk": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    return TransformerConfig(**{**settings, **overrides})


def make_router(**overrides: object) -> TopKRouter:
    groups = ProcessGroupCollection(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    return TopKRouter(make_config(**overrides), pg_collection=groups)


def quantile_router() -> TopKRouter:
    return make_router(moe_router_load_balancing_type="quantile_balancing", moe_router_enable_expert_bias=False)


def fill(*routers: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Give every FP32 buffer values that BF16 cannot hold; returns what each buffer object now holds."""
    values = {}
    for router in routers:
        for name in moe.BUFFER_NAMES:
            buffer = router._buffers.get(name)
            if buffer is not None:
                buffer.copy_(1 + torch.rand(EXPERTS) * 2**-9)
                assert not torch.equal(buffer.bfloat16().float(), buffer)
                values[buffer] = buffer.clone()
    return values


def nest(path: str, module: nn.Module) -> nn.Module:
    for name in reversed(path.split(".")):
        outer = nn.Module()
        outer.add_module(name, module)
        module = outer
    return module


class OtherRouter(nn.Module):
    """A router of another family: Megatron's contract, not its class."""

    def __init__(self, expert_bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("expert_bias", expert_bias)

    def _maintain_float32_expert_bias(self) -> None: ...


@pytest.fixture
def gpt_model(_model_parallel: None) -> GPTModel:
    config = make_config(mtp_num_layers=1)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=16, mtp_block_spec=mtp_spec)


# Megatron's name for the layer within an MTP layer, which 0.17 changed.
_MTP_LAYER = next(
    name
    for name in ("mtp_model_layer", "transformer_layer")
    if name in MultiTokenPredictionLayerSubmodules.__annotations__
)
GPT_ROUTERS = [
    "decoder.layers.1.mlp.router",
    "decoder.layers.2.mlp.router",
    f"mtp.layers.0.{_MTP_LAYER}.mlp.router",
]


class TestFindRouters:
    def test_dense_to_moe_and_mtp_layers(self, gpt_model: GPTModel) -> None:
        found = dict(moe.find_routers(gpt_model))
        assert list(found) == GPT_ROUTERS
        assert all(isinstance(router, TopKRouter) for router in found.values())

    def test_wrapped(self, gpt_model: GPTModel) -> None:
        wrapped = nn.parallel.DistributedDataParallel(Float16Module(gpt_model.config, gpt_model))
        assert [name for name, _ in moe.find_routers(wrapped)] == [f"module.module.{name}" for name in GPT_ROUTERS]

    @pytest.mark.parametrize(
        "path",
        [
            "language_model.decoder.layers.0.mlp.router",
            "thinker.language_model.decoder.layers.0.mlp.router",
            "llava_model.language_model.decoder.layers.0.mlp.router",
            "decoder.layers.3.mlp.router",  # a hybrid stack
            "module.module.thinker.router",
        ],
    )
    def test_nested(self, path: str) -> None:
        router = make_router()
        assert list(moe.find_routers(nest(path, router))) == [(path, router)]

    def test_model_is_the_router(self) -> None:
        router = make_router()
        assert list(moe.find_routers(router)) == [("", router)]

    def test_chunks_are_told_apart(self) -> None:
        first, second = make_router(), make_router()
        found = list(moe.find_routers([nest("module.router", first), nest("module.router", second)]))
        assert found == [("0.module.router", first), ("1.module.router", second)]

    def test_shared_router_once(self) -> None:
        router = make_router()
        chunk = nest("a.router", router)
        chunk.add_module("b", nest("router", router))
        assert list(moe.find_routers([chunk, nest("router", router)])) == [("0.a.router", router)]

    @pytest.mark.parametrize("bias", [None, torch.zeros(EXPERTS)])
    def test_other_families(self, bias: torch.Tensor | None) -> None:
        router = OtherRouter(bias)
        assert list(moe.find_routers(nest("router", router))) == [("router", router)]

    def test_router_without_expert_bias(self) -> None:
        router = make_router(moe_router_enable_expert_bias=False)
        assert list(moe.find_routers(router)) == [("", router)]

    def test_dense_model_has_none(self) -> None:
        assert list(moe.find_routers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))) == []
        assert list(moe.find_routers([])) == []

    @pytest.mark.parametrize("model", [None, "router", [nn.Linear(2, 2), 3]])
    def test_not_a_model(self, model: object) -> None:
        with pytest.raises(TypeError, match=r"model is a \w+: pass a torch.nn.Module or a list"):
            list(moe.find_routers(model))

    @needs_quantile_balancing
    def test_buffer_names_are_those_of_megatron(self) -> None:
        names = {
            name
            for router in (make_router(), quantile_router())
            for name, buffer in router.named_buffers()
            if buffer.dtype == torch.float32
        }
        assert names == set(moe.BUFFER_NAMES)


class TestRecastBuffers:
    def test_every_bf16_pattern(self, widen_calls: list[Call]) -> None:
        low = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
        buffers = [row.clone() for row in low.view(256, 256)]
        before = list(buffers)
        moe.recast_buffers(buffers)
        bits = torch.stack([buffer.view(torch.int32) for buffer in buffers]).flatten()
        assert torch.equal(bits, low.view(torch.int16).to(torch.int32) << 16)
        assert all(buffer is same for buffer, same in zip(buffers, before, strict=True))
        assert widen_calls == [("cpu", torch.bfloat16, 256)]

    @pytest.mark.parametrize("counts", [[256] * 60, [8, 4, 12], [5, 1, 7, 4, 0, 3], [5, 6, 7], [1], [0, 0], [0]])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_values_alignment_and_independence(
        self, counts: list[int], dtype: torch.dtype, widen_calls: list[Call]
    ) -> None:
        buffers = [torch.randn(count).to(dtype) for count in counts]
        expected = [buffer.to(torch.float32) for buffer in buffers]
        moe.recast_buffers(buffers)
        assert widen_calls == [("cpu", dtype, len(counts))]
        for buffer, right in zip(buffers, expected, strict=True):
            assert buffer.dtype == torch.float32
            assert buffer.shape == right.shape
            assert torch.equal(buffer, right)
            assert buffer.numel() == 0 or buffer.data_ptr() % 16 == 0
            assert not buffer._is_view()
            assert buffer.is_leaf
        buffers[0].fill_(7)
        for buffer, right in zip(buffers[1:], expected[1:], strict=True):
            assert torch.equal(buffer, right)

    def test_strided_buffer(self) -> None:
        table = torch.randn(8, 2).bfloat16()
        buffers = [table[:, 0], torch.randn(5).bfloat16(), table[:, 1]]
        expected = [buffer.float() for buffer in buffers]
        moe.recast_buffers(buffers)
        for buffer, right in zip(buffers, expected, strict=True):
            assert buffer.dtype == torch.float32
            assert torch.equal(buffer, right)

    def test_nothing_to_do(self, widen_calls: list[Call]) -> None:
        moe.recast_buffers([])
        assert widen_calls == []

    def test_meta(self, widen_calls: list[Call]) -> None:
        buffer = torch.empty(EXPERTS, dtype=torch.bfloat16, device="meta")
        moe.recast_buffers([buffer])
        assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.float32, (EXPERTS,), "meta")
        assert widen_calls == [("meta", torch.bfloat16, 1)]

    @pytest.mark.parametrize(
        ("odd_one", "error", "message"),
        [
            (torch.zeros(EXPERTS, dtype=torch.float64), TypeError, r"'torch\.bfloat16', 'torch\.float64'"),
            (torch.zeros(EXPERTS, dtype=torch.float32), TypeError, r"'torch\.bfloat16', 'torch\.float32'"),
            (torch.zeros(EXPERTS, dtype=torch.float16), TypeError, r"'torch\.bfloat16', 'torch\.float16'"),
            (torch.zeros(EXPERTS, dtype=torch.int64), TypeError, r"'torch\.bfloat16', 'torch\.int64'"),
            (torch.zeros(EXPERTS, dtype=torch.int16), TypeError, r"'torch\.bfloat16', 'torch\.int16'"),
            (torch.zeros(EXPERTS, dtype=torch.bfloat16, device="meta"), ValueError, "'cpu', 'meta'.*one device"),
            (torch.zeros(2, EXPERTS, dtype=torch.bfloat16), ValueError, r"source 1 has shape \(2, 8\)"),
            (torch.zeros((), dtype=torch.bfloat16), ValueError, r"source 1 has shape \(\)"),
        ],
    )
    def test_errors_change_nothing(self, odd_one: torch.Tensor, error: type[Exception], message: str) -> None:
        buffer, last = torch.ones(EXPERTS, dtype=torch.bfloat16), torch.ones(EXPERTS, dtype=torch.bfloat16)
        addresses, dtype = (buffer.data_ptr(), last.data_ptr()), odd_one.dtype
        with pytest.raises(error, match=message):
            moe.recast_buffers([buffer, odd_one, last])
        assert (buffer.dtype, last.dtype, odd_one.dtype) == (torch.bfloat16, torch.bfloat16, dtype)
        assert (buffer.data_ptr(), last.data_ptr()) == addresses
        assert torch.equal(buffer, torch.ones(EXPERTS, dtype=torch.bfloat16))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        buffer = torch.zeros(EXPERTS, dtype=dtype)
        with pytest.raises(TypeError, match=r"must all be torch\.bfloat16, or all torch\.float16"):
            moe.recast_buffers([buffer])
        assert buffer.dtype == dtype

    def test_two_dimensions(self) -> None:
        buffer = torch.zeros(2, EXPERTS, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"source 0 has shape \(2, 8\).*one dimension"):
            moe.recast_buffers([buffer])
        assert buffer.dtype == torch.bfloat16


class TestRecastExpertBias:
    @needs_quantile_balancing
    def test_every_buffer_in_one_call(self, widen_calls: list[Call]) -> None:
        model = nn.ModuleList([make_router(), nest("language_model.router", quantile_router()), make_router()])
        fill(*(router for _, router in moe.find_routers(model)))
        model.bfloat16()
        before = {
            (name, key): (buffer, buffer.float())
            for name, router in moe.find_routers(model)
            for key, buffer in router.named_buffers()
            if key in moe.BUFFER_NAMES
        }
        assert moe.recast_expert_bias(model) == 6
        assert widen_calls == [("cpu", torch.bfloat16, 6)]
        after = {
            (name, key): buffer
            for name, router in moe.find_routers(model)
            for key, buffer in router.named_buffers()
            if key in moe.BUFFER_NAMES
        }
        assert after.keys() == before.keys()
        for key, (buffer, values) in before.items():
            assert after[key] is buffer
            assert buffer.dtype == torch.float32
            assert torch.equal(buffer, values)

        assert moe.recast_expert_bias(model) == 0
        assert len(widen_calls) == 1

    def test_agrees_with_megatron(self) -> None:
        ours, theirs = make_router().bfloat16(), make_router().bfloat16()
        bias = torch.randn(EXPERTS).bfloat16()
        for router in (ours, theirs):
            router.expert_bias.copy_(bias)
        assert moe.recast_expert_bias(ours) == 2
        theirs._maintain_float32_expert_bias()
        assert torch.equal(ours.expert_bias, theirs.expert_bias)
        assert ours.expert_bias.dtype == theirs.expert_bias.dtype == torch.float32

    def test_one_call_for_each_device_and_dtype(self, widen_calls: list[Call]) -> None:
        model = nn.ModuleList(
            [
                make_router().bfloat16(),
                make_router().half().to("meta"),
                make_router().half(),
                make_router().bfloat16(),
            ]
        )
        for router in (model[0], model[2], model[3]):
            router.expert_bias.copy_(torch.randn(EXPERTS))
        expected = {index: model[index].expert_bias.float() for index in (0, 2, 3)}
        assert moe.recast_expert_bias(model) == 8
        assert widen_calls == [("cpu", torch.bfloat16, 4), ("meta", torch.float16, 2), ("cpu", torch.float16, 2)]
        assert {router.expert_bias.dtype for router in model} == {torch.float32}
        assert [router.expert_bias.device.type for router in model] == ["cpu", "meta", "cpu", "cpu"]
        for index, right in expected.items():
            assert torch.equal(model[index].expert_bias, right)

    def test_error_changes_no_group(self) -> None:
        good = OtherRouter(torch.ones(EXPERTS, dtype=torch.bfloat16))
        bad = OtherRouter(torch.ones(2, EXPERTS, dtype=torch.float16))
        with pytest.raises(ValueError, match=r"source 0 has shape \(2, 8\)"):
            moe.recast_expert_bias([good, bad])
        assert (good.expert_bias.dtype, bad.expert_bias.dtype) == (torch.bfloat16, torch.float16)

    def test_integer_buffers_stay(self, widen_calls: list[Call]) -> None:
        router = OtherRouter(torch.ones(EXPERTS, dtype=torch.bfloat16))
        router.register_buffer("local_tokens_per_expert", torch.ones(EXPERTS, dtype=torch.int64))
        assert moe.recast_expert_bias(router) == 1
        assert (router.expert_bias.dtype, router.local_tokens_per_expert.dtype) == (torch.float32, torch.int64)
        assert widen_calls == [("cpu", torch.bfloat16, 1)]

    def test_chunks(self, widen_calls: list[Call]) -> None:
        assert moe.recast_expert_bias([make_router().bfloat16(), make_router().bfloat16()]) == 4
        assert widen_calls == [("cpu", torch.bfloat16, 4)]

    def test_weights_stay(self) -> None:
        router = make_router().bfloat16()
        router.weight.requires_grad_(False)
        weight = router.weight
        moe.recast_expert_bias(router)
        assert router.weight is weight
        assert router.weight.dtype == torch.bfloat16

    def test_no_expert_bias(self, widen_calls: list[Call]) -> None:
        model = nn.ModuleList([make_router(moe_router_enable_expert_bias=False).bfloat16(), OtherRouter(None)])
        assert moe.recast_expert_bias(model) == 0
        assert widen_calls == []

    def test_buffer_of_two_routers(self, widen_calls: list[Call]) -> None:
        bias = torch.randn(EXPERTS).bfloat16()
        first, second = OtherRouter(bias), OtherRouter(bias)
        assert moe.recast_expert_bias([first, second]) == 1
        assert first.expert_bias is second.expert_bias is bias
        assert bias.dtype == torch.float32

    @needs_quantile_balancing
    def test_state_dict_round_trip(self) -> None:
        source = nn.ModuleList([make_router(), quantile_router()]).bfloat16()
        moe.recast_expert_bias(source)
        fill(*source)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target = nn.ModuleList([make_router(), quantile_router()]).bfloat16()
        moe.recast_expert_bias(target)
        target.load_state_dict(torch.load(file))
        assert torch.equal(target[0].expert_bias, source[0].expert_bias)
        assert torch.equal(target[1].qb_beta, source[1].qb_beta)


class TestMoEFloat16Module:
    def test_is_a_float16_module(self) -> None:
        assert issubclass(moe.MoEFloat16Module, Float16Module)
        assert moe.MoEFloat16Module is moe.MoEFloat16Module
        assert pickle.loads(pickle.dumps(moe.MoEFloat16Module)) is moe.MoEFloat16Module
        assert moe.MoEFloat16Module.__module__ == "megasetup.moe"

    def test_unknown_name(self) -> None:
        with pytest.raises(AttributeError, match=r"'megasetup\.moe' has no attribute 'MoEFloat32Module'"):
            _ = moe.MoEFloat32Module

    def test_import_loads_no_megatron(self) -> None:
        program = "import sys, megasetup.moe; print(any(name.split('.')[0] == 'megatron' for name in sys.modules))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"

    @needs_quantile_balancing
    @pytest.mark.parametrize(
        ("flags", "dtype"),
        [
            ({"bf16": True}, torch.bfloat16),
            ({"bf16": False, "fp16": True, "params_dtype": torch.float16}, torch.float16),
        ],
    )
    def test_float32_keeps_all_its_bits(
        self, flags: dict[str, object], dtype: torch.dtype, widen_calls: list[Call]
    ) -> None:
        model = nn.ModuleList([make_router(), nest("thinker.router", quantile_router())])
        routers = [router for _, router in moe.find_routers(model)]
        values = fill(*routers)
        wrapped = moe.MoEFloat16Module(make_config(**flags), model)
        assert wrapped.module is model
        held = [buffer for router in routers for buffer in router.buffers() if buffer.dtype == torch.float32]
        assert {id(buffer) for buffer in held} == {id(buffer) for buffer in values}
        for buffer, right in values.items():
            assert torch.equal(buffer, right)
        assert widen_calls == []
        assert {parameter.dtype for parameter in wrapped.parameters()} == {dtype}
        assert routers[1].qb_beta_count.dtype == torch.long

    def test_values_that_were_bf16_are_recast(self, widen_calls: list[Call]) -> None:
        model = nn.ModuleList([make_router().bfloat16(), make_router(), make_router().half()])
        kept = fill(model[1])
        model[0].expert_bias.copy_(torch.randn(EXPERTS))
        model[2].expert_bias.fill_(0.5)
        expected = model[0].expert_bias.float()
        moe.MoEFloat16Module(make_config(), model)
        # Megatron's conversion has made BF16 of the FP16 router.
        assert widen_calls == [("cpu", torch.bfloat16, 4)]
        assert torch.equal(model[0].expert_bias, expected)
        assert torch.equal(model[2].expert_bias, torch.full((EXPERTS,), 0.5))
        for buffer, right in kept.items():
            assert torch.equal(buffer, right)
        assert {
            router._buffers[name].dtype for router in model for name in ("expert_bias", "local_tokens_per_expert")
        } == {torch.float32}

    def test_re_enable_after_a_later_cast(self, widen_calls: list[Call]) -> None:
        wrapped = moe.MoEFloat16Module(make_config(), nn.ModuleList([make_router(), make_router()]))
        wrapped.bfloat16()
        assert wrapped.module[0].expert_bias.dtype == torch.bfloat16
        assert wrapped.re_enable_float32_expert_bias() is None
        assert widen_calls == [("cpu", torch.bfloat16, 4)]
        assert {router.expert_bias.dtype for router in wrapped.module} == {torch.float32}

    def test_meta_model(self) -> None:
        router = make_router().to("meta")
        moe.MoEFloat16Module(make_config(), router)
        assert (router.expert_bias.dtype, router.expert_bias.device.type) == (torch.float32, "meta")
        assert router.weight.dtype == torch.bfloat16

    def test_neither_bf16_nor_fp16(self) -> None:
        config = make_config(bf16=False, params_dtype=torch.float32)
        router = make_router(bf16=False, params_dtype=torch.float32)
        with pytest.raises(Exception, match=r"Either config\.fp16 or config\.bf16 should be True") as ours:
            moe.MoEFloat16Module(config, router)
        with pytest.raises(Exception, match=r"Either config\.fp16 or config\.bf16 should be True") as theirs:
            Float16Module(config, router)
        assert type(ours.value) is type(theirs.value)
        assert {tensor.dtype for tensor in router.state_dict().values()} == {torch.float32}

    def test_real_model(self, gpt_model: GPTModel, widen_calls: list[Call]) -> None:
        routers = [router for _, router in moe.find_routers(gpt_model)]
        values = fill(*routers)
        assert len(values) == 2 * len(GPT_ROUTERS)
        wrapped = moe.MoEFloat16Module(gpt_model.config, gpt_model)
        assert [name for name, _ in moe.find_routers(wrapped)] == [f"module.{name}" for name in GPT_ROUTERS]
        for buffer, right in values.items():
            assert torch.equal(buffer, right)
        saved = wrapped.state_dict()
        assert {saved[f"{name}.expert_bias"].dtype for name in GPT_ROUTERS} == {torch.float32}
        assert {parameter.dtype for parameter in wrapped.parameters()} == {torch.bfloat16}
        assert widen_calls == []

    def test_forward_runs_in_bf16_and_counts_in_fp32(self, gpt_model: GPTModel) -> None:
        layer = gpt_model.decoder.layers[1].mlp
        wrapped = moe.MoEFloat16Module(gpt_model.config, layer)
        # A count that BF16 cannot step from: it would stay at 256.
        layer.router.local_tokens_per_expert.fill_(256)
        bias = torch.full((EXPERTS,), -10.0)
        bias[2:4] = 10.0
        layer.router.expert_bias.copy_(bias)
        output, _ = wrapped(torch.randn(5, 1, 16), fp32_output=False)
        assert output.dtype == torch.bfloat16
        expected = torch.full((EXPERTS,), 256.0)
        expected[2:4] = 261.0
        assert torch.equal(layer.router.local_tokens_per_expert, expected)
        output, _ = wrapped(torch.randn(5, 1, 16))
        assert output.dtype == torch.float32
