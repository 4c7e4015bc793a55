"""`megasetup check`: everything that is wrong with a config, and if nothing is, what a run with it will do.

It goes through the setup's own steps as far as a machine without a GPU can: the schema, the rules between settings, the
paths, Megatron-Bridge's container and its validation. Whatever a step finds is kept and the next one runs.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasetup.cli.check_steps import steps_of_a_run
from megasetup.cli.configs import heard_warnings, load, quiet_libraries
from megasetup.cli.differences import Difference, differences
from megasetup.cli.flows import optional_flows


@dataclass
class ModelCheck:
    """What was found out about one model of the file.

    Attributes:
        name: its section, "policy" or "value".
        steps: what will happen, in order, as sentences.
        flows: the optional flows that the config switches on, as sentences.
        facts: what the setup works out, by name.
        settings: by part of the container, the fields that are not at their defaults.
    """

    name: str
    steps: list[str] = field(default_factory=list)
    flows: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, list[Difference]] = field(default_factory=dict)


@dataclass
class Check:
    """What was found out about a file.

    Attributes:
        problems: what must be put right, with full paths and where the values come from.
        warnings: what is probably a slip.
        remarks: what could not be checked here, and why.
        models: one entry a model.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    models: list[ModelCheck] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = {"ok": self.ok, **asdict(self)}
        for model, held in zip(data["models"], self.models, strict=True):
            model["settings"] = {
                part: {row.field: {"default": row.default, "value": row.value} for row in rows}
                for part, rows in held.settings.items()
            }
        return data


def examine(
    path: Path,
    overrides: Sequence[str],
    *,
    strict: bool = False,
    gpus: int | None = None,
    weights_path: Path | None = None,
    optimizer_path: Path | None = None,
) -> Check:
    """Check a file.

    Args:
        path: the file.
        overrides: settings to change.
        strict: a key that nobody reads is a problem.
        gpus: how many the run has. Default: as few as its sizes allow.
        weights_path, optimizer_path: of training checkpoints, as a trainer passes them to the setup.
    """
    from megasetup.config.environment import environment_restored
    from megasetup.config.errors import ConfigError, Problems
    from megasetup.config.validate import examine_file, of_model

    check = Check()
    try:
        loaded = load(path, overrides)
    except ConfigError as error:
        check.problems += map(str, error.problems)
        return check
    except OSError as error:
        check.problems.append(str(error))
        return check
    findings = examine_file(loaded.config, strict=strict, locate=loaded.located)
    known = findings.problems.paths() | {warning.path for warning in findings.warnings}
    check.problems += map(str, findings.problems)
    check.warnings += map(str, findings.warnings)
    for name in ("policy", "value"):
        config = loaded.config.get(name)
        if not isinstance(config, Mapping):
            continue
        model = ModelCheck(name)
        problems = Problems()
        with heard_warnings() as heard:
            try:
                with quiet_libraries(), environment_restored(), contextlib.redirect_stdout(io.StringIO()):
                    _examine_model(model, config, check, gpus, weights_path, optimizer_path)
            except ConfigError as error:
                problems.add_news(of_model(error, name), known)
            except Exception as error:
                # A config that is known to be wrong may break any step after; that is no news.
                if not check.problems:
                    check.problems.append(f"{name}: {_explained(error)}")
        check.problems += [str(loaded.located(problem)) for problem in problems]
        check.warnings += [warning for warning in heard if _path_in(warning, name) not in known]
        check.models.append(model)
    return check


def _path_in(warning: str, name: str) -> str:
    """The path of the key that a warning of the setup begins with. (The setup calls every model a policy.)"""
    path = warning.partition(" ")[0]
    return name + path.removeprefix("policy") if path.startswith("policy") else path


def _explained(error: Exception) -> str:
    """What a step that could not go on says, for a reader who need not see where in the code it was.

    Raises:
        Exception: the same, where it is none that a config, a path or a library may lead to.
    """
    notes = getattr(error, "__notes__", [])
    if not notes and not isinstance(error, ValueError | AssertionError | LookupError | OSError | RuntimeError):
        raise error
    return "\n".join([str(error) or type(error).__name__, *notes])


