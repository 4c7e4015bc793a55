"""PipelinedHybridOptimizer over parameters on the host, against torch's AdamW over whole FP32 copies, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import weakref
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megasetup.compat import async_save, hybrid_optimizer
from megasetup.masters import hybrid_buckets, hybrid_traffic
from megasetup.masters.arena import ArenaError
from megasetup.masters.hybrid import PipelinedHybridOptimizer
from megasetup.masters.populating import Populating

# One with a tail that is no multiple of a vector, in several slices; short ones that share a bucket; an empty one.
SHAPES = ((911, 37), (33,), (64, 5), (0,), (3001,), (128, 129))


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelinedHybridOptimizer, "bucket_elements", 4096)


def weights(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradients(step: int, missing: int | None = None) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    found = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    return [None if index == missing else gradient for index, gradient in enumerate(found)]


def hybrid_over(
    params: list[torch.Tensor], *, fused: bool = True, optimizer: type = torch.optim.AdamW
) -> PipelinedHybridOptimizer:
    return PipelinedHybridOptimizer(
        [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}],
        offload_fraction=1.0,
        cpu_optimizer_cls=optimizer,
        gpu_optimizer_cls=optimizer,
        param_update_in_fp32=True,
        lr=0.01,
        fused=fused,
    )


def train(
    hybrid: PipelinedHybridOptimizer, params: list[torch.Tensor], steps: range, missing: int | None = None
) -> None:
    for step in steps:
        for param, gradient in zip(params, gradients(step, missing), strict=True):
            param.grad = gradient
        for group in hybrid.param_groups:
            group["lr"] = 0.01 / (1 + step)
        hybrid.step()


def everything(hybrid: PipelinedHybridOptimizer) -> dict[str, torch.Tensor]:
    found = {}
    for place, param in enumerate(param for group in hybrid.param_groups for param in group["params"]):
        found[f"param {place}"] = param
        found[f"master {place}"] = hybrid.param_to_inner_param[param]
        found |= {f"{key} {place}": torch.as_tensor(value) for key, value in hybrid.state[param].items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_same(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


def reference(steps: range, *, fused: bool = True, missing: int | None = None) -> dict[str, torch.Tensor]:
    """torch's AdamW over whole FP32 copies."""
    params = weights()
    masters = [param.float() for param in params]
    optimizer = torch.optim.AdamW(
        [{"params": masters[:2], "weight_decay": 0.1}, {"params": masters[2:], "weight_decay": 0.0}], fused=fused
    )
    for step in steps:
        for master, gradient in zip(masters, gradients(step, missing), strict=True):
            master.grad = None if gradient is None else gradient.float()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
    found = {}
    for place, (param, master) in enumerate(zip(params, masters, strict=True)):
        found[f"param {place}"] = master.to(param.dtype)
        found[f"master {place}"] = master
        found |= {f"{key} {place}": value for key, value in optimizer.state[master].items()}
        if optimizer.state[master]:
            found[f"master_param {place}"] = master
    return found


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ahead", [1, 2, 6])
def test_steps_equal_those_over_whole_tensors(ahead: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelinedHybridOptimizer, "buckets_ahead", ahead)
    params = weights()
    hybrid = hybrid_over(params, fused=fused)
    train(hybrid, params, range(5))
    assert_same(everything(hybrid), reference(range(5), fused=fused))
    sliced = [bucket for bucket in hybrid._buckets if bucket.sliced is not None]
    assert len(sliced) == (9 + 5 if fused else 0)
    assert all(bucket.grads.numel() <= 4096 for bucket in sliced)


def test_sub_optimizers_hold_whole_masters() -> None:
    params = weights()
    hybrid = hybrid_over(params)
    train(hybrid, params, range(2))
    held = [master for optimizer in hybrid.cpu_optimizers for master in optimizer.param_groups[0]["params"]]
    assert {id(master) for master in held} == {id(hybrid.param_to_inner_param[param]) for param in params}
    for optimizer in hybrid.cpu_optimizers:
        for master in optimizer.param_groups[0]["params"]:
            entry = optimizer.state[master]
            assert hybrid.state[hybrid.inner_param_to_orig_param[master]] is entry
            assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == master.shape
            assert entry["step"] == 2
            assert master.grad is None


