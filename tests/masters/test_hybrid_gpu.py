"""PipelinedHybridOptimizer within real Megatron optimizers on a GPU, against the stock class bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from real_megatron import build, parallel_state_of, train
from resume_cases import ASYNCHRONOUS, OF_TWO_RANKS, SYNCHRONOUS, Case
from resume_runs import assert_resumed, assert_same, run
from standins import assert_exact, load_new_weights

from megasetup.kernels import native_status
from megasetup.masters import audit_master_weights, sync_master_weights
from megasetup.masters.hybrid import PipelinedHybridOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore", "error:megasetup")]

BOTH_MODES = pytest.mark.parametrize("precision_aware", [False, True], ids=["standard", "precision-aware"])
BOTH_FRACTIONS = pytest.mark.parametrize("fraction", [0.3, 1.0])
BOTH_OVERLAPS = pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with parallel_state_of(0, 1, torch.distributed.HashStore()):
        yield


@pytest.fixture
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, and several chunks of the one large weight, although the model is small."""
    monkeypatch.setattr(PipelinedHybridOptimizer, "bucket_elements", 30_000)
    monkeypatch.setattr(PipelinedHybridOptimizer, "chunk_elements", 1 << 20)


def hybrid_of(optimizer: Any) -> Any:
    (part,) = optimizer.chained_optimizers
    return part.optimizer


def everything(chunk: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """All weights, masters, moments and step counts, on the host."""
    hybrid = hybrid_of(optimizer)
    found = {f"weight {name}": parameter for name, parameter in chunk.named_parameters()}
    for group_index, group in enumerate(hybrid.param_groups):
        for index, param in enumerate(group["params"]):
            place = f"{group_index}.{index}"
            found[f"param {place}"] = param
            found[f"master {place}"] = hybrid.param_to_inner_param[param]
            for key, value in hybrid.state[param].items():
                found[f"{key} {place}"] = torch.as_tensor(value)
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def both(steps: int, *, overlap: bool = False, **settings: Any) -> tuple[Any, Any]:
    """(chunk, optimizer) of the stock class without overlap and of ours, from the same weights, after some steps.

    Without overlap, because with it the stock class has its GPU optimizer read gradients that another stream may still
    be writing.
    """
    pairs = []
    for fast in (False, True):
        torch.manual_seed(5)
        chunk, optimizer = build(fast=fast, overlap=fast and overlap, **settings)
        assert (type(hybrid_of(optimizer)) is PipelinedHybridOptimizer) == fast
        train(chunk, optimizer, steps)
        pairs.append((chunk, optimizer))
    return pairs[0], pairs[1]


@pytest.mark.usefixtures("_small_buckets")
@BOTH_OVERLAPS
@BOTH_FRACTIONS
@BOTH_MODES
def test_ten_steps_equal_the_stock_class(precision_aware: bool, fraction: float, overlap: bool) -> None:
    stock, ours = both(10, precision_aware=precision_aware, fraction=fraction, overlap=overlap)
    assert len(hybrid_of(ours[1])._buckets) > 2 or fraction < 1.0
    assert_same(everything(*ours), everything(*stock))


@pytest.mark.usefixtures("_small_buckets")
@BOTH_FRACTIONS
@BOTH_MODES
def test_ten_steps_with_bf16_gradients(precision_aware: bool, fraction: float) -> None:
    stock, ours = both(
        10,
        precision_aware=precision_aware,
        fraction=fraction,
        overlap=True,
        fp32_router=False,
        reduce_in_fp32=False,
    )
    assert_same(everything(*ours), everything(*stock))


@BOTH_MODES
def test_ten_steps_in_fp16(precision_aware: bool) -> None:
    stock, ours = both(10, precision_aware=precision_aware, fraction=1.0, dtype=torch.float16)
    assert_same(everything(*ours), everything(*stock))


@BOTH_MODES
def test_made_once_in_one_pinned_arena(precision_aware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = PipelinedHybridOptimizer.make
    monkeypatch.setattr(PipelinedHybridOptimizer, "make", lambda hybrid: (made.append(hybrid), make(hybrid))[1])
    _, optimizer = build(precision_aware=precision_aware, fraction=1.0, fast=True)
    hybrid = hybrid_of(optimizer)
    assert made == [hybrid]
    assert isinstance(hybrid, HybridDeviceOptimizer)
    clones = list(hybrid.cpu_copys_map_gpu_param)
    buffers = {bucket.grads.data_ptr(): bucket.grads for bucket in hybrid._buckets}
    assert len(clones) == 6
    assert {tensor.is_pinned() for tensor in (*clones, *buffers.values())} == {native_status().gpu}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in clones)
    arena = hybrid._arenas[0]
    addresses = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in (*clones, *buffers.values()))
    assert addresses[-1][0] + addresses[-1][1] - addresses[0][0] <= arena.nbytes
    needed = sum(tensor.nbytes for tensor in (*clones, *buffers.values()))
    assert hybrid.pinned_bytes == (arena.nbytes if native_status().gpu else 0)
    assert arena.nbytes <= 1.01 * needed + 4096


