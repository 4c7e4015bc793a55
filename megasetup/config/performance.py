"""What changes speed and memory and not the result: recomputation, fusions, attention, CUDA graphs, fp8, offloading.

Each of these stands in a function of its own below; `apply_performance_config` runs them all, so that one config's
problems are reported together.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megasetup.compat.fusions import refused_fusions, without_missing_fusions
from megasetup.config.environment import clear_attention_environment
from megasetup.config.errors import (
    MISSING,
    ConfigAssertionError,
    ConfigKeyError,
    Problems,
    config_error,
)
from megasetup.config.fields import (
    MEGATRON,
    effective,
    has_field,
    megatron_cfg,
    same_names,
    section,
    set_field,
    set_fields,
)
from megasetup.config.graphs import generation_graph_impl, uses_training_graphs

FIELDS = same_names(
    "apply_rope_fusion",
    "bias_activation_fusion",
    "gradient_accumulation_fusion",
    "use_fused_weighted_squared_relu",
    "transformer_impl",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "cuda_graph_warmup_steps",
    "min_offloaded_tensor_size",
    "activation_offload_fraction",
)
"""Provider field by key of policy.megatron_cfg."""

SETTINGS = {
    "attention_backend": f"{MEGATRON}.attention_backend",
    "recompute_granularity": f"{MEGATRON}.activation_checkpointing",
    "recompute_method": f"{MEGATRON}.activation_checkpointing",
    "recompute_num_layers": f"{MEGATRON}.activation_checkpointing",
    "recompute_modules": f"{MEGATRON}.recompute_modules",
    "fp8": f"{MEGATRON}.fp8_cfg.fp8",
    "fp8_recipe": f"{MEGATRON}.fp8_cfg.fp8_recipe",
    "fp8_param": f"{MEGATRON}.fp8_cfg.fp8_param",
    "fine_grained_activation_offloading": f"{MEGATRON}.fine_grained_activation_offloading",
    "offload_modules": f"{MEGATRON}.offload_modules",
}
"""Full path of the setting by the provider field that it decides, where it is more than passed through."""

FP8_KEYS = ("fp8", "fp8_recipe", "fp8_param")

_MOE_MODULES = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})

_EXPANDED_SEQUENCE = "expanded_sequence_v1"

_LAYER_SPECS = "megatron.bridge.models.gpt_provider"


def apply_performance_config(model_cfg: Any, config: Mapping[str, Any]) -> None:
    """Set what the config says of speed and memory, and clear the environment that attention_backend overrides.

    Args:
        model_cfg: the model provider, changed in place.
        config: the policy config.

    Raises:
        ConfigError: one setting or more is wrong, lacks another that it needs, or does not fit the model.
    """
    megatron = megatron_cfg(config)
    problems = Problems()
    if has_field(model_cfg, "parallel_output"):
        model_cfg.parallel_output = True
    with problems.collect():
        _apply_recompute(model_cfg, megatron)
    if not getattr(model_cfg, "gated_linear_unit", False) and getattr(model_cfg, "activation_func", None) is None:
        problems.add(
            "the provider's activation_func",
            None,
            "must be a function, because the model has no gated linear unit: Megatron-Bridge's provider of this model "
            "should set it; from Python, model_overrides.activation_func can",
            ConfigAssertionError,
        )
    set_fields(model_cfg, megatron, FIELDS, MEGATRON, problems)
    without_missing_fusions(model_cfg, {*megatron, *section(config, "megatron_cfg", "model_overrides")})
    if "transformer_impl" in megatron:
        choose_layer_spec(model_cfg, megatron["transformer_impl"])
    with problems.collect():
        _apply_attention_backend(model_cfg, megatron)
    with problems.collect():
        if uses_training_graphs(model_cfg) or generation_graph_impl(config) != "none":
            set_field(model_cfg, "use_te_rng_tracker", True, f"{MEGATRON}.cuda_graph_impl")
    with problems.collect():
        _apply_fp8(model_cfg, config)
    with problems.collect():
        _apply_activation_offloading(model_cfg, megatron)
    problems.raise_any()


def validate_fusions(config: Mapping[str, Any]) -> None:
    """Check that this machine has what the fusions need which the config switches on.

    Args:
        config: the policy config.

    Raises:
        ConfigError: one cannot be built here, and Megatron would refuse the model; lists all.
    """
    megatron = megatron_cfg(config)
    problems = Problems()
    for key, needs in refused_fusions().items():
        if megatron.get(key):
            problems.add(f"{MEGATRON}.{key}", True, f"must be false: Megatron needs {needs}, which is not installed")
    problems.raise_any()


def _apply_recompute(model_cfg: Any, megatron: Mapping[str, Any]) -> None:
    path = f"{MEGATRON}.activation_checkpointing"
    if "activation_checkpointing" in megatron:
        value = megatron["activation_checkpointing"]
        granularity = ("full" if value else None) if isinstance(value, bool) else value
        if granularity not in (None, "full", "selective"):
            raise config_error(path, value, "must be true or 'full', 'selective', or false")
        full = granularity == "full"
        set_field(model_cfg, "recompute_granularity", granularity, path)
        set_field(model_cfg, "recompute_method", "uniform" if full else None, path)
        set_field(model_cfg, "recompute_num_layers", 1 if full else None, path)
    if "recompute_modules" in megatron:
        set_field(model_cfg, "recompute_modules", megatron["recompute_modules"], f"{MEGATRON}.recompute_modules")


def choose_layer_spec(model_cfg: Any, transformer_impl: str) -> None:
    """Give a provider the layers of a transformer_impl, where its layer spec is one of Bridge's own.

    Args:
        model_cfg: the model provider, changed in place.
        transformer_impl: Megatron's name for the kind of layers.
    """
    # Megatron-Bridge's GPT providers build Transformer Engine layers whatever transformer_impl says, unless their layer
    # spec is another one. A spec that is not one of Bridge's own two is the model's and stays.
    spec = getattr(model_cfg, "transformer_layer_spec", None)
    if getattr(spec, "__module__", None) != _LAYER_SPECS:
        return
    specs = importlib.import_module(_LAYER_SPECS)
    if transformer_impl == "local" and spec in (specs.default_layer_spec, specs.transformer_engine_layer_spec):
        model_cfg.transformer_layer_spec = specs.local_layer_spec
    elif transformer_impl == "transformer_engine" and spec is specs.local_layer_spec:
        model_cfg.transformer_layer_spec = specs.default_layer_spec


def _apply_attention_backend(model_cfg: Any, megatron: Mapping[str, Any]) -> None:
    expanded = getattr(model_cfg, "nemotron_omni_contract", None) == _EXPANDED_SEQUENCE
    if "attention_backend" not in megatron and not expanded:
        return
    from megatron.core.transformer.enums import AttnBackend  # (Megatron is not imported with this file)

    path, value = f"{MEGATRON}.attention_backend", megatron.get("attention_backend", "auto")
    name = value.name if isinstance(value, AttnBackend) else value
    if not isinstance(name, str) or name not in AttnBackend.__members__:
        raise config_error(path, value, f"must be one of {', '.join(AttnBackend.__members__)}")
    if expanded and name == "flash":
        raise config_error(
            path,
            value,
            f"must be another one, such as auto: models whose nemotron_omni_contract is {_EXPANDED_SEQUENCE} pass an "
            "attention mask that flash attention does not take",
        )
    if "attention_backend" in megatron:
        clear_attention_environment()
    set_field(model_cfg, "attention_backend", AttnBackend[name], path)


def fp8_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of fp8, fp8_recipe and fp8_param when fp8 is enabled; nothing when it is not.

    Args:
        config: the policy config.

    Raises:
        ConfigKeyError: fp8 is enabled and one of them is absent; or fp8_cfg does not say whether it is.
    """
    settings = section(megatron_cfg(config), "fp8_cfg", path=MEGATRON)
    path = f"{MEGATRON}.fp8_cfg"
    if settings and "enabled" not in settings:
        raise config_error(f"{path}.enabled", MISSING, "must be true or false", ConfigKeyError)
    if not settings.get("enabled"):
        return {}
    problems = Problems()
    for key in FP8_KEYS:
        if key not in settings:
            problems.add(f"{path}.{key}", MISSING, f"is needed, because {path}.enabled is true", ConfigKeyError)
    problems.raise_any()
    return {key: settings[key] for key in FP8_KEYS}