@pytest.mark.parametrize("missing", [0, 1])
def test_no_gradient_no_step(missing: int) -> None:
    params = weights()
    hybrid = hybrid_over(params)
    train(hybrid, params, range(3), missing=missing)
    assert_same(everything(hybrid), reference(range(3), missing=missing))
    before = everything(hybrid)
    other = 1 - missing
    train(hybrid, params, range(3, 4), missing=other)
    after = everything(hybrid)
    assert torch.equal(after[f"master {other}"], before[f"master {other}"])
    assert after[f"step {other}"] == 3
    assert after[f"step {missing}"] == 1


def test_resume_is_exact() -> None:
    params = weights()
    first = hybrid_over(params)
    train(first, params, range(3))
    state = copy.deepcopy(first.state_dict())
    resumed_params = [param.clone() for param in params]
    resumed = hybrid_over(resumed_params)
    train(resumed, resumed_params, range(7, 9))  # something else, in the same memory
    with torch.no_grad():
        for param, saved in zip(resumed_params, params, strict=True):
            param.copy_(saved)
    resumed.load_state_dict(state)
    train(resumed, resumed_params, range(3, 6))
    assert_same(everything(resumed), reference(range(6)))


def test_counts_that_were_loaded_as_one_tensor_are_counted_apart() -> None:
    """Megatron loads them so where there is no Transformer Engine."""
    params = weights()
    hybrid = hybrid_over(params)
    train(hybrid, params, range(3))
    state = hybrid.state_dict()
    count = torch.tensor(3.0)
    for entry in state["state"].values():
        entry["step"] = count
    hybrid.load_state_dict(state)
    train(hybrid, params, range(3, 5))
    assert_same(everything(hybrid), reference(range(5)))


def test_state_that_was_replaced_is_what_is_stepped() -> None:
    params = weights()
    hybrid = hybrid_over(params)
    train(hybrid, params, range(2))
    for entry in hybrid.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name] = entry[name].clone()
    train(hybrid, params, range(2, 4))
    assert_same(everything(hybrid), reference(range(4)))


def test_gradients_pass_through_a_short_ring() -> None:
    hybrid = hybrid_over(weights())
    hybrid.make()
    runs = {(bucket.grads.data_ptr(), bucket.grads.nbytes) for bucket in hybrid._buckets}
    assert len({address for address, _ in runs}) == PipelinedHybridOptimizer.buckets_ahead + 1
    buffers = hybrid.gradient_buffers
    assert {buffer.data_ptr() for buffer in buffers} == {address for address, _ in runs}
    for buffer in buffers:
        assert buffer.nbytes == max(nbytes for address, nbytes in runs if address == buffer.data_ptr())
    masters, moments = hybrid._arenas
    elements = sum(param.numel() for param in hybrid.param_to_inner_param)
    assert 4 * elements <= masters.nbytes <= 4 * (elements + 3 * 4096) + 4096 + 64 * 2 * len(SHAPES)
    assert 8 * elements <= moments.nbytes <= 8 * elements + 4096 + 64 * 4 * len(SHAPES)
    assert hybrid.pinned_bytes == (masters.nbytes if masters.is_pinned else 0)


def test_the_constructor_makes_nothing() -> None:
    hybrid = hybrid_over(weights())
    assert not hybrid.is_made
    assert hybrid.pinned_bytes == 0
    assert len(hybrid.cpu_optimizers) == 4  # in each group one for the long tensor and one for the short ones
    assert hybrid.is_made


def test_dropped_it_gives_its_memory_back_at_once() -> None:
    hybrid = hybrid_over(weights())
    train(hybrid, [param for group in hybrid.param_groups for param in group["params"]], range(1))
    memory = [weakref.ref(arena._memory) for arena in hybrid._arenas]
    del hybrid
    assert [held() for held in memory] == [None, None]


def test_made_anew_it_begins_anew() -> None:
    params = weights()
    hybrid = hybrid_over(params)
    train(hybrid, params, range(7, 9))
    with torch.no_grad():
        for param, value in zip(params, weights(), strict=True):
            param.copy_(value)
    hybrid.make()
    assert hybrid.state_dict()["state"] == {}
    train(hybrid, params, range(3))
    assert_same(everything(hybrid), reference(range(3)))


