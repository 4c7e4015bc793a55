"""A stand-in for a GPU: the CPU in its place, for tests of the whole setup on machines without one.

Megatron asks torch.cuda for devices, streams and generators wherever it trains, and knows 16-bit parameters by the name
of their CUDA type. `cpu_as_gpu` answers all of that for the CPU: tensors that are asked for on "cuda" are made on the
CPU, streams and events, which have nothing to wait for, do nothing. What runs is Megatron's and Bridge's own code on
real tensors; what it cannot show is anything of CUDA's: kernels, other libraries' layers, the wire, streams' order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megasetup.compat.bridge import import_bridge
from megasetup.compat.no_gpu import no_gpu


class _Nothing:
    """A stream, or an event."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record_event(self, *_args: Any) -> _Nothing:
        return self

    def query(self) -> bool:
        return True

    def _wait(self, *_args: Any) -> None:
        pass

    record = wait = wait_stream = wait_event = synchronize = _wait


class _OnCpu(TorchFunctionMode):
    """Torch's functions with the CPU wherever they are given a CUDA device."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: _device(value) for name, value in (kwargs or {}).items()}
        result = function(*map(_device, args), **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")  # (by which Megatron knows what needs a master weight)
        return result


def _device(value: Any) -> Any:
    return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


@contextlib.contextmanager
def _stream(_stream: Any) -> Iterator[None]:
    yield


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


@contextlib.contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """Have the CPU stand in for a GPU while the block runs. torch.cuda.is_available() still tells the truth."""
    answers = {
        "Stream": _Nothing,
        "Event": _Nothing,
        "stream": _stream,
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "empty_cache": _do_nothing,
        "manual_seed": torch.manual_seed,
        "set_device": _do_nothing,
        "device_count": lambda: 1,
    }
    random = import_bridge("megatron.core.tensor_parallel.random")
    with no_gpu(), contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for holder, names in (
            (torch.cuda, ("get_rng_state", "set_rng_state")),
            (random, ("_get_cuda_rng_state", "_set_cuda_rng_state")),
        ):
            for name, answer in zip(names, (_get_rng_state, _set_rng_state), strict=True):
                stack.enter_context(mock.patch.object(holder, name, answer))
        stack.enter_context(_OnCpu())
        yield
