"""A draft's weights on disk: a folder or a Hugging Face id, safetensors or torch files, one or several with an index.

Torch files are unpickled with weights_only, so that a draft from the network runs nothing here.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from megasetup.config.draft import DRAFT
from megasetup.config.errors import config_error

_logger = logging.getLogger("megasetup")

_NAMES = ("model.safetensors", "pytorch_model.bin")
_KINDS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


class DraftWeightsError(ValueError):
    """A draft's weights are damaged, incomplete, or do not fit the draft that its config describes."""


def find_draft(model_name: str) -> Path:
    """The folder of a draft model.

    Args:
        model_name: a local folder, or a Hugging Face id, which is fetched unless it is in the cache.

    Raises:
        ConfigError: there is neither.
    """
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_name, allow_patterns=["config.json", "*.index.json", *_KINDS]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise config_error(
            f"{DRAFT}.model_name",
            model_name,
            f"must be a folder or the id of a model on the Hugging Face Hub ({error})",
        ) from error


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a draft by the names in its files, on the CPU; empty where the folder holds no weights.

    Args:
        folder: holds model.safetensors or pytorch_model.bin, alone or in pieces with an index, or one other file of
            weights.

    Raises:
        DraftWeightsError: a file is missing, damaged, or not what it says it is; several files and no index.
    """
    for name in _NAMES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_pieces(index)
        if (folder / name).is_file():
            return _read_file(folder / name)
    files = sorted(file for kind in _KINDS for file in folder.glob(kind))
    if len(files) > 1:
        raise DraftWeightsError(
            f"{folder} holds {', '.join(file.name for file in files)} and no index: one of model.safetensors, "
            "pytorch_model.bin, or *.index.json beside them must say which are the draft's weights"
        )
    return _read_file(files[0]) if files else {}


def _read_pieces(index: Path) -> dict[str, torch.Tensor]:
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        pieces = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DraftWeightsError(f"{index} is no index of weights ({error!r})") from error
    outside = [piece for piece in pieces if Path(piece).name != piece]
    absent = [piece for piece in pieces if piece not in outside and not (index.parent / piece).is_file()]
    if outside or absent:
        raise DraftWeightsError(
            f"{index} names {', '.join(outside + absent)}, which {index.parent} does not hold: fetch the draft again"
        )
    found: dict[str, torch.Tensor] = {}
    for piece in pieces:
        found |= _read_file(index.parent / piece)
    lost = sorted(places.keys() - found.keys())
    if lost:
        raise DraftWeightsError(f"{index} names {', '.join(lost)}, which its files do not hold: fetch the draft again")
    return {name: found[name] for name in places}


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        found: Any
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(file)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # (each library has its own for a damaged file)
        raise DraftWeightsError(f"{file} cannot be read as a draft's weights: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise DraftWeightsError(f"{file} must hold tensors by name, and holds {type(found).__name__} of something else")
    return found
