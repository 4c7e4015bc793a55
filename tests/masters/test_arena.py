"""PinnedArena: tensors to the byte, one lifetime for all of them, and errors that come before the kernel kills.

What is said of mappings is asked of the kernel (/proc/self). Pinning itself needs a GPU; that it fails is real on any
machine, because no machine has a GPU with the index that is asked for.
"""

from __future__ import annotations

import gc
import math
import mmap
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasetup import host
from megasetup.kernels import native
from megasetup.masters import arena as arena_file
from megasetup.masters.arena import ALIGNMENT, ArenaError, PinnedArena

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool, torch.int64]
MB = 1 << 20
NO_SUCH_GPU = torch.device("cuda", 99)


def mapped_bytes() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in ranges)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture(scope="module", autouse=True)
def _all_is_started() -> None:
    """The first use starts threads and CUDA, whose mappings would be counted as the arena's."""
    PinnedArena(64 * MB, device="cpu").empty(MB, torch.float32).fill_(1.0).sum()
    if torch.cuda.is_available():
        PinnedArena(4096).empty(8, torch.float32).to("cuda", non_blocking=True).sum().item()


@pytest.fixture
def without_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)


@pytest.fixture(params=["compiled", "absent"])
def either_module(request: pytest.FixtureRequest) -> None:
    if request.param == "absent":
        request.getfixturevalue("without_module")


@pytest.mark.usefixtures("either_module")
def test_tensors_are_cut_in_order_and_to_the_byte() -> None:
    sizes = [
        ((3, 5), torch.float32),
        (7, torch.bfloat16),
        ((), torch.float64),
        ((2, 0), torch.float32),
        (64, torch.uint8),
    ]
    assert PinnedArena.nbytes_for(sizes) == 64 + 64 + 64 + 64
    arena = PinnedArena(PinnedArena.nbytes_for(sizes), device="cpu")
    assert (arena.nbytes, arena.used, arena.is_pinned) == (mmap.PAGESIZE, 0, False)
    tensors = [arena.empty(*size) for size in sizes]
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 5), (7,), (), (2, 0), (64,)]
    assert [tensor.dtype for tensor in tensors] == [dtype for _, dtype in sizes]
    assert arena.used == 256
    start = tensors[0].data_ptr()
    assert start % mmap.PAGESIZE == 0
    assert [tensors[i].data_ptr() - start for i in (0, 1, 2, 4)] == [0, 64, 128, 192]
    # A storage of its own: what saves a tensor saves its bytes, not the whole arena.
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [60, 14, 8, 0, 64]
    assert not any(tensor.is_pinned() or tensor.requires_grad for tensor in tensors)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=12))
def test_tensors_do_not_overlap_and_fill_what_was_counted(sizes: list[tuple[list[int], torch.dtype]]) -> None:
    arena = PinnedArena(PinnedArena.nbytes_for(sizes), device="cpu")
    tensors = [arena.empty(*size) for size in sizes]
    assert arena.used == PinnedArena.nbytes_for(sizes)
    assert arena.nbytes == math.ceil(arena.used / mmap.PAGESIZE) * mmap.PAGESIZE
    filled = [tensor for tensor in tensors if tensor.numel()]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 and tensor.is_contiguous() for tensor in filled)
    for index, tensor in enumerate(filled):
        assert not tensor.any()  # fresh memory, which nobody else has written
        tensor.fill_(index % 2 == 0)
    for index, tensor in enumerate(filled):
        assert torch.equal(tensor, torch.full_like(tensor, index % 2 == 0))


def test_nbytes_for_takes_any_iterable_and_counts_like_empty() -> None:
    assert PinnedArena.nbytes_for(iter([])) == 0
    assert PinnedArena.nbytes_for((count, torch.float32) for count in (1, 16, 17)) == 64 + 64 + 68
    assert PinnedArena.nbytes_for([(torch.Size([4, 4]), torch.bfloat16)]) == 32


