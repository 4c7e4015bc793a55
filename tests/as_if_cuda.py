"""A stand-in for a GPU: tensors on the CPU pass for CUDA tensors, so that Megatron's optimizers and checkpoints run.

Megatron asks for CUDA by name everywhere, and refuses parameters of other devices. Here each tensor that is wanted on a
GPU is made on the CPU and says that it is of a CUDA type, process groups are gloo's, and streams do nothing.
What it cannot stand for: that work on a GPU is asynchronous, and that host and GPU memory are not the same.

For worker processes: it cannot be taken out again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _device(wanted: Any) -> Any:
    if wanted is None or (not isinstance(wanted, int) and torch.device(wanted).type != "cuda"):
        return wanted
    return _CPU


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


def _made_by_gloo(made: Callable[..., Any], *, first: int) -> Callable[..., Any]:
    """The same with gloo for a backend, whose place is the first of the arguments, or among the named ones alone."""

    def make(*args: Any, **kwargs: Any) -> Any:
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        return made(*args[first:], **{**kwargs, "backend": "gloo"})

    return make


def install() -> None:
    """To be called when what imports torch.Generator as a type has been imported."""
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: _Stream()
    torch.cuda.Stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    generator = torch.Generator
    torch.Generator = lambda device="cpu": generator(_CPU)
    dist.init_process_group = _made_by_gloo(dist.init_process_group, first=1)
    dist.new_group = _made_by_gloo(dist.new_group, first=0)
    _OnTheCpu().__enter__()
