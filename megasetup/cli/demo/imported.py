"""The part of the demo that needs no GPU: a real import, the config checked, the run planned."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from megasetup.cli.check import examine
from megasetup.cli.configs import quiet_libraries
from megasetup.cli.console import duration
from megasetup.cli.errors import CommandError

_LAYERS = "decoder.layers."
_FOLDERS = ("NRL_MEGATRON_CHECKPOINT_DIR", "MEGASETUP_CHECKPOINT_DIR")


@contextmanager
def quietly() -> Iterator[None]:
    """Hold back what Megatron and Bridge print and log: the demo's tables are what it has to say."""
    # (memory and no file that is closed again: loggers made meanwhile keep what they were given)
    with quiet_libraries(), contextlib.redirect_stdout(io.StringIO()):
        yield


@contextmanager
def converted_in(folder: Path) -> Iterator[None]:
    """Keep converted checkpoints in a folder of the demo's own, not in the user's cache."""
    before = {name: os.environ.pop(name, None) for name in _FOLDERS}
    os.environ[_FOLDERS[1]] = str(folder)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def convert(console: Console, kind: str, policy: Mapping[str, Any]) -> Path:
    """Convert a policy's Hugging Face model as a trainer does. Returns the Megatron checkpoint.

    Raises:
        CommandError: megatron-bridge, or what it needs, is not installed.
    """
    from megasetup.checkpoint.importing import handle_model_import
    from megasetup.checkpoint.paths import validate_model_paths

    name, path, exists = validate_model_paths(policy)
    started = time.perf_counter()
    try:
        with quietly():
            handle_model_import(policy, name, path, exists)
    except ImportError as error:
        raise CommandError(
            f"the demo needs megatron-core and megatron-bridge ({error}): `make demo` installs what it takes"
        ) from error
    spent = duration(time.perf_counter() - started)
    console.print(f"{kind}: {escape(path)}, converted in {spent}", soft_wrap=True)
    return Path(path)


def check(console: Console, kind: str, file: Path) -> list[str]:
    """Check a config as `megasetup check` does, and print what a run with it will do.

    Raises:
        CommandError: something is wrong with it.
    """
    found = examine(file, (), gpus=1)
    if not found.ok:
        raise CommandError("\n".join([f"{file} ought to have nothing wrong with it:", *found.problems]))
    steps = found.models[0].steps
    console.print(f"{kind}: {escape(str(file))}: [green]nothing is wrong[/green]", soft_wrap=True)
    for step in steps:
        console.print(f"  - {escape(step)}", soft_wrap=True)
    return steps


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every BF16 tensor of a converted checkpoint under its Megatron name, on the CPU.

    Layers, which a checkpoint keeps stacked, come one by one as a model holds them.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from megasetup.checkpoint.paths import resolve_iter_dir_from_root
    from megasetup.checkpoint.safety import check_index

    folder = resolve_iter_dir_from_root(str(checkpoint), f"{checkpoint} holds no checkpoint")
    check_index(folder)
    reader = FileSystemReader(folder)
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype == torch.bfloat16
    }
    with quietly():
        load(tensors, storage_reader=reader, no_dist=True)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(_LAYERS):
            for index, layer in enumerate(tensor):
                weights[f"{_LAYERS}{index}.{name.removeprefix(_LAYERS)}"] = layer
        else:
            weights[name] = tensor
    return weights