@pytest.mark.parametrize(("asked", "pages"), [(0, 0), (1, 1), (4096, 1), (4097, 2), (3 * MB + 5, 769)])
def test_the_whole_is_rounded_up_to_a_page_and_no_more(asked: int, pages: int) -> None:
    before = mapped_bytes()
    arena = PinnedArena(asked, device="cpu")
    assert arena.nbytes == pages * 4096
    if asked > MB:  # smaller ones are lost in what the allocator does meanwhile
        assert arena.nbytes <= mapped_bytes() - before < arena.nbytes + MB


def test_an_arena_of_nothing_gives_empty_tensors() -> None:
    arena = PinnedArena(0)
    assert arena.empty((0, 3), torch.float32).shape == (0, 3)
    with pytest.raises(ArenaError, match="0 of its 0 left"):
        arena.empty(1, torch.uint8)


@pytest.mark.usefixtures("either_module")
def test_used_up_arena_names_asked_and_left() -> None:
    arena = PinnedArena(4096, device="cpu")
    arena.empty(500, torch.float32)
    with pytest.raises(ArenaError, match=r"\(33, 16\) and torch.float32 takes 2,112 bytes.* 2,048 of its 4,096 left"):
        arena.empty((33, 16), torch.float32)
    # The refusal has cut nothing.
    assert arena.used == 2000
    assert arena.empty(512, torch.float32).numel() == 512


@pytest.mark.parametrize(
    ("arguments", "message"), [((-1, "raise"), "nbytes is -1"), ((1, "pin"), "on_failure is 'pin'")]
)
def test_arguments(arguments: tuple[int, str], message: str) -> None:
    nbytes, on_failure = arguments
    with pytest.raises(ValueError, match=message):
        PinnedArena(nbytes, on_failure=on_failure)  # type: ignore[arg-type]


def test_touched_when_made() -> None:
    before = resident_bytes()
    arena = PinnedArena(64 * MB, device="cpu")
    assert resident_bytes() - before > 60 * MB
    assert arena.nbytes == 64 * MB


@pytest.mark.usefixtures("either_module")
def test_lives_as_long_as_its_last_tensor() -> None:
    arena = PinnedArena(256 * MB, device="cpu")
    first = arena.empty(1000, torch.float32)
    last = arena.empty((64, MB), torch.uint8)[63]  # a view of a tensor keeps the arena too
    parameter = torch.nn.Parameter(first)
    middle = first.data_ptr() + 128 * MB
    del arena, first
    gc.collect()
    last.fill_(7)
    parameter.data.fill_(3.0)
    assert last.sum().item() == 7 * MB
    assert parameter.sum().item() == 3000
    del last
    gc.collect()
    assert is_mapped(middle)
    del parameter
    gc.collect()
    assert not is_mapped(middle)


@pytest.mark.parametrize("pin", [True, False])
def test_more_than_there_is_is_refused_before_a_page_is_touched(pin: bool) -> None:
    asked = host.memory().total + mmap.PAGESIZE
    resident, mapped = resident_bytes(), mapped_bytes()
    with pytest.raises(ArenaError) as caught:
        PinnedArena(asked, pin=pin)
    text = str(caught.value)
    assert f"an arena of {asked / 1e9:.2f} GB" in text
    assert "machine has" in text or "container's memory limit" in text
    assert "offload less" in text
    assert resident_bytes() - resident < 16 * MB
    assert mapped_bytes() - mapped < 16 * MB


def _memory(available: int, limit: int | None = None, used: int | None = None) -> host.Memory:
    return host.Memory(
        total=100 << 30, available=available, container_limit=limit, container_used=used, lock_limit=None
    )