@BOTH_MODES
def test_the_masters_are_read_and_refreshed(precision_aware: bool) -> None:
    chunk, optimizer = build(precision_aware=precision_aware, fraction=1.0, fast=True)
    assert audit_master_weights(optimizer, chunk).ok
    load_new_weights(chunk)
    sync_master_weights(optimizer, chunk)
    assert_exact(optimizer.chained_optimizers[0])
    load_new_weights(chunk)
    optimizer.reload_model_params()
    if precision_aware:
        assert_exact(optimizer.chained_optimizers[0])


@pytest.mark.usefixtures("_small_buckets")
@BOTH_MODES
def test_what_was_moved_comes_back_into_pinned_memory(precision_aware: bool) -> None:
    stock, ours = both(3, precision_aware=precision_aware, fraction=1.0)
    clones = list(hybrid_of(ours[1]).cpu_copys_map_gpu_param)
    for clone in clones:
        clone.share_memory_()
    assert not any(clone.is_pinned() for clone in clones)
    for pair in (stock, ours):
        train(*pair, 2, first=3)
    assert_same(everything(*ours), everything(*stock))
    assert {clone.is_pinned() for clone in clones} == {native_status().gpu}


class Raising(torch.optim.AdamW):
    """torch's AdamW, whose steps raise when they are told to."""

    steps_left: ClassVar[int] = -1

    def step(self, closure: Any = None) -> Any:
        Raising.steps_left -= 1
        if Raising.steps_left == 0:
            raise KeyboardInterrupt
        return super().step(closure)


def stepped_over_millions(steps: range, *, cut_off: bool) -> list[torch.Tensor]:
    """What parameters, masters and moments come to, with a step that is cut off and a load before the last one or not.

    Of buckets so long that copies are under way when it is cut off.
    """
    generator = torch.Generator("cuda").manual_seed(4)
    drawn = [torch.randn(count, device="cuda", generator=generator) for count in (40_000_000, 5, 3_000_000)]
    params = [param.bfloat16() for param in drawn]
    hybrid = PipelinedHybridOptimizer(
        params,
        offload_fraction=1.0,
        cpu_optimizer_cls=Raising,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        lr=0.01,
        fused=True,
    )
    for step in steps:
        for param in params:
            param.grad = torch.randn(param.shape, device="cuda", generator=generator).bfloat16()
        if cut_off and step == steps[-1]:
            saved, values = copy.deepcopy(hybrid.state_dict()), [param.clone() for param in params]
            Raising.steps_left = 2
            with pytest.raises(KeyboardInterrupt):
                hybrid.step()
            assert all(lane.to_host.query() and lane.to_device.query() for lane in hybrid._lanes)
            with pytest.raises(RuntimeError, match="KeyboardInterrupt when 1 of"):
                hybrid.step()
            with torch.no_grad():
                for param, value in zip(params, values, strict=True):
                    param.copy_(value)
            hybrid.load_state_dict(saved)
        hybrid.step()
    torch.cuda.synchronize()
    states = [hybrid.state[param] for param in params]
    return [*params, *(entry[name] for entry in states for name in ("master_param", "exp_avg", "exp_avg_sq", "step"))]


def test_a_step_that_is_cut_off_leaves_nothing_under_way() -> None:
    uninterrupted = stepped_over_millions(range(3), cut_off=False)
    again = stepped_over_millions(range(3), cut_off=True)
    assert all(map(torch.equal, again, uninterrupted))


