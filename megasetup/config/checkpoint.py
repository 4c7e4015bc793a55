"""From where weights and optimizer state are loaded, and how training checkpoints are written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megasetup.compat.bridge import import_bridge
from megasetup.config.build import BRIDGE_CONFIG, build_from_section
from megasetup.config.errors import Problems, config_error
from megasetup.config.fields import MEGATRON, same_names, section
from megasetup.config.performance import fp8_settings

_logger = logging.getLogger("megasetup")

_CHECKPOINT = f"{MEGATRON}.checkpoint"

FIELDS = same_names(
    "async_save",
    "ckpt_assume_constant_structure",
    "ckpt_fully_parallel_save_process_group",
    "ckpt_fully_parallel_load_process_group",
    "ckpt_fully_parallel_load_exchange_algo",
)
"""Field of CheckpointConfig by key of policy.megatron_cfg.checkpoint."""


def create_policy_checkpoint_config(
    config: Mapping[str, Any],
    pretrained_path: str | None,
    weights_path: str | None,
    optimizer_path: str | None,
    *,
    skip_weight_load: bool = False,
) -> Any:
    """The CheckpointConfig of a policy: `create_checkpoint_config` with what follows from its other settings.

    Args:
        config: the policy config.
        pretrained_path, weights_path, optimizer_path: see there.
        skip_weight_load: no checkpoint is read; a policy that also saves none needs no path for asynchronous saving.

    Raises:
        ConfigError: see there; fp8 is enabled and incomplete.
    """
    settings = dict(section(config, "megatron_cfg", "checkpoint"))
    if skip_weight_load:
        pretrained_path = None
        if weights_path is None and settings.get("async_save"):
            _logger.info("%s.async_save is left out: this policy saves nothing", _CHECKPOINT)
            settings["async_save"] = False
    # FP8 parameters have lost what master weights need; a resumed run has better ones in its optimizer state.
    resumes = weights_path is not None or optimizer_path is not None
    load_main_params = bool(fp8_settings(config).get("fp8_param")) and pretrained_path is not None and not resumes
    return create_checkpoint_config(pretrained_path, weights_path, optimizer_path, load_main_params, settings)


def create_checkpoint_config(
    pretrained_path: str | None,
    weights_path: str | None,
    optimizer_path: str | None,
    load_main_params_from_ckpt: bool = False,
    ckpt_cfg: Mapping[str, Any] | None = None,
) -> Any:
    """Megatron-Bridge's CheckpointConfig.

    Args:
        pretrained_path: the checkpoint to start from, or None.
        weights_path: where training checkpoints are saved and loaded; None on a fresh run.
        optimizer_path: the optimizer state to resume; only whether there is one matters.
        load_main_params_from_ckpt: whether the master weights come from the checkpoint, not from the model.
        ckpt_cfg: policy.megatron_cfg.checkpoint. Keys that are absent keep Bridge's default.

    Returns:
        The CheckpointConfig: an interval of 100 steps, fully parallel, without the state of random number generators.

    Raises:
        ConfigError: asynchronous saving without any path; a setting that this Bridge does not have.
    """
    settings = {FIELDS[key]: value for key, value in (ckpt_cfg or {}).items() if key in FIELDS}
    save = weights_path
    if settings.get("async_save") and save is None:
        # Bridge wants a path as soon as saving is asynchronous. On a fresh run there is none yet, and the first save
        # gives its own; until then the pretrained checkpoint's, which nothing is written to, stands in.
        save = pretrained_path
        if save is None:
            raise config_error(
                f"{_CHECKPOINT}.async_save", True, "must be false where there is no path to save to or load from"
            )
    problems = Problems()
    # (so that a field which this Bridge lacks is reported as everywhere else)
    known = build_from_section(import_bridge(BRIDGE_CONFIG).CheckpointConfig, settings, _CHECKPOINT, {}, problems)
    problems.raise_any()
    known.save_interval = 100
    known.save = save
    known.load = weights_path
    known.load_optim = optimizer_path is not None
    known.pretrained_checkpoint = pretrained_path
    known.fully_parallel_save = True
    known.fully_parallel_load = True
    known.load_rng = False
    known.load_main_params_from_ckpt = load_main_params_from_ckpt
    return known