def test_the_limit_that_applied_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine's figures are stood in for: no test can limit the container it runs in.
    monkeypatch.setattr(host, "memory", lambda: _memory(3 * MB))
    with pytest.raises(ArenaError, match=r"0\.01 GB \(8,388,608 bytes\).* machine has .*3,145,728 bytes.* available"):
        PinnedArena(8 * MB, device="cpu")
    monkeypatch.setattr(host, "memory", lambda: _memory(50 << 30, limit=20 * MB, used=17 * MB))
    with pytest.raises(ArenaError, match=r"container's memory limit .*20,971,520.* leaves .*3,145,728.*raise the cont"):
        PinnedArena(8 * MB, device="cpu")


def test_memory_that_others_take_meanwhile_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another rank that fills its arena at the same time, stood in for by what each look at free memory finds.
    looks = iter([100 * MB, 100 * MB, 30 * MB])
    monkeypatch.setattr(host, "memory", lambda: _memory(next(looks)))
    monkeypatch.setattr(arena_file, "_SLICE_BYTES", 16 * MB)
    before = mapped_bytes()
    with pytest.raises(ArenaError, match=r"the last .*50,331,648 bytes\) of it are not there yet") as caught:
        PinnedArena(64 * MB, device="cpu")
    # While the error is being handled, not only afterwards.
    assert mapped_bytes() - before < 32 * MB
    del caught


@pytest.fixture
def gpu_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = native.load()
    if module is None or not hasattr(module, "transfer"):
        pytest.skip("needs the compiled module with its GPU half")
    monkeypatch.setattr(arena_file, "_gpu", lambda device: NO_SUCH_GPU)


@pytest.mark.usefixtures("gpu_that_refuses")
def test_what_cannot_be_pinned_is_an_error_and_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mapped_bytes()
    with pytest.raises(ArenaError, match=r"cannot be pinned \(CUDA: .*free beside it.*on_failure='pageable'") as caught:
        PinnedArena(64 * MB)
    assert mapped_bytes() - before < 32 * MB
    assert isinstance(caught.value.__cause__, RuntimeError)
    low = host.Memory(100 << 30, 50 << 30, None, None, lock_limit=8 * MB)
    monkeypatch.setattr(host, "memory", lambda: low)
    with pytest.raises(ArenaError, match=r"locked-memory limit \(`ulimit -l`\) of .*8,388,608 bytes.*memlock=-1"):
        PinnedArena(64 * MB)


@pytest.mark.usefixtures("gpu_that_refuses")
def test_what_cannot_be_pinned_may_be_pageable() -> None:
    with pytest.warns(RuntimeWarning, match=r"slower: .* cannot be pinned"):
        arena = PinnedArena(4096, on_failure="pageable")
    assert not arena.is_pinned
    assert arena.empty(1024, torch.float32).fill_(1.0).sum().item() == 1024


