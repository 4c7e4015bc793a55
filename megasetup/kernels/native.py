"""Finds the compiled module, and says what it can do here.

The module may be absent (a source tree that was never built), may hold the CPU half alone (no nvcc at build time), or
may find no usable GPU. Each case has one answer, asked for here, so that no other file guesses.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass(frozen=True)
class NativeStatus:
    """What the compiled module offers on this machine.

    Attributes:
        cpu: the CPU half can be used.
        gpu: the GPU half can be used.
        cpu_instruction_set: which CPU kernels run: "avx512", "avx2", "neon", "scalar", or "torch" without the module.
        gpu_architectures: the GPU code in the build, as CMake names it ("80-real;90-real;..."), "" without a GPU half.
        why: why a half is missing and what to do about it; "" when nothing is missing.
    """

    cpu: bool
    gpu: bool
    cpu_instruction_set: str
    gpu_architectures: str
    why: str


@functools.cache
def load() -> ModuleType | None:
    """The compiled module, or None after one warning that says how to build it."""
    try:
        return importlib.import_module("megasetup._C")
    except ImportError as error:
        warnings.warn(
            f"megasetup runs in plain torch, which is slower: its compiled module cannot be imported ({error}). "
            "Build it with `pip install .` from the source tree (a C++ compiler, and nvcc for the GPU half).",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


@functools.cache
def gpu_problem() -> str:
    """Why the GPU half cannot be used, or "" when it can. Asks the driver, so it is called only for CUDA tensors."""
    module = load()
    if module is None:
        return "the compiled module is absent"
    return str(module.gpu_problem())


@functools.cache
def _warn_no_gpu_half(problem: str) -> None:
    warnings.warn(
        f"megasetup copies GPU weights in plain torch, which is slower: {problem}",
        RuntimeWarning,
        stacklevel=4,
    )


def for_device(device: torch.device) -> ModuleType | None:
    """The compiled module if it can work on tensors of `device`, else None (after one warning)."""
    module = load()
    if module is None or device.type == "cpu":
        return module
    problem = gpu_problem()
    if problem:
        _warn_no_gpu_half(problem)
        return None
    return module


def native_status() -> NativeStatus:
    """What the compiled module offers here. Touches the driver, never a GPU's memory."""
    module = load()
    if module is None:
        return NativeStatus(
            False, False, "torch", "", "the compiled module is absent: run `pip install .` in the source tree"
        )
    problem = gpu_problem()
    return NativeStatus(True, not problem, module.cpu.instruction_set(), module.gpu_architectures, problem)


def set_num_threads(threads: int | None) -> None:
    """Set how many worker threads convert weights on the CPU, and how many read copies in an audit.

    Args:
        threads: at least 1, for both; None for the default, which is MEGASETUP_NUM_THREADS for both, or without it
            min(8, share) for converting, where share is the cores this process may use / local ranks, and for reading
            up to twice as many, but less than share: a core that only reads spends its time waiting.

    Raises:
        ValueError: threads is below 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}: at least 1 worker thread is needed")
    module = load()
    if module is None:
        return
    if threads is None:
        module.cpu.use_default_threads()
    else:
        module.cpu.set_num_threads(threads)


def get_num_threads() -> int:
    """How many worker threads convert weights on the CPU (torch's own count without the compiled module)."""
    module = load()
    return int(module.cpu.num_threads()) if module is not None else torch.get_num_threads()


def get_num_reading_threads() -> int:
    """How many worker threads read copies in an audit of GPU weights (torch's own count without the module)."""
    module = load()
    return int(module.cpu.num_reading_threads()) if module is not None else torch.get_num_threads()