def test_a_closure_is_evaluated_once_and_its_gradients_count() -> None:
    params = weights()
    hybrid = hybrid_over(params)
    losses = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        for param, gradient in zip(params, gradients(0), strict=True):
            param.grad = gradient
        losses.append(0.25)
        return losses[-1]

    assert hybrid.step(closure) == 0.25
    assert losses == [0.25]
    assert_same(everything(hybrid), reference(range(1)))


def test_gradients_beside_grad_are_each_stepped_with_once() -> None:
    """Megatron's decoupled_grad, on copied parameters and on such as are stepped as they are."""
    params = [param.float() if place in (1, 4) else param for place, param in enumerate(weights())]
    hybrid = hybrid_over(params)
    for param, gradient in zip(params, gradients(0), strict=True):
        param.decoupled_grad = gradient.float()
    hybrid.step()
    before = everything(hybrid)
    assert all(param.grad is None for param in params)
    hybrid.zero_grad()
    hybrid.step()
    assert_same(everything(hybrid), before)


class TestGroups:
    """Parameters that come late."""

    def test_a_group_can_be_added_before_the_first_use(self) -> None:
        params = weights()
        hybrid = PipelinedHybridOptimizer(
            [{"params": params[:2], "weight_decay": 0.1}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            lr=0.01,
            fused=True,
        )
        hybrid.add_param_group({"params": params[2:], "weight_decay": 0.0})
        train(hybrid, params, range(3))
        assert_same(everything(hybrid), reference(range(3)))

    def test_later_it_is_refused_and_nothing_is_changed(self) -> None:
        params = weights()
        hybrid = hybrid_over(params)
        train(hybrid, params, range(2))
        late = {"params": [torch.ones(3)]}
        with pytest.raises(NotImplementedError, match="give the constructor all groups"):
            hybrid.add_param_group(late)
        assert len(hybrid.param_groups) == 2
        assert late.keys() == {"params"}
        train(hybrid, params, range(2, 4))
        assert_same(everything(hybrid), reference(range(4)))

    def test_megatrons_class_takes_it_and_cannot_step_any_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # It asks for the GPU's current stream whatever it is given; nothing is done with it here.
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        stock = HybridDeviceOptimizer(
            weights(),
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            overlap_cpu_optimizer_d2h_h2d=False,
            lr=0.01,
        )
        stock._sync_hdo_param_groups_to_sub_optimizers()
        stock.add_param_group({"params": [torch.ones(3)]})
        with pytest.raises(KeyError):
            stock.step()

    def test_a_parameter_that_is_put_into_a_group_is_named(self) -> None:
        params = weights()
        hybrid = hybrid_over(params)
        train(hybrid, params, range(1))
        hybrid.param_groups[0]["params"].append(torch.ones(3, 7))
        before = [master.clone() for master in hybrid.inner_param_to_orig_param]
        with pytest.raises(ValueError, match=r"shape \(3, 7\)"):
            hybrid.step()
        assert all(map(torch.equal, hybrid.inner_param_to_orig_param, before))


class CutOff(torch.optim.AdamW):
    """torch's AdamW, one of whose steps raises, before it steps or after."""

    steps_left: ClassVar[int] = -1
    error: ClassVar[BaseException]
    is_stepped: ClassVar[bool]

    def step(self, closure: Any = None) -> Any:
        kind = type(self)
        kind.steps_left -= 1
        if kind.steps_left == 0 and not kind.is_stepped:
            raise kind.error
        super().step(closure)
        if kind.steps_left == 0:
            raise kind.error


class TestAStepThatIsCutOff:
    BUCKETS = 9 + 5 + 2

    @staticmethod
    def next_step(hybrid: PipelinedHybridOptimizer, params: list[torch.Tensor], step: int) -> None:
        train(hybrid, params, range(step, step + 1))

    @pytest.fixture
    def trained(self) -> tuple[PipelinedHybridOptimizer, list[torch.Tensor]]:
        params = weights()
        hybrid = hybrid_over(params, optimizer=CutOff)
        train(hybrid, params, range(2))
        return hybrid, params

    @pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
    @pytest.mark.parametrize("is_stepped", [False, True])
    @pytest.mark.parametrize("at", [1, 7, BUCKETS])
    def test_is_followed_by_no_other_before_a_load(
        self,
        at: int,
        is_stepped: bool,
        error: BaseException,
        trained: tuple[PipelinedHybridOptimizer, list[torch.Tensor]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        hybrid, params = trained
        saved = copy.deepcopy((hybrid.state_dict(), params))
        for name, value in (("steps_left", at), ("is_stepped", is_stepped), ("error", error)):
            monkeypatch.setattr(CutOff, name, value, raising=False)
        with pytest.raises(type(error)) as caught:
            self.next_step(hybrid, params, 2)
        assert caught.value is error
        said = rf"{type(error).__name__} when {at - 1} of {self.BUCKETS} buckets"
        assert re.search(said, error.__notes__.pop())
        assert all(row.stepped.grad is None for bucket in hybrid._buckets for row in bucket.rows)
        before = [tensor.clone() for tensor in hybrid.param_to_inner_param.values()]
        with pytest.raises(RuntimeError, match=said):
            self.next_step(hybrid, params, 2)
        assert all(map(torch.equal, hybrid.param_to_inner_param.values(), before))

        with torch.no_grad():
            for param, value in zip(params, saved[1], strict=True):
                param.copy_(value)
        hybrid.load_state_dict(saved[0])
        train(hybrid, params, range(2, 5))
        assert_same(everything(hybrid), reference(range(5)))

    def test_before_anything_was_stepped_is_taken_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PipelinedHybridOptimizer, "buckets_ahead", self.BUCKETS)
        params = weights()
        hybrid = hybrid_over(params)
        train(hybrid, params, range(2))
        params[4].decoupled_grad = torch.ones(5)
        with pytest.raises(ValueError, match="5") as caught:
            self.next_step(hybrid, params, 2)
        assert not hasattr(caught.value, "__notes__")
        assert all(row.stepped.grad is None for bucket in hybrid._buckets for row in bucket.rows)
        del params[4].decoupled_grad
        train(hybrid, params, range(2, 4))
        assert_same(everything(hybrid), reference(range(4)))

    def test_by_memory_that_does_not_come(self) -> None:
        def check(missing: int) -> None:
            raise ArenaError("too little")

        params = weights()
        hybrid = hybrid_over(params)
        hybrid.make()
        populating = hybrid._populating
        hybrid._populating = Populating(None, 0, 1, threads=1, check=check)
        with pytest.raises(ArenaError, match="too little"):
            self.next_step(hybrid, params, 0)
        hybrid._populating = populating
        train(hybrid, params, range(2))
        assert_same(everything(hybrid), reference(range(2)))

    def test_is_not_forgotten_over_a_dummy_step_that_fails(
        self, trained: tuple[PipelinedHybridOptimizer, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hybrid, params = trained
        for name, value in (("steps_left", 3), ("is_stepped", False), ("error", RuntimeError())):
            monkeypatch.setattr(CutOff, name, value, raising=False)
        with pytest.raises(RuntimeError):
            self.next_step(hybrid, params, 2)

        def no_memory(_: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(torch, "randn_like", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            hybrid.dummy_step()
        with pytest.raises(RuntimeError, match="cut off"):
            hybrid.step()

    def test_the_first_one_is_healed_by_a_load_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Megatron takes a step to make the state into which it loads."""
        params = weights()
        hybrid = hybrid_over(params, optimizer=CutOff)
        for name, value in (("steps_left", 3), ("is_stepped", False), ("error", RuntimeError())):
            monkeypatch.setattr(CutOff, name, value, raising=False)
        with pytest.raises(RuntimeError):
            self.next_step(hybrid, params, 0)
        assert len(hybrid.state) == 0
        hybrid.dummy_step()
        with pytest.raises(RuntimeError, match="cut off"):
            hybrid.step()
        fresh = hybrid_over(weights())
        with torch.no_grad():
            for param, value in zip(params, weights(), strict=True):
                param.copy_(value)
        hybrid.load_state_dict(fresh.state_dict())
        train(hybrid, params, range(2))
        assert_same(everything(hybrid), reference(range(2)))


class TestBuckets:
    def test_short_tensors_share_a_bucket_and_long_ones_have_their_own(self) -> None:
        assert hybrid_buckets.group([3, 20, 4, 5, 1], 10) == [[0, 2], [1], [3, 4]]
        assert hybrid_buckets.group([3, 20, 2, 5], 10) == [[0, 2, 3], [1]]
        assert hybrid_buckets.group([], 10) == []

    @pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 4096, 4097, 33_707, 233_373_696])
    def test_slices_cover_a_tensor_from_multiples_of_64(self, count: int) -> None:
        limit = 4096 if count < 10**6 else 8 * 1024 * 1024
        found = hybrid_buckets.slices(count, limit)
        assert found[0][0] == 0
        assert found[-1][1] == count
        assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
        assert all(first % 64 == 0 and 0 < last - first <= limit for first, last in found)
        assert len(found) == -(-count // limit)

    def test_the_smallest_are_first_and_last(self) -> None:
        assert hybrid_buckets.large_in_the_middle([5, 1, 4, 2, 3], lambda item: item) == [1, 3, 5, 4, 2]

    def test_chunks(self) -> None:
        counts = [10, 100, 40, 2_000_000]
        places = hybrid_buckets.place(counts, torch.float32)
        assert places == ((0, 16, 128, 176), 2_000_176)
        chunks = hybrid_buckets.cut(counts, places, [False, True, False, False], 1_500_000)
        assert [(chunk.start, chunk.end) for chunk in chunks] == [
            (0, 10),
            (16, 116),
            (128, 168),
            (176, 1_500_176),
            (1_500_176, 2_000_176),
        ]
        assert chunks[-1].parts == ((3, 1_500_000, 2_000_000, 0),)


def test_staging_is_as_long_as_what_is_converted_or_gathered() -> None:
    hybrid = hybrid_over(weights())
    hybrid.make()
    slices = [bucket for bucket in hybrid._buckets if bucket.sliced is not None]
    assert hybrid_traffic.staging_for(slices) == max(bucket.masters.numel() for bucket in slices) == 3776
    as_they_are = [
        dataclasses.replace(bucket, rows=tuple(row._replace(param=row.param.float()) for row in bucket.rows))
        for bucket in hybrid._buckets
    ]
    assert hybrid_traffic.staging_for(bucket for bucket in as_they_are if bucket.sliced is not None) == 0
    assert hybrid_traffic.staging_for(as_they_are) == 320 + 3001  # two short ones that share a bucket


class TestInstaller:
    def made(self) -> Any:
        return HybridDeviceOptimizer(
            weights(),
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
        )

    def test_megatrons_class_makes_ours_until_it_is_taken_out(self) -> None:
        stock = HybridDeviceOptimizer.__init__
        with hybrid_optimizer.fast_hybrid_optimizer():
            with hybrid_optimizer.fast_hybrid_optimizer():
                assert type(self.made()) is PipelinedHybridOptimizer
            assert hybrid_optimizer.is_installed()
            assert type(self.made()) is PipelinedHybridOptimizer
        assert not hybrid_optimizer.is_installed()
        assert HybridDeviceOptimizer.__init__ is stock

    def test_asynchronous_saves_copy_while_one_lives(self) -> None:
        with hybrid_optimizer.fast_hybrid_optimizer():
            made = self.made()
        assert async_save.is_protecting()
        assert hybrid_optimizer.is_installed() is False
        del made

    def test_it_is_taken_out_after_an_error(self) -> None:
        with pytest.raises(KeyError), hybrid_optimizer.fast_hybrid_optimizer():
            raise KeyError
        assert not hybrid_optimizer.is_installed()

    def test_uninstall_without_install(self) -> None:
        with pytest.raises(RuntimeError, match="without an install"):
            hybrid_optimizer.uninstall()


def test_the_ring_holds_the_longest_bucket_of_each_turn():
    mebi = 1 << 20
    assert hybrid_buckets.ring_elements([]) == 0
    assert hybrid_buckets.ring_elements([0, 5]) == 5
    # In the order 10, 10, 13, 13, 13, 10 (the 13s are the slices of 40), each of three buffers meets one of the 13s.
    assert hybrid_buckets.ring_elements([10 * mebi] * 3 + [40 * mebi]) == 40 * mebi
