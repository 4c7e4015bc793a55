"""What routing replay needs: someone who records routes, and routers that can be told them.

Routes are recorded by vLLM while it generates, and replayed by Megatron's routers while it trains. Megatron takes
several settings beside which its routers never look at the routes they were told; a run with one of them would train on
other routes without a word, so they are refused here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from megasetup.config.errors import MISSING, ConfigAssertionError, Problems
from megasetup.config.fields import MEGATRON, POLICY, megatron_cfg, section, set_field

_logger = logging.getLogger("megasetup")

ENABLED_KEY = f"{POLICY}.router_replay.enabled"

_BECAUSE = f"because {ENABLED_KEY} is true"
_STAGES = "must be null: routes are not replayed over virtual pipeline stages"
# Those of the settings below that have keys in megatron_cfg; the others are given in model_overrides.
_KEYS = ("moe_router_load_balancing_type", "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope")
_CAPTURED = {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"}


def unreplayable(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Settings of a model beside which its routers would not route as they are told.

    Args:
        settings: fields of Megatron's TransformerConfig by name; absent ones are at Megatron's defaults.

    Yields:
        (field, its value, what would be right, as the end of a sentence).
    """
    balancing = settings.get("moe_router_load_balancing_type")
    if not {"sinkhorn", "quantile_balancing"}.isdisjoint(_listed(balancing)):
        yield "moe_router_load_balancing_type", balancing, "must be another one: its router does not replay"
    if settings.get("moe_router_fusion"):
        yield "moe_router_fusion", True, "must be false: the fused router does not replay"
    capacity = settings.get("moe_expert_capacity_factor")
    if capacity is not None and capacity >= 0:  # (to Megatron a negative one is none)
        yield "moe_expert_capacity_factor", capacity, "must be null: experts would drop replayed tokens"
    if settings.get("virtual_pipeline_model_parallel_size") not in (None, 1):
        stages = settings["virtual_pipeline_model_parallel_size"]
        yield "virtual_pipeline_model_parallel_size", stages, _STAGES
    if settings.get("num_layers_per_virtual_pipeline_stage") is not None:
        yield "num_layers_per_virtual_pipeline_stage", settings["num_layers_per_virtual_pipeline_stage"], _STAGES
    graphs = settings.get("cuda_graph_impl") or "none"
    if graphs != "none" and _captures_routers(graphs, settings):
        yield (
            "cuda_graph_impl",
            graphs,
            "must be none, or cuda_graph_modules must leave routers out: a graph would replay one micro-batch's routes",
        )


def _captures_routers(graphs: str, settings: Mapping[str, Any]) -> bool:
    modules = settings.get("cuda_graph_modules") or settings.get("cuda_graph_scope")
    names = {str(getattr(module, "name", module)) for module in _listed(modules)}
    return graphs == "full_iteration" or not names or not _CAPTURED.isdisjoint(names)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def router_replay_enabled(config: Mapping[str, Any]) -> bool:
    """Whether a policy routes tokens in training as generation routed them.

    Args:
        config: the policy config.
    """
    return bool(section(config, "router_replay").get("enabled"))


def validate_router_replay_config(config: Mapping[str, Any]) -> None:
    """Check what routing replay needs, from the config alone.

    Args:
        config: the policy config.

    Raises:
        ConfigAssertionError: replay without Megatron for training or without vLLM for generation, with virtual
            pipeline stages, or with routing that cannot be replayed; all problems together.
    """
    if not router_replay_enabled(config):
        return
    problems = Problems()
    megatron = megatron_cfg(config)
    if megatron.get("enabled") is False:
        problems.add(f"{MEGATRON}.enabled", False, f"must be true, {_BECAUSE}", ConfigAssertionError)
    backend = section(config, "generation").get("backend", MISSING)
    if backend != "vllm":
        problems.add(
            f"{POLICY}.generation.backend",
            backend,
            f"must be vllm, which records the routes, {_BECAUSE}",
            ConfigAssertionError,
        )
    for path, settings in _settings(config):
        for field, value, remedy in unreplayable(settings):
            problems.add(f"{path}.{field}", value, f"{remedy}; {_BECAUSE}", ConfigAssertionError)
    problems.raise_any()


def apply_router_replay_config(model_cfg: Any, config: Mapping[str, Any]) -> None:
    """Switch replay in the routers on or off; a config that does not say leaves the provider alone.

    A fused router that the provider comes with is switched off for replay, with a warning: it computes the same, and
    does not replay.

    Args:
        model_cfg: the model provider, changed in place.
        config: the policy config.

    Raises:
        ConfigAttributeError: replay is on and this Megatron has none.
        ConfigError: replay is on and the model has no experts, or comes with a setting beside which nothing is
            replayed; all problems together.
    """
    replay = section(config, "router_replay")
    if "enabled" not in replay:
        return
    set_field(model_cfg, "moe_enable_routing_replay", bool(replay["enabled"]), ENABLED_KEY)
    if not replay["enabled"]:
        return
    if getattr(model_cfg, "moe_router_fusion", False) and not _given(config, "moe_router_fusion"):
        model_cfg.moe_router_fusion = False
        _logger.warning("moe_router_fusion is switched off, %s: the fused router does not replay", _BECAUSE)
    problems = Problems()
    if not getattr(model_cfg, "num_moe_experts", None):
        problems.add(ENABLED_KEY, True, "must be false: the model has no experts to route to")
    for field, value, remedy in unreplayable(vars(model_cfg)):
        if not _given(config, field):  # (what the config gives is checked with the config)
            problems.add(
                ENABLED_KEY, True, f"must be false, or the model's {field} changed, which is {value!r} and {remedy}"
            )
    problems.raise_any()


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    megatron = megatron_cfg(config)
    yield MEGATRON, {key: megatron[key] for key in _KEYS if key in megatron}
    yield f"{MEGATRON}.model_overrides", section(config, "megatron_cfg", "model_overrides")


def _given(config: Mapping[str, Any], field: str) -> bool:
    return any(field in settings for _, settings in _settings(config))
