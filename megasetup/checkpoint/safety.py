"""No code from a checkpoint: what torch unpickles of one is looked at before it is loaded.

Megatron loads the tensors and objects of a torch_dist checkpoint with weights_only. Its index, the file .metadata, is
read by torch.distributed.checkpoint with a plain pickle, which would run whatever stands in it. So it is read here
first, by an unpickler that knows the index's own classes and nothing else.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

_INDEX = ".metadata"
_CLASSES_OF = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.dist_checkpointing.")
_PLAIN = frozenset({("torch", "Size"), ("torch", "device"), ("collections", "OrderedDict"), ("builtins", "set")})
_LAYOUTS = ("torch.serialization", "_get_layout")


class UnsafeCheckpointError(ValueError):
    """A checkpoint asks for something to be run or imported that no index needs."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A dotted name would reach through a module's own imports.
        if "." not in name:
            if (module, name) in _PLAIN or (module, name) == _LAYOUTS:
                return super().find_class(module, name)
            if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
                return getattr(torch, name)
            if f"{module}.".startswith(_CLASSES_OF):
                found = super().find_class(module, name)
                if isinstance(found, type) and found.__module__ == module:
                    return found
        raise UnsafeCheckpointError(f"{module}.{name}")


def check_index(iteration: str | os.PathLike[str]) -> Metadata | None:
    """Make sure that the index of a torch_dist checkpoint names tensors and their places, and nothing that runs.

    Args:
        iteration: the folder that holds .metadata. One without it is no torch_dist checkpoint, and passes.

    Returns:
        The index; None where there is none.

    Raises:
        UnsafeCheckpointError: the index asks for something else, or is damaged.
    """
    path = Path(iteration) / _INDEX
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            index: Metadata = _IndexUnpickler(file).load()
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"{path} asks for {error}, which the index of a checkpoint has no use for: it may run code. Load it only "
            "from where you trust it, or have it saved again"
        ) from None
    except Exception as error:
        raise UnsafeCheckpointError(f"{path} cannot be read as the index of a checkpoint: {error}") from error
    return index