def _examine_model(
    model: ModelCheck,
    config: Mapping[str, Any],
    check: Check,
    gpus: int | None,
    weights_path: Path | None,
    optimizer_path: Path | None,
) -> None:
    from megasetup.checkpoint.paths import validate_model_paths
    from megasetup.config.checkpoint import create_policy_checkpoint_config
    from megasetup.config.value_model import make_policy_like_config

    policy = make_policy_like_config(config) if model.name == "value" else dict(config)
    hf_model_name, pretrained_path, exists = validate_model_paths(policy)
    # (the trainer's checkpoints are the policy's; a value model's lie elsewhere)
    own = (weights_path, optimizer_path) if model.name == "policy" else (None, None)
    weights, optimizer = (None if path is None else str(path) for path in own)
    model.steps = steps_of_a_run(policy, hf_model_name, pretrained_path, exists, weights, optimizer)
    policy = _without_refused_fusions(policy, model.name, check)
    default, runtime = _build(policy, hf_model_name, pretrained_path, exists, weights, optimizer)
    container = runtime.megatron_cfg
    sizes = _validate(container, policy, gpus, check)
    if not exists:
        # Bridge's validation wants the checkpoint to be there; the run will have made it by then.
        container.checkpoint = create_policy_checkpoint_config(policy, pretrained_path, weights, optimizer)
    model.flows = optional_flows(policy)
    model.facts = {
        "model": type(runtime.model_cfg).__name__,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "rows of the embedding": runtime.final_padded_vocab_size,
        "optimizer on the CPU": runtime.optimizer_cpu_offload,
        "generation": {None: "none", True: "on the same GPUs", False: "elsewhere"}[runtime.is_generation_colocated],
        "checked for GPUs": sizes.gpus,
        "data parallel size": sizes.data,
    }
    model.settings = {"model": differences(runtime.model_cfg, default)}
    for part in ("optimizer", "ddp", "checkpoint", "scheduler"):
        held = getattr(container, part)
        model.settings[part] = differences(held, type(held)())


def _build(
    policy: Mapping[str, Any],
    hf_model_name: str,
    pretrained_path: str,
    exists: bool,
    weights: str | None,
    optimizer: str | None,
) -> tuple[Any, Any]:
    """The provider as it comes, and the runtime config.

    A checkpoint that will only be made by the run is stood in for by the Hugging Face architecture that it will hold.
    """
    from megasetup.compat.fusions import without_missing_fusions
    from megasetup.config.fields import section
    from megasetup.config.provider import provider_from_checkpoint, provider_from_hf
    from megasetup.config.runtime import validate_and_set_config

    runtime = validate_and_set_config(
        policy, 0, hf_model_name, pretrained_path if exists else None, weights, optimizer, skip_weight_load=not exists
    )
    if exists and section(policy, "pretrained_checkpoint").get("format") != "megatron_lm":
        default = provider_from_checkpoint(pretrained_path, 0)
    else:
        default = provider_from_hf(policy, hf_model_name)
    without_missing_fusions(default)
    default.finalize()
    return default, runtime


def _validate(container: Any, policy: Mapping[str, Any], gpus: int | None, check: Check) -> Any:
    """Bridge's own validation, as on a rank of the run. Returns the sizes that it was done for."""
    from megasetup.compat.flex_dispatcher import without_asking_the_gpu
    from megasetup.config.refusals import REFUSALS, refusal
    from megasetup.planning import ParallelSizes, pretended_world

    one, instances = ParallelSizes.of(container.model, 1), container.ddp.num_distributed_optimizer_instances
    fewest = math.lcm(one.tensor * one.pipeline * one.context, one.expert_tensor * one.expert * one.pipeline)
    sizes = ParallelSizes.of(
        container.model,
        fewest * instances if gpus is None else gpus,
        optimizer_instances=instances,
        use_tp_pp_dp_mapping=container.dist.use_tp_pp_dp_mapping,
    )
    if getattr(container.model, "moe_token_dispatcher_type", None) == "flex":
        check.remarks.append("Whether the run's GPUs can use the flex dispatcher is found out when the run starts.")
    with pretended_world(sizes, 0), without_asking_the_gpu():
        try:
            container.validate()
        except REFUSALS as error:
            raise refusal(error, policy, f"Megatron-Bridge says of a world size of {sizes.gpus}") from error
    return sizes


def _without_refused_fusions(policy: dict[str, Any], name: str, check: Check) -> dict[str, Any]:
    """The policy as it can be checked here: without what Megatron refuses on this machine, and the run's may have."""
    from megasetup.compat.fusions import refused_fusions

    megatron = policy.get("megatron_cfg")
    if not isinstance(megatron, Mapping):
        return policy
    asked = {key: needs for key, needs in refused_fusions().items() if megatron.get(key)}
    for key, needs in asked.items():
        check.remarks.append(
            f"{name}.megatron_cfg.{key} could not be checked: Megatron needs {needs}, which is not installed here."
        )
    return {**policy, "megatron_cfg": {**megatron, **dict.fromkeys(asked, False)}}
