"""Where the checkpoint to start from is, and whether it is there.

Names and folders are those that NeMo-RL uses, so that its caches are found and ours are found by it. Nothing is
written here, and neither Megatron nor Bridge is imported: a path can be asked for before anything is set up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasetup.checkpoint.marks import FIRST_ITERATION, RUN_CONFIG, TRACKER, what_is_missing
from megasetup.config.errors import MISSING, ConfigKeyError, config_error
from megasetup.config.fields import section

_logger = logging.getLogger("megasetup")

CHECKPOINT_DIR_VARIABLES = ("NRL_MEGATRON_CHECKPOINT_DIR", "MEGASETUP_CHECKPOINT_DIR")
_PRETRAINED = "policy.pretrained_checkpoint"


def canonicalize_hf_config_overrides(overrides: Mapping[str, Any]) -> str:
    """Overrides as one JSON text that is the same for equal ones: keys sorted, no spaces, ASCII.

    Raises:
        TypeError: a value is nothing that JSON can hold.
    """
    return json.dumps(overrides, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def get_hf_config_overrides_hash(overrides: Mapping[str, Any]) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of the canonical text.

    Raises:
        TypeError: a value is nothing that JSON can hold.
    """
    return hashlib.sha256(canonicalize_hf_config_overrides(overrides).encode()).hexdigest()[:12]


def get_checkpoint_dir() -> str:
    """The folder that converted checkpoints are kept in.

    $NRL_MEGATRON_CHECKPOINT_DIR or $MEGASETUP_CHECKPOINT_DIR, the first that is set and not blank; else nemo_rl in
    $HF_HOME; else ~/.cache/huggingface/nemo_rl.
    """
    for variable in CHECKPOINT_DIR_VARIABLES:
        if folder := os.environ.get(variable, "").strip():
            return folder
    home = os.environ.get("HF_HOME", "").strip() or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    return os.path.join(home, "nemo_rl")


def cache_folder_name(hf_model_name: str, overrides: Mapping[str, Any] | None = None) -> str:
    """What the folder of a converted model is called.

    Args:
        hf_model_name: a Hugging Face id, which stays as it is (an id with a slash names a folder in a folder), or an
            existing local path, which becomes model_ and the absolute path with slashes turned into underscores: one
            relative path means different models in different folders.
        overrides: hf_config_overrides; where there are any, __hfovr_ and their hash follow.
    """
    name = hf_model_name
    if os.path.exists(name):
        # (an absolute path stays to the letter, a slash at its end too, so that NeMo-RL's caches are found)
        name = f"model_{(name if os.path.isabs(name) else os.path.abspath(name)).replace('/', '_')}"
    return f"{name}__hfovr_{get_hf_config_overrides_hash(overrides)}" if overrides else name


def resolve_iter_dir_from_root(path: str, not_found_msg: str) -> str:
    """The folder of the latest iteration below a checkpoint's root.

    latest_checkpointed_iteration.txt decides where it exists; else the highest number of the iter_* folders does.

    Args:
        path: the root.
        not_found_msg: the message when there is no iteration.

    Raises:
        ValueError: the file holds neither an integer nor "release".
        FileNotFoundError: there is neither the file nor an iteration.
    """
    tracker = os.path.join(path, TRACKER)
    if os.path.isfile(tracker):
        content = Path(tracker).read_text().strip()
        if content == "release":
            return os.path.join(path, "release")
        if not re.fullmatch(r"[0-9]+", content):
            raise ValueError(f"{tracker} holds {content!r}: it must hold the number of an iteration, or 'release'")
        return os.path.join(path, f"iter_{int(content):07d}")
    found: list[tuple[int, str]] = []
    if os.path.isdir(path):
        for entry in os.scandir(path):
            match = re.fullmatch(r"iter_([0-9]+)", entry.name)
            if match and entry.is_dir():
                found.append((int(match[1]), entry.path))
    if not found:
        raise FileNotFoundError(not_found_msg)
    return max(found)[1]


def validate_model_paths(config: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Find the checkpoint to start from.

    Args:
        config: the policy config: model_name, hf_config_overrides and pretrained_checkpoint are read.

    Returns:
        The name or path of the Hugging Face model, for its architecture and tokenizer; the path of the Megatron
        checkpoint; whether that is there and whole, so that nothing needs to be converted.

    Raises:
        ConfigKeyError: model_name, or the path of pretrained_checkpoint, is absent.
        ValueError: the format of pretrained_checkpoint is none of megatron_bridge and megatron_lm, or the file that
            names the latest iteration holds something else.
        FileNotFoundError: pretrained_checkpoint is not there, or not in its format.
    """
    hf_model_name = config.get("model_name")
    if not hf_model_name:
        raise config_error(
            "policy.model_name",
            MISSING if hf_model_name is None else hf_model_name,
            "must be a Hugging Face id or a folder with a config.json",
            ConfigKeyError,
        )
    pretrained = section(config, "pretrained_checkpoint")
    if pretrained:
        return hf_model_name, _given_checkpoint(pretrained), True
    overrides = section(config, "hf_config_overrides")
    path = os.path.join(get_checkpoint_dir(), cache_folder_name(hf_model_name, overrides))
    missing = what_is_missing(path)
    if missing and os.path.isdir(os.path.join(path, FIRST_ITERATION)):
        _logger.warning("the converted checkpoint %s is not whole and will be made again: %s", path, missing)
    return hf_model_name, path, missing is None


def _given_checkpoint(pretrained: Mapping[str, Any]) -> str:
    kind, path = pretrained.get("format"), pretrained.get("path")
    if kind not in ("megatron_bridge", "megatron_lm"):
        found = MISSING if kind is None else kind
        raise config_error(f"{_PRETRAINED}.format", found, "must be 'megatron_bridge' or 'megatron_lm'")
    if not path:
        raise config_error(f"{_PRETRAINED}.path", MISSING, "must be the checkpoint's folder", ConfigKeyError)
    path = str(path)
    if kind == "megatron_bridge":
        what, proof = "a Megatron-Bridge checkpoint", RUN_CONFIG
    else:
        what, proof = "a Megatron-LM checkpoint in the torch_dist format", "metadata.json"
        if not os.path.isdir(path):
            raise FileNotFoundError(f"{_PRETRAINED}.path is {path!r}: there is no such folder")
    if os.path.isfile(os.path.join(path, proof)):
        return path
    folder = resolve_iter_dir_from_root(
        path,
        f"{_PRETRAINED}.path is {path!r}: it holds neither {proof} nor an iteration (iter_*), so it is not {what}",
    )
    if not os.path.isfile(os.path.join(folder, proof)):
        raise FileNotFoundError(f"{_PRETRAINED}.path is {path!r}: {folder} holds no {proof}, so it is not {what}")
    return folder