def _apply_fp8(model_cfg: Any, config: Mapping[str, Any]) -> None:
    path = f"{MEGATRON}.fp8_cfg"
    settings = fp8_settings(config)
    if settings:
        for key in FP8_KEYS:
            set_field(model_cfg, key, settings[key], f"{path}.{key}")
    elif section(megatron_cfg(config), "fp8_cfg", path=MEGATRON):
        # Disabled, which also holds for a checkpoint that was trained with it.
        set_field(model_cfg, "fp8", None, f"{path}.enabled")
        set_field(model_cfg, "fp8_param", False, f"{path}.enabled")


def _apply_activation_offloading(model_cfg: Any, megatron: Mapping[str, Any]) -> None:
    switch, modules_path = f"{MEGATRON}.fine_grained_activation_offloading", f"{MEGATRON}.offload_modules"
    if "offload_modules" in megatron:
        set_field(model_cfg, "offload_modules", megatron["offload_modules"], modules_path)
    if "fine_grained_activation_offloading" not in megatron:
        return
    enabled = bool(megatron["fine_grained_activation_offloading"])
    if not enabled:
        set_field(model_cfg, "fine_grained_activation_offloading", False, switch)
        if hasattr(model_cfg, "offload_modules"):
            model_cfg.offload_modules = []
        return
    modules = effective(megatron, "offload_modules", model_cfg, MISSING)
    if not isinstance(modules, list) or not modules:
        raise config_error(
            modules_path,
            modules,
            f"must be a list of at least one module, because {switch} is true",
            ConfigAssertionError,
        )
    of_experts = sorted(_MOE_MODULES.intersection(modules))
    if of_experts and not getattr(model_cfg, "num_moe_experts", None):
        raise config_error(
            modules_path,
            modules,
            f"must do without {', '.join(of_experts)}: the model has no experts",
            ConfigAssertionError,
        )
    set_field(model_cfg, "fine_grained_activation_offloading", True, switch)
