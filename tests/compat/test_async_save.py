"""Asynchronous saves of a hybrid optimizer's tensors: what the writers do to them, and that ours get copies.

Real queues, processes, forks, and Megatron's own planning and writing. Pinned memory needs a GPU; what matters of it,
that a forked child has none of it, is asked of the kernel here (MADV_DONTFORK), as the arena asks it when it pins.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import mmap
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

from megasetup.compat import async_save
from megasetup.compat.no_gpu import no_gpu
from megasetup.masters.arena import PinnedArena, lies_in_an_arena
from megasetup.masters.hybrid import PipelinedHybridOptimizer

DONTFORK = 10


class Owner:
    """Something to be kept alive."""


@pytest.fixture
def owner() -> Iterator[Owner]:
    held = Owner()
    async_save.protect(held)
    yield held
    del held


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with no_gpu():
        yield
    torch.distributed.destroy_process_group()


def tensor_in_an_arena(count: int = 5000) -> torch.Tensor:
    arena = PinnedArena(4 * count, device="cpu")
    return arena.empty(count, torch.float32).copy_(torch.arange(count))


def keep_from_children(tensor: torch.Tensor) -> None:
    """As pinning does with the memory of an arena."""
    libc = ctypes.CDLL(None, use_errno=True)
    nbytes = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(nbytes), DONTFORK) == 0


def saving(tensor: torch.Tensor, folder: Path) -> AsyncRequest:
    """Megatron's request to save one tensor."""
    folder.mkdir()
    sharded = dist_checkpointing.ShardedTensor.from_rank_offsets("moment", tensor)
    return dist_checkpointing.save({"moment": sharded}, str(folder), async_sharded_save=True, async_strategy="mcore")


def scheduled(request: AsyncRequest) -> Any:
    """The process that a temporary writer forked, when it has ended."""
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    process = queue.async_calls[0].async_caller.process
    process.join(60)
    return process


def saved(request: AsyncRequest, folder: Path) -> torch.Tensor:
    for finalize in request.finalize_fns:
        finalize()
    empty = dist_checkpointing.ShardedTensor.from_rank_offsets("moment", torch.zeros(5000))
    return dist_checkpointing.load({"moment": empty}, str(folder))["moment"]


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore", "error:megasetup")
class TestTemporaryWriter:
    def test_without_copies_the_writer_dies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tensor = tensor_in_an_arena()
        keep_from_children(tensor)
        monkeypatch.setattr(async_save, "with_copies", lambda request: request)
        assert scheduled(saving(tensor, tmp_path / "saved")).exitcode == -signal.SIGSEGV

    @pytest.mark.usefixtures("owner")
    def test_with_copies_it_writes_what_was_there(self, tmp_path: Path) -> None:
        tensor = tensor_in_an_arena()
        keep_from_children(tensor)
        request = saving(tensor, tmp_path / "saved")
        assert scheduled(request).exitcode == 0
        assert torch.equal(saved(request, tmp_path / "saved"), tensor)


def _answer(requests: Any, answers: Any) -> None:
    """A persistent writer's loop, without its GPU: takes a request, calls it, says so."""
    request = requests.get()
    request.async_fn(request.preload_fn()[0], answers)


def _add_up(buckets: list[torch.Tensor], answers: Any) -> None:
    answers.put(sum(float(tensor.sum()) for tensor in buckets))


def _preloaded(buckets: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [buckets]


@pytest.mark.parametrize("copies", [False, True])
def test_a_persistent_writer_moves_what_it_is_sent(copies: bool) -> None:
    tensor = tensor_in_an_arena()
    held = [tensor]
    request = AsyncRequest(_add_up, (), [], {}, functools.partial(_preloaded, held))
    context = torch.multiprocessing.get_context("spawn")
    requests, answers = context.Queue(), context.Queue()
    process = context.Process(target=_answer, args=(requests, answers), daemon=True)
    process.start()
    requests.put(async_save.with_copies(request) if copies else request)
    assert answers.get(timeout=120) == float(sum(range(5000)))
    process.join(60)
    assert lies_in_an_arena(tensor) == copies
    assert tensor.is_shared() != copies


class TestWithCopies:
    def test_only_what_lies_in_an_arena_is_copied_and_once(self) -> None:
        inside, outside = tensor_in_an_arena(10), torch.ones(3)
        buckets = [("file", ([b"bytes"], [("item", inside), ("other", outside)]))]
        finalize = [lambda: None]
        request = AsyncRequest(
            functools.partial(_add_up, buckets=buckets), (0, buckets), finalize, {"again": inside}, print
        )
        made = async_save.with_copies(request)
        file, (raw, ((item, copy), (other, same))) = made.async_fn_args[1][0]
        assert (file, raw, item, other) == ("file", [b"bytes"], "item", "other")
        assert torch.equal(copy, inside)
        assert not lies_in_an_arena(copy)
        assert same is outside
        assert made.async_fn_kwargs["again"] is copy
        assert made.async_fn.keywords["buckets"] is made.async_fn_args[1]
        assert made.preload_fn is print
        assert made.finalize_fns is finalize
        assert buckets[0][1][1][0][1] is inside

    def test_a_view_is_copied_too(self) -> None:
        request = AsyncRequest(None, (tensor_in_an_arena(10)[2:5],), [])
        (copy,) = async_save.with_copies(request).async_fn_args
        assert copy.tolist() == [2.0, 3.0, 4.0]
        assert not lies_in_an_arena(copy)


def test_megatrons_queue_is_changed_while_an_owner_lives() -> None:
    gc.collect()
    stock = AsyncCallsQueue.schedule_async_request
    first, second = Owner(), Owner()
    async_save.protect(first)
    async_save.protect(second)
    changed = AsyncCallsQueue.schedule_async_request
    assert changed is not stock
    del first
    assert AsyncCallsQueue.schedule_async_request is changed
    del second
    gc.collect()
    assert AsyncCallsQueue.schedule_async_request is stock
    assert not async_save.is_protecting()


def stepped(steps: int, *, moved_before: int | None) -> tuple[PipelinedHybridOptimizer, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(shape, generator=generator).bfloat16() for shape in ((300, 40), (33,), (0,))]
    hybrid = PipelinedHybridOptimizer(
        params,
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        lr=0.01,
        fused=True,
    )
    for step in range(steps):
        if step == moved_before:
            for param in params:
                entry = hybrid.state[param]
                for tensor in (hybrid.param_to_inner_param[param], entry["exp_avg"], entry["exp_avg_sq"]):
                    tensor.share_memory_()
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        hybrid.step()
    return hybrid, params


def test_what_was_moved_all_the_same_is_brought_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PipelinedHybridOptimizer, "bucket_elements", 4096)
    wanted, wanted_params = stepped(4, moved_before=None)
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        hybrid, params = stepped(4, moved_before=2)
        for param in params:
            hybrid.param_to_inner_param[param].share_memory_()
        hybrid.step()
    wanted.step()
    assert [record.message.split(" had been")[0] for record in caplog.records] == [
        "6 masters and moments of the CPU optimizer"
    ]
    for param, wanted_param in zip(params, wanted_params, strict=True):
        assert torch.equal(param, wanted_param)
        entry, wanted_entry = hybrid.state[param], wanted.state[wanted_param]
        for name in ("master_param", "exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(entry[name], wanted_entry[name])
        if param.numel():
            assert lies_in_an_arena(hybrid.param_to_inner_param[param])
            assert all(lies_in_an_arena(entry[name]) for name in ("master_param", "exp_avg", "exp_avg_sq"))
