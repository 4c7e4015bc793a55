"""Lets Megatron and Bridge convert a checkpoint where there is no GPU, or without touching the one there is.

Some of their code asks torch.cuda whatever the model's device is: the checkpoint writer synchronises and makes its flag
tensors on the current CUDA device, routers and rotary embeddings put buffers there, an embedding that two stages share
is moved there, and the saver collects the CUDA generator's state even when it is not to be saved. Without a driver each
of these raises. While `no_gpu` is in effect, the current device is the CPU and there is nothing to wait for.

Needed with megatron-core up to 0.19.2 and megatron-bridge up to 0.6.2; may go when they convert without CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def _current_device() -> torch.device:
    return torch.device("cpu")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _no_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _itself(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


@contextmanager
def no_gpu() -> Iterator[None]:
    """Make the CPU torch.cuda's current device while the block runs.

    It holds for the whole process, so no other thread should be using the GPU meanwhile. Whether there is a GPU is
    still answered truly: libraries remember that answer.
    """
    with (
        mock.patch.object(torch.cuda, "current_device", _current_device),
        mock.patch.object(torch.cuda, "synchronize", _nothing),
        mock.patch.object(torch.cuda, "get_rng_state", _no_state),
        mock.patch.object(torch.Tensor, "cuda", _itself),
    ):
        yield