class TestFaultsOfTheStockClass:
    def pair_of_states(self, fast: bool, **settings: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        chunk, optimizer = build(fast=fast, **settings)
        train(chunk, optimizer, 3)
        hybrid = hybrid_of(optimizer)
        state = copy.deepcopy(hybrid.state_dict())
        before = everything(chunk, optimizer)
        train(chunk, optimizer, 2, seed=9)
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                parameter.copy_(before[f"weight {name}"])
            for group_index, group in enumerate(hybrid.param_groups):
                for index, param in enumerate(group["params"]):
                    param.copy_(before[f"param {group_index}.{index}"])
        hybrid.load_state_dict(state)
        return chunk, optimizer, before

    @BOTH_FRACTIONS
    @BOTH_MODES
    def test_a_state_dict_loads(self, precision_aware: bool, fraction: float) -> None:
        settings: dict[str, Any] = {"precision_aware": precision_aware, "fraction": fraction, "fp32_router": True}
        with pytest.raises(KeyError):
            self.pair_of_states(False, **settings)
        chunk, optimizer, before = self.pair_of_states(True, **settings)
        assert_same(everything(chunk, optimizer), before)

    @staticmethod
    def stepped_without_a_gradient(kind: type) -> tuple[torch.Tensor, torch.Tensor]:
        """A parameter before and after a step in which only another one has a gradient."""
        params = [torch.ones(40, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        hybrid = kind(
            params,
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            lr=0.1,
        )
        for param in params:
            param.grad = torch.ones_like(param)
        hybrid.step()
        torch.cuda.synchronize()
        before = hybrid.gpu_params_map_cpu_copy[params[1]].clone()
        params[1].grad = None
        hybrid.step()
        torch.cuda.synchronize()
        return before, hybrid.gpu_params_map_cpu_copy[params[1]]

    def test_no_gradient_no_step(self) -> None:
        before, after = self.stepped_without_a_gradient(HybridDeviceOptimizer)
        assert not torch.equal(before, after)
        before, after = self.stepped_without_a_gradient(PipelinedHybridOptimizer)
        assert torch.equal(before, after)

    @staticmethod
    def over_two_of_which_one_stays(kind: type) -> tuple[Any, list[torch.Tensor]]:
        """A hybrid optimizer over a BF16 parameter, which is offloaded, and a natively FP32 one, which is not."""
        params = [torch.ones(40, device="cuda", dtype=torch.bfloat16), torch.ones(10, device="cuda")]
        hybrid = kind(
            params,
            offload_fraction=0.5,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            lr=0.1,
        )
        for param in params:  # as DistributedOptimizer does in precision-aware mode
            param.decoupled_grad = torch.ones(param.shape, device="cuda")
        return hybrid, params

    def test_a_natively_fp32_parameter_on_the_gpu_is_stepped(self) -> None:
        for kind in (HybridDeviceOptimizer, PipelinedHybridOptimizer):
            hybrid, params = self.over_two_of_which_one_stays(kind)
            hybrid.step()
            torch.cuda.synchronize()
            assert (params[0] < 1).all()
            assert (params[1] < 1).all() == (kind is PipelinedHybridOptimizer)
            assert params[1].grad is None

    def test_a_late_group(self) -> None:
        """Megatron's class takes it and cannot step any more; ours does not take it."""
        stock, _ = self.over_two_of_which_one_stays(HybridDeviceOptimizer)
        stock.add_param_group({"params": [torch.ones(3, device="cuda")]})
        with pytest.raises(KeyError):
            stock.step()
        ours, _ = self.over_two_of_which_one_stays(PipelinedHybridOptimizer)
        ours.step()
        with pytest.raises(NotImplementedError):
            ours.add_param_group({"params": [torch.ones(3, device="cuda")]})
        ours.step()

    @BOTH_MODES
    def test_a_checkpoint_holds_each_parameter_as_itself(self, precision_aware: bool) -> None:
        for fast in (False, True):
            chunk, optimizer = build(precision_aware=precision_aware, fraction=1.0, fp32_router=True, fast=fast)
            train(chunk, optimizer, 1)
            (part,) = optimizer.chained_optimizers
            saved = {param: part._get_main_param_and_optimizer_states(param) for param in chunk.parameters()}
            sizes = [tensors["param"].numel() == param.numel() for param, tensors in saved.items()]
            assert all(sizes) == fast

    def test_clones_are_pinned_in_precision_aware_mode(self) -> None:
        for fast in (False, True):
            _, optimizer = build(precision_aware=True, fraction=1.0, fp32_router=False, fast=fast)
            clones = hybrid_of(optimizer).gpu_params_map_cpu_copy.values()
            assert {clone.is_pinned() for clone in clones} == {fast and native_status().gpu}


@pytest.fixture(scope="module")
def resumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes, one after the other, have left all cases of one rank."""
    return run(tmp_path_factory.mktemp("resumes"), 1)


@pytest.fixture(scope="module")
def resumes_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("resumes-of-two"), 2)


@pytest.mark.parametrize("case", SYNCHRONOUS, ids=lambda case: case.name)
def test_resume_is_exact(case: Case, resumes: Path) -> None:
    assert_resumed(resumes, case, 1)


@pytest.mark.parametrize("case", ASYNCHRONOUS, ids=lambda case: case.name)
def test_resume_from_an_asynchronous_save(case: Case, resumes: Path) -> None:
    (reached,) = assert_resumed(resumes, case, 1)
    assert len(reached["pinned"]) > 0
    assert reached["pinned"].all() == native_status().gpu


@pytest.mark.multigpu
@pytest.mark.parametrize("case", OF_TWO_RANKS, ids=lambda case: case.name)
def test_resume_with_expert_parallelism(case: Case, resumes_of_two: Path) -> None:
    assert_resumed(resumes_of_two, case, 2)
