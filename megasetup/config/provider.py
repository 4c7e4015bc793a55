"""Where a model provider comes from: a Hugging Face architecture, or the run_config.yaml of a Megatron checkpoint."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from megasetup.compat.bridge import import_bridge
from megasetup.compat.hf_config import patch_hf_configs
from megasetup.config.errors import config_error
from megasetup.config.fields import POLICY, section
from megasetup.config.model_name import what_is_wrong

RUN_CONFIG = "run_config.yaml"
_FIRST_ITERATION = "iter_0000000"
_MODEL_NAME = f"{POLICY}.model_name"


def provider_from_hf(config: Mapping[str, Any], hf_model_name: str) -> Any:
    """A provider of a Hugging Face model's architecture, without its weights.

    Args:
        config: the policy config; hf_config_overrides are applied, megatron_cfg.trust_remote_code is honoured.
        hf_model_name: a Hugging Face id, or a folder with a config.json.

    Raises:
        ConfigError: there is no such folder, or no config.json in it; the model cannot be found, or Megatron-Bridge
            does not know its architecture.
    """
    if (wrong := what_is_wrong(hf_model_name)) is not None:
        raise config_error(_MODEL_NAME, hf_model_name, wrong)
    patch_hf_configs()
    # (a copy, because Bridge and transformers fill in what nested overrides leave out)
    kwargs: dict[str, Any] = copy.deepcopy(dict(section(config, "hf_config_overrides")))
    megatron = section(config, "megatron_cfg")
    if "trust_remote_code" in megatron:
        kwargs["trust_remote_code"] = megatron["trust_remote_code"]
    try:
        bridge = import_bridge().AutoBridge.from_hf_pretrained(hf_model_name, **kwargs)
        return bridge.to_megatron_provider(load_weights=False)
    except (ValueError, TypeError, OSError) as error:
        because = " with policy.hf_config_overrides" if section(config, "hf_config_overrides") else ""
        raise config_error(_MODEL_NAME, hf_model_name, f"cannot be made a Megatron model{because}: {error}") from error


def provider_from_checkpoint(pretrained_path: str, rank: int) -> Any:
    """The provider that a Megatron-Bridge checkpoint was saved with, through Bridge's own loader and its migrations.

    Args:
        pretrained_path: an iteration's folder, or the folder of a conversion, which holds iteration 0.
        rank: the global rank, for messages.

    Raises:
        FileNotFoundError: there is no run_config.yaml.
        Exception: whatever Bridge's loader raises, with a note on the usual cause.
    """
    folder = pretrained_path
    if not os.path.exists(os.path.join(folder, RUN_CONFIG)):
        folder = os.path.join(pretrained_path, _FIRST_ITERATION)
    path = os.path.join(folder, RUN_CONFIG)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"rank {rank} finds no {path}. Rank 0 probably converted the model to a folder that is not mounted on this "
            "machine: put HF_HOME, or MEGASETUP_CHECKPOINT_DIR, on storage that all nodes share"
        )
    patch_hf_configs()
    loader = import_bridge("megatron.bridge.training.model_load_save")
    try:
        return loader.load_model_config(folder)[0]
    except Exception as error:
        error.add_note(
            f"megasetup: Megatron-Bridge could not load {path}. The usual cause is a checkpoint made by an older "
            f"Megatron-Bridge: delete {pretrained_path} and run again, and it is converted anew"
        )
        raise
