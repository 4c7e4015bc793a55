"""Lets Bridge validate a container without asking which GPU this machine has.

For a model whose tokens travel by the flex dispatcher, `ConfigContainer.validate()` asks the first GPU whether it is of
a kind that the dispatcher's backend knows. A check of a config for another machine must not: it fails where there is
no driver, and takes memory where there is one.

Needed with megatron-bridge 0.6; may go when validation no longer touches a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from megasetup.compat.bridge import import_bridge

_ASKS = "validate_flex_dispatcher_backend"


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


@contextmanager
def without_asking_the_gpu() -> Iterator[None]:
    """Leave the kind of GPU out of Bridge's validation while the block runs, where it is in."""
    config = import_bridge("megatron.bridge.training.config")
    if not hasattr(config, _ASKS):
        yield
        return
    with mock.patch.object(config, _ASKS, _nothing):
        yield
