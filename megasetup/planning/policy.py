"""A plan from a policy config, as trainers write it, through the checks and classes of the run itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.errors import MISSING, config_error
from megasetup.config.fields import MEGATRON, POLICY, megatron_cfg, section
from megasetup.planning.plan import plan_run
from megasetup.planning.result import Limits, RunPlan
from megasetup.planning.sync_time import Rates

# Settings of speed that Megatron refuses, or that ask for a GPU or change the environment, on the laptop that plans.
# They change no parameter, so they are left out of the config that is planned.
_LEFT_OUT = (
    "apply_rope_fusion",
    "moe_permute_fusion",
    "moe_enable_deepep",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "fp8_cfg",
    "fine_grained_activation_offloading",
    "offload_modules",
    "attention_backend",
)


def plan_policy(
    config: Mapping[str, Any],
    *,
    gpus: int,
    nodes: int | None = None,
    limits: Limits | None = None,
    rates: Rates | None = None,
) -> RunPlan:
    """Plan the run of a policy config. Reads the model's config.json or run_config.yaml and no weights.

    Args:
        config: the policy, as YAML gives it.
        gpus: how many the run has.
        nodes: on how many nodes. Default: 8 GPUs each.
        limits: what a GPU and a node have. Default: a DGX H200.
        rates: what bounds a sync. Default: figures of H200 hosts.

    Raises:
        ConfigError: what is wrong with the config, all of it.
        PlanningError: what cannot be planned.
        FileNotFoundError, OSError, ValueError: the model's architecture cannot be read.
    """
    container = _container(config)
    plan = plan_run(
        container.model,
        container.optimizer,
        container.ddp,
        gpus=gpus,
        nodes=nodes,
        limits=limits,
        rates=rates,
        use_tp_pp_dp_mapping=container.dist.use_tp_pp_dp_mapping,
        fast_hybrid_optimizer=megatron_cfg(config).get("fast_hybrid_optimizer", True),
    )
    return plan.with_notes(*_not_planned(config))


def _container(config: Mapping[str, Any]) -> Any:
    from megasetup.config.precision import policy_dtype
    from megasetup.config.setup import setup_model_config

    name = config.get("model_name", MISSING)
    if not isinstance(name, str):
        raise config_error(f"{POLICY}.model_name", name, "must be a Hugging Face id or the folder of a model")
    # (the length of a run changes nothing that it holds, so it need not be given)
    given = {key: value for key, value in megatron_cfg(config).items() if key not in _LEFT_OUT}
    plain = {"train_iters": 1, **given}
    checkpoint = section(config, "pretrained_checkpoint")
    from_checkpoint = checkpoint.get("format") == "megatron_bridge"
    path = None
    if from_checkpoint:
        from megasetup.checkpoint.paths import validate_model_paths

        path = validate_model_paths(config)[1]
    container, _ = setup_model_config(
        {**config, "megatron_cfg": plain}, 0, policy_dtype(config), name, path, skip_weight_load=not from_checkpoint
    )
    return container


def _not_planned(config: Mapping[str, Any]) -> list[str]:
    """What the config asks for that the plan leaves out, as sentences."""
    megatron = megatron_cfg(config)
    notes = []
    if section(megatron, "peft", path=MEGATRON).get("enabled"):
        notes.append(
            "LoRA is on: the plan counts the whole model as trained, where the run trains adapters alone and holds "
            "gradients and optimizer state for those."
        )
    if section(megatron, "fp8_cfg", path=MEGATRON).get("fp8_param"):
        notes.append("FP8 parameters are counted as 16-bit ones.")
    if section(config, "draft").get("enabled"):
        notes.append("The draft model is not counted.")
    return notes