def _in_child(work: str, arena_options: str) -> subprocess.CompletedProcess[str]:
    """Run a program that makes an arena, forks, and lets parent and child do their parts."""
    program = f"""
    import gc, os, sys, warnings
    import torch
    from megasetup.masters.arena import PinnedArena
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's word against fork beside threads
    torch.set_num_threads(1)  # torch's own threads do not come back after a fork

    def child(work):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            work()
            sys.stdout.flush()
            os._exit(0)
        return pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    arena = PinnedArena(64 << 20, {arena_options})
    tensor = arena.empty(4 << 20, torch.float32).fill_(1.0)
    {textwrap.indent(textwrap.dedent(work), "    ").strip()}
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)


def test_a_forked_child_has_its_own_copy_and_frees_only_that() -> None:
    done = _in_child(
        """
        def work():
            global arena, tensor
            print("child", tensor.sum().item())
            tensor.fill_(2.0)
            del arena, tensor
            gc.collect()
            print(PinnedArena(8 << 20, device="cpu").empty(8, torch.float32).sum().item())

        _, code = child(work)
        print("parent", code, tensor.sum().item())
        """,
        "device='cpu'",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["child 4194304.0", "0.0", "parent 0 4194304.0"]


@pytest.mark.gpu
def test_a_forked_child_never_unpins_and_takes_no_memory() -> None:
    done = _in_child(
        """
        def free():
            lines = dict(line.split(":") for line in open("/proc/meminfo"))
            return int(lines["MemAvailable"].split()[0]) * 1024

        import mmap
        pinned = PinnedArena(2 << 30)
        kept = pinned.empty(512 << 20, torch.float32).fill_(1.0)
        before = free()

        def work():
            global arena, tensor, pinned, kept
            print("taken", before - free() > (1 << 30))
            # Where the arena was the child has nothing, so that something else may come to lie there.
            others = [mmap.mmap(-1, 1 << 30) for _ in range(3)]
            for other in others:
                other[0] = other[-1] = 5
            del arena, tensor, pinned, kept
            gc.collect()
            print("others", [other[0] + other[-1] for other in others])

        _, code = child(work)
        print("parent", code, kept.is_pinned(), tensor.is_pinned())
        print(kept[-8:].to("cuda", non_blocking=True).sum().item())
        _, code = child(lambda: print(tensor[0].item()))
        print("reader", code)
        """,
        "",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "taken False",
        "others [10, 10, 10]",
        "parent 0 True True",
        "8.0",
        "reader -11",
    ]


@pytest.mark.gpu
def test_pinned_to_the_byte() -> None:
    sizes = [((1000, 1001), torch.float32), (7, torch.bfloat16), ((3, 3), torch.float64)]
    arena = PinnedArena(PinnedArena.nbytes_for(sizes))
    tensors = [arena.empty(*size) for size in sizes]
    assert arena.is_pinned
    assert arena.nbytes - PinnedArena.nbytes_for(sizes) < mmap.PAGESIZE
    for tensor in tensors:
        assert tensor.is_pinned()
        values = torch.rand(tensor.shape, device="cuda").to(tensor.dtype)
        tensor.copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(tensor, values.cpu())
        back = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back, values)
    assert not PinnedArena(4096, pin=False).empty(4, torch.float32).is_pinned()
    assert not PinnedArena(4096, device="cpu").empty(4, torch.float32).is_pinned()


@pytest.mark.gpu
def test_unpinned_and_unmapped_when_the_last_tensor_is_gone() -> None:
    arena = PinnedArena(1 << 30)
    tensor = arena.empty((2, 1 << 27), torch.float32)
    row = tensor[1]
    address, inside = tensor.data_ptr(), row.data_ptr()
    del arena, tensor
    gc.collect()
    assert row.is_pinned()
    row.fill_(3.0)
    # Under way when the last tensor goes: the copy still reads the arena's values.
    on_gpu = torch.empty(1 << 27, device="cuda")
    on_gpu.copy_(row, non_blocking=True)
    del row
    gc.collect()
    assert not is_mapped(address)
    assert not is_mapped(inside)
    assert bool((on_gpu == 3.0).all())


@pytest.mark.gpu
def test_a_gpu_that_is_not_there() -> None:
    before = mapped_bytes()
    with pytest.raises(ArenaError, match="cannot be pinned"):
        PinnedArena(64 * MB, device=NO_SUCH_GPU)
    assert mapped_bytes() - before < 32 * MB
    # The failed call leaves CUDA as it was.
    assert torch.ones(4, device="cuda").sum().item() == 4


@pytest.mark.gpu
def test_more_than_there_is_is_refused_with_a_gpu() -> None:
    resident = resident_bytes()
    with pytest.raises(ArenaError, match="offload less"):
        PinnedArena(host.memory().usable + (4 << 30), on_failure="pageable")
    assert resident_bytes() - resident < 64 * MB


@pytest.mark.multigpu
def test_for_another_gpu_than_the_current_one() -> None:
    arena = PinnedArena(1 << 20, device="cuda:1")
    tensor = arena.empty(1000, torch.float32).fill_(2.0)
    assert tensor.is_pinned()
    assert torch.cuda.current_device() == 0
    for device in ("cuda:0", "cuda:1"):
        assert tensor.to(device, non_blocking=True).sum().item() == 2000
