"""Hands asynchronous checkpoint writers copies of what lies in an arena.

Megatron and nvidia-resiliency-ext hand a host tensor with a storage of its own to the writer as it is:
- The persistent writer gets it through torch.multiprocessing, which moves it into shared memory, in place. Nothing
  is pinned any more then, and the writer reads what the next step is writing.
- The temporary writer is a forked child, and pinned memory is not there in a child, which would end by SIGSEGV.

So copies go to the writer, for as long as it writes: 12 bytes an offloaded element at most, which the forked child and
the shared memory would take too. A synchronous save reads in this process and needs no copy; that is why the request is
changed when it is scheduled, and not where checkpoints are planned.

Megatron's own classes are changed as long as a hybrid optimizer of ours lives.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from megasetup.masters.arena import lies_in_an_arena

_QUEUES = (
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
)

# Reentrant, because a collection of garbage inside may release another owner.
_lock = threading.RLock()
_owners = 0
_originals: list[tuple[type, Callable[..., Any]]] = []


def protect(owner: object) -> None:
    """Have asynchronous saves copy what lies in an arena, as long as the owner lives.

    Raises:
        ImportError: megatron-core is not installed.
    """
    global _owners
    with _lock:
        if _owners == 0:
            _patch()
        _owners += 1
        weakref.finalize(owner, _release)


def is_protecting() -> bool:
    """Whether asynchronous saves copy now."""
    return bool(_originals)


def _release() -> None:
    global _owners
    with _lock:
        _owners -= 1
        if _owners == 0:
            while _originals:
                kind, schedule = _originals.pop()
                kind.schedule_async_request = schedule  # type: ignore[attr-defined]


def _patch() -> None:
    for name in _QUEUES:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        try:
            kind = importlib.import_module(name).AsyncCallsQueue
            schedule = kind.schedule_async_request
        except (ImportError, AttributeError):
            if name is _QUEUES[0]:
                raise
            continue  # a version of the extension without this queue
        _originals.append((kind, schedule))
        kind.schedule_async_request = _scheduling_copies(schedule)


def _scheduling_copies(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def scheduled(queue: Any, async_request: Any, *args: Any, **kwargs: Any) -> Any:
        return schedule(queue, with_copies(async_request), *args, **kwargs)

    return scheduled


def with_copies(request: Any) -> Any:
    """A request of the same kind, in whose function, arguments and preload function no tensor lies in an arena.

    Args:
        request: Megatron's or the extension's AsyncRequest. What it calls at the end, in this process, stays as it is.
    """
    # What was seen, with what it became; it is kept so that no other object gets its id.
    seen: dict[int, tuple[Any, Any]] = {}
    fields = ("async_fn", "async_fn_args", "async_fn_kwargs", "preload_fn")
    return request._replace(
        **{name: _copied(getattr(request, name), seen) for name in fields if name in request._fields}
    )


def _copied(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """The value with copies of those tensors; what the request holds twice is copied once."""
    if id(value) in seen:
        return seen[id(value)][1]
    made = value
    if isinstance(value, torch.Tensor):
        if lies_in_an_arena(value):
            made = value.detach().clone()
    elif type(value) is list:
        made = [_copied(item, seen) for item in value]
    elif type(value) is dict:
        made = {key: _copied(item, seen) for key, item in value.items()}
    elif type(value) is tuple:
        made = tuple(_copied(item, seen) for item in value)
    elif isinstance(value, functools.partial):
        arguments = [_copied(item, seen) for item in value.args]
        made = functools.partial(value.func, *arguments, **_copied(dict(value.keywords), seen))
    seen[id(value)] = (value, made)
    return made
