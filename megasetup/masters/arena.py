"""PinnedArena: one piece of pinned host memory, from which the CPU optimizer's tensors are cut.

torch's pinned allocator rounds every block up to a power of two and clears it with one thread: 57 GB and half a minute
for 30 GB of clones. Here the sum is known beforehand, so that one mapping of exactly that size is made on huge pages
near the GPU, touched by all worker threads at once, and registered with CUDA in one call.

The kernel grants any mapping and kills the process when its pages do not fit. So what is free is compared with what is
asked before the first touch, and again on the way, because the other ranks of the host fill theirs at the same time.
"""

from __future__ import annotations

import math
import mmap
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from megasetup import host
from megasetup.kernels import native
from megasetup.masters.populating import Populating

# Where every tensor begins: a cache line, and the widest vector store.
ALIGNMENT = 64

# Between two looks at what is free.
_SLICE_BYTES = 1 << 30

Shape = int | Sequence[int]

# The first byte and the end of every arena's memory, as long as that is there.
_ranges: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


class ArenaError(RuntimeError):
    """The memory of an arena cannot be had or pinned, or is used up. Nothing of a failed arena stays mapped."""


def lies_in_an_arena(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values lie in the memory of an arena now."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a tensor subclass without memory of its own
        return False
    return any(first <= address < end for first, end in list(_ranges.values()))


def _elements(shape: Shape) -> int:
    return shape if isinstance(shape, int) else math.prod(shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB ({nbytes:,} bytes)" if nbytes < 10**9 else f"{nbytes / 1e9:.2f} GB"


def _check_room(nbytes: int, asked: int) -> None:
    memory = host.memory()
    if nbytes <= memory.usable:
        return
    if memory.container_room < memory.available:
        limit = (
            f"the container's memory limit of {_gigabytes(memory.container_limit or 0)} leaves "
            f"{_gigabytes(memory.container_room)}"
        )
        remedy = "raise the container's limit"
    else:
        limit = f"the machine has {_gigabytes(memory.available)} available of {_gigabytes(memory.total)}"
        remedy = "end other processes or use a machine with more memory"
    progress = "" if nbytes == asked else f" (the last {_gigabytes(nbytes)} of it are not there yet)"
    raise ArenaError(
        f"an arena of {_gigabytes(asked)} of host memory was asked for{progress} and {limit}: {remedy}, offload less "
        "(a lower offload fraction, more ranks to share the optimizer), or run fewer ranks on this host"
    )


def _gpu(device: torch.device | str | int | None) -> torch.device | None:
    """The GPU to be near to; None where there is none, or the CPU was asked for."""
    wanted = None if device is None else torch.device(device)
    if wanted is not None and wanted.type != "cuda":
        return None
    if not torch.cuda.is_available() or native.for_device(torch.device("cuda")) is None:
        return None
    if wanted is None or wanted.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return wanted


class PinnedArena:
    """Host memory of exactly the bytes asked for, pinned where there is a GPU, to cut tensors from in order.

    The memory is fresh, so it reads as zeros. It lives as long as the arena or any tensor cut from it, and is unpinned
    and unmapped when the last of them is gone. One thread cuts at a time.

    A forked child never unpins it. Unpinned memory is the child's as any other memory is. Pinned memory is not there
    in a child, and reading it ends the child (SIGSEGV): the kernel would have to copy every pinned page at the fork,
    so that each data loader's worker took as much memory again. Clone what a child is to read before forking. A tensor
    sent to another process through torch.multiprocessing leaves the arena for shared memory, as any CPU tensor does.

    Args:
        nbytes: bytes, as `nbytes_for` counts them; rounded up to a page.
        device: the GPU it is for: the memory lies on that GPU's NUMA node. The current one by default. With a CPU
            device, without a usable GPU or without the compiled module's GPU half the memory is the same, unpinned.
        pin: False leaves it unpinned, on that GPU's NUMA node all the same.
        touch: False leaves memory that is not pinned to be found by the kernel when it is first used, near its user.
        on_failure: "raise", or "pageable": memory that cannot be pinned is used unpinned, with a RuntimeWarning.

    Raises:
        ArenaError: more is asked than the machine or its container has free (nothing has been touched then), or the
            driver refuses to pin. Nothing stays mapped.
        ValueError: nbytes is negative, or on_failure is none of the two.
        KeyboardInterrupt: Ctrl-C while pages are touched.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        device: torch.device | str | int | None = None,
        pin: bool = True,
        touch: bool = True,
        on_failure: Literal["raise", "pageable"] = "raise",
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}: an arena cannot have less than 0 bytes")
        if on_failure not in ("raise", "pageable"):
            raise ValueError(f"on_failure is {on_failure!r}: choose 'raise' or 'pageable'")
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._used = 0
        self._pinned = False
        self._for_gpu = False
        self._address = 0
        self._memory: Any = None
        if not self._nbytes:
            return
        _check_room(self._nbytes, self._nbytes)
        gpu = _gpu(device)
        self._memory = self._mapped(gpu, touch=touch or pin)
        self._for_gpu = gpu is not None
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        _ranges[self._memory] = (self._address, self._address + self._nbytes)
        if not pin:
            return
        try:
            self.pin()
        except ArenaError as error:
            if on_failure == "raise":
                self._memory = None
                raise
            warnings.warn(f"copies to and from the arena are slower: {error}", RuntimeWarning, stacklevel=2)

    def pin(self) -> None:
        """Pin memory that was made unpinned; nothing where there is no GPU for it.

        Raises:
            ArenaError: the driver refuses. The memory stays as it was.
        """
        if self._pinned or not self._for_gpu:
            return
        try:
            self._memory.pin()
        except RuntimeError as error:
            raise ArenaError(self._pinning_problem(error)) from error
        self._pinned = True

    def populate(self) -> Populating:
        """Start to have all pages there, in the background, as many as are not there yet.

        What is free is looked at on the way, as when the arena itself touches them; wait() raises ArenaError then.
        """
        asked = self._nbytes  # the check must not keep the arena
        return Populating(
            self._memory,
            self._address,
            self._nbytes,
            threads=native.get_num_reading_threads(),
            check=lambda missing: _check_room(missing, asked),
        )

    def _mapped(self, gpu: torch.device | None, *, touch: bool) -> Any:
        memory: Any = None
        module = native.load()
        if module is None:
            memory = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return memory
        try:
            if gpu is None:
                memory = module.cpu.HostMemory(self._nbytes)
            else:
                memory = module.transfer.PinnedMemory(self._nbytes, gpu.index)
            for start in range(0, self._nbytes if touch else 0, _SLICE_BYTES):
                _check_room(self._nbytes - start, self._nbytes)
                memory.touch(start, start + _SLICE_BYTES)
        except ArenaError:
            memory = None  # the traceback would keep it mapped
            raise
        except RuntimeError as error:
            memory = None
            raise ArenaError(f"an arena of {_gigabytes(self._nbytes)} was asked for: {error}") from error
        except KeyboardInterrupt:
            memory = None
            raise
        return memory

    def _pinning_problem(self, error: RuntimeError) -> str:
        memory = host.memory()
        if memory.lock_limit is not None and memory.lock_limit < self._nbytes:
            limit = f"the locked-memory limit (`ulimit -l`) of {_gigabytes(memory.lock_limit)} is lower"
            remedy = "raise it (`ulimit -l unlimited`; docker: `--ulimit memlock=-1`)"
        else:
            limit = "no limit of this process is lower, so the driver or the system ran out of what it pins with"
            remedy = "end other processes that pin memory, or offload less"
        return (
            f"{_gigabytes(self._nbytes)} of host memory cannot be pinned ({error}). It is there, with "
            f"{_gigabytes(memory.usable)} free beside it, and {limit}: {remedy}, or use it unpinned "
            "(on_failure='pageable')"
        )

    @staticmethod
    def nbytes_for(sizes: Iterable[tuple[Shape, torch.dtype]]) -> int:
        """The bytes that tensors of these shapes (or element counts) and dtypes take, cut in this order."""
        end = 0
        for shape, dtype in sizes:
            end = _aligned(end) + _elements(shape) * dtype.itemsize
        return end

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor: contiguous, 64-byte aligned, a storage of exactly its own bytes. Reads as zeros.

        Raises:
            ArenaError: the arena has not that much left.
        """
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        count = _elements(size)
        start = _aligned(self._used)
        end = start + count * dtype.itemsize
        if end > self._nbytes:
            raise ArenaError(
                f"a tensor of shape {size} and {dtype} takes {end - start:,} bytes and the arena has "
                f"{max(0, self._nbytes - start):,} of its {self._nbytes:,} left: make it of nbytes_for() all tensors"
            )
        self._used = end
        if not count:
            return torch.empty(size, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(size)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole arena: those asked for, rounded up to a page."""
        return self._nbytes

    @property
    def used(self) -> int:
        """Bytes that have been cut, with what aligns them."""
        return self._used

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is pinned. Tensors cut from it say so themselves."""
        return self._pinned
