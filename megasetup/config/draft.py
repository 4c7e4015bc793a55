"""What a draft model needs, from the config alone.

A draft reads hidden states of some of the policy's layers, which are caught in the policy's own forward pass. Where
that pass does not run layer by layer in Python, or cuts a sequence over ranks in a way that the draft does not know,
there is nothing right to read; such settings are refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megasetup.config.errors import ConfigAssertionError, ConfigError, ConfigNotImplementedError, Problems
from megasetup.config.fields import MEGATRON, POLICY, megatron_cfg, section

DRAFT = f"{POLICY}.draft"
_BECAUSE = f"because {DRAFT}.enabled is true"


def draft_enabled(config: Mapping[str, Any]) -> bool:
    """Whether a draft model is attached to a policy.

    Args:
        config: the policy config.
    """
    return bool(section(config, "draft").get("enabled"))


def default_aux_layers(layers: int) -> list[int]:
    """An early, a middle and a late layer of a policy, counted from 0; all layers where there are no more than three.

    Args:
        layers: how many the policy has.
    """
    if layers < 8:
        return sorted({0, layers // 2, layers - 1})
    return [1, layers // 2 - 1, layers - 4]


def aux_layers(config: Mapping[str, Any], layers: int, of_draft: Sequence[int] | None = None) -> list[int]:
    """The layers of the policy whose hidden states its draft reads, counted from 0, ascending.

    Args:
        config: the policy config.
        layers: how many layers the policy has.
        of_draft: those that the draft's own config names, which policy.draft.aux_layer_indices goes before.

    Raises:
        ConfigError: the policy has no such layer.
    """
    settings = section(config, "draft")
    path, chosen = f"{DRAFT}.aux_layer_indices", settings.get("aux_layer_indices")
    if chosen is None and of_draft:
        path, chosen = f"{DRAFT}.model_name", of_draft
    if chosen is None:
        return default_aux_layers(layers)
    problems = Problems()
    outside = [index for index in chosen if not 0 <= index < layers]
    if outside:
        problems.add(
            path, list(chosen), f"must name layers from 0 to {layers - 1}, which the policy has: not {outside}"
        )
    problems.raise_any()
    return sorted(chosen)


def validate_draft_config(config: Mapping[str, Any]) -> None:
    """Check the settings of a draft, and that it can be trained beside what else the config asks for.

    Args:
        config: the policy config.

    Raises:
        ConfigError: the weight of the loss is negative or no number; the auxiliary layers are none, negative or named
            twice; the policy is not Megatron's, sits on Megatron-FSDP, in CUDA graphs or on context-parallel ranks; all
            problems together.
    """
    settings = section(config, "draft")
    if not settings.get("enabled"):
        return
    problems = Problems()
    weight = settings.get("loss_weight")
    if isinstance(weight, int | float) and not (math.isfinite(weight) and weight >= 0):
        problems.add(f"{DRAFT}.loss_weight", weight, "must be a finite number that is not negative")
    layers = settings.get("aux_layer_indices")
    if layers is not None:
        _check_layers(layers, problems)
    megatron = megatron_cfg(config)
    if megatron.get("enabled") is False:
        problems.add(f"{MEGATRON}.enabled", False, f"must be true, {_BECAUSE}", ConfigAssertionError)
    if (megatron.get("context_parallel_size") or 1) > 1:
        problems.add(
            f"{MEGATRON}.context_parallel_size",
            megatron["context_parallel_size"],
            f"must be 1: a draft needs whole sequences, {_BECAUSE}",
            ConfigNotImplementedError,
        )
    overrides = section(config, "megatron_cfg", "model_overrides")
    for path, graphs in (
        (f"{MEGATRON}.cuda_graph_impl", megatron.get("cuda_graph_impl")),
        (f"{MEGATRON}.model_overrides.cuda_graph_impl", overrides.get("cuda_graph_impl")),
    ):
        if graphs not in (None, "none"):
            problems.add(
                path,
                graphs,
                f"must be none: a graph hides the layers that a draft reads, {_BECAUSE}",
                ConfigAssertionError,
            )
    ddp = section(config, "megatron_cfg", "distributed_data_parallel_config")
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):
        if ddp.get(name):
            problems.add(
                f"{MEGATRON}.distributed_data_parallel_config.{name}",
                True,
                f"must be false: a draft runs outside the forward pass for which it gathers weights, {_BECAUSE}",
                ConfigAssertionError,
            )
    problems.raise_any()


def _check_layers(layers: Any, problems: Problems) -> None:
    path = f"{DRAFT}.aux_layer_indices"
    if not isinstance(layers, list | tuple) or not all(isinstance(index, int) for index in layers):
        problems.add(path, layers, "must be a list of layers, counted from 0", ConfigError)
    elif not layers:
        problems.add(path, layers, "must name at least one layer; null for an early, a middle and a late one")
    elif min(layers) < 0 or len(set(layers)) < len(layers):
        problems.add(path, list(layers), "must name each layer once, counted from 0")
