"""`megasetup check`: everything that is wrong with a config, and if nothing is, what a run with it will do.

It goes through the setup's own steps as far as a machine without a GPU can: the schema, the rules between settings, the
paths, Megatron-Bridge's container and its validation. Whatever a step finds is kept and the next one runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasetup.cli.configs import load, quiet_libraries
from megasetup.cli.differences import Difference, differences
from megasetup.cli.flows import optional_flows

# Settings of speed without which nothing else about a run changes, and which Megatron refuses without Transformer
# Engine: they are left off where it is missing, so that the rest can be checked.
_NEED_TRANSFORMER_ENGINE = ("moe_permute_fusion", "apply_rope_fusion")


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
    from megasetup.config.errors import ConfigError
    from megasetup.config.validate import examine_file

    check = Check()
    try:
        loaded = load(path, overrides)
    except (ConfigError, OSError) as error:
        check.problems += _lines(error)
        return check
    findings = examine_file(loaded.config, strict=strict)
    reported = {problem.path for problem in findings.problems}
    check.problems += [str(loaded.located(problem)) for problem in findings.problems]
    check.warnings += [str(loaded.located(warning)) for warning in findings.warnings]
    models = [name for name in ("policy", "value") if isinstance(loaded.config.get(name), Mapping)]
    if not models and not check.problems:
        check.problems.append(f"{path} has no policy: a trainer's file holds one under `policy:`")
    for name in models:
        model = ModelCheck(name)
        try:
            with quiet_libraries(), contextlib.redirect_stdout(io.StringIO()):
                _examine_model(model, loaded.config[name], check, gpus, weights_path, optimizer_path)
        except ConfigError as error:
            for problem in error.problems:
                located = loaded.located(_of_model(problem, name))
                if located.path not in reported:
                    check.problems.append(str(located))
        except (ValueError, AssertionError, LookupError, OSError, RuntimeError) as error:
            # A config that is known to be wrong may break any step after; that is no news.
            if not check.problems:
                check.problems += [f"{name}: {line}" for line in _lines(error)]
        except (TypeError, AttributeError):
            if not check.problems:
                raise
        check.models.append(model)
    return check


def _of_model(problem: Any, name: str) -> Any:
    from megasetup.config.errors import Problem

    own = problem.path.startswith("policy.") or problem.path == "policy"
    return Problem(name + problem.path.removeprefix("policy"), problem.found, problem.remedy) if own else problem


def _lines(error: Exception) -> list[str]:
    problems = getattr(error, "problems", None)
    if problems:
        return [str(problem) for problem in problems]
    text = str(error) or type(error).__name__
    notes = getattr(error, "__notes__", [])
    return ["\n".join([text, *notes])]


def _examine_model(
    model: ModelCheck,
    config: Mapping[str, Any],
    check: Check,
    gpus: int | None,
    weights_path: Path | None,
    optimizer_path: Path | None,
) -> None:
    from megasetup.checkpoint.paths import validate_model_paths
    from megasetup.config.value_model import make_policy_like_config

    policy = make_policy_like_config(config) if model.name == "value" else dict(config)
    hf_model_name, pretrained_path, exists = validate_model_paths(policy)
    # (the trainer's checkpoints are the policy's; a value model's lie elsewhere)
    weights, optimizer = (weights_path, optimizer_path) if model.name == "policy" else (None, None)
    model.steps = _steps(policy, hf_model_name, pretrained_path, exists, weights, optimizer)
    policy = _without_transformer_engine(policy, model.name, check)
    default, runtime = _build(policy, hf_model_name, pretrained_path, exists, weights, optimizer)
    container = runtime.megatron_cfg
    sizes = _validate(container, gpus)
    if not exists:
        # Bridge's validation wants the checkpoint to be there; the run will have made it by then.
        container.checkpoint = _checkpoint(policy, pretrained_path, weights, optimizer)
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
    weights_path: Path | None,
    optimizer_path: Path | None,
) -> tuple[Any, Any]:
    """The provider as it comes, and the runtime config.

    A checkpoint that will only be made by the run is stood in for by the Hugging Face architecture that it will hold.
    """
    from megasetup.config.fields import section
    from megasetup.config.provider import provider_from_checkpoint, provider_from_hf
    from megasetup.config.runtime import validate_and_set_config

    weights, optimizer = (None if path is None else str(path) for path in (weights_path, optimizer_path))
    runtime = validate_and_set_config(
        policy, 0, hf_model_name, pretrained_path if exists else None, weights, optimizer, skip_weight_load=not exists
    )
    if exists and section(policy, "pretrained_checkpoint").get("format") != "megatron_lm":
        default = provider_from_checkpoint(pretrained_path, 0)
    else:
        default = provider_from_hf(policy, hf_model_name)
    for name in _NEED_TRANSFORMER_ENGINE:
        if not _has_transformer_engine() and hasattr(default, name):
            setattr(default, name, False)
    default.finalize()
    return default, runtime


def _checkpoint(
    policy: Mapping[str, Any], pretrained_path: str, weights_path: Path | None, optimizer_path: Path | None
) -> Any:
    """The checkpoint settings of a run that has made its pretrained checkpoint."""
    from megasetup.config.checkpoint import create_checkpoint_config
    from megasetup.config.fields import section
    from megasetup.config.performance import fp8_settings

    weights, optimizer = (None if path is None else str(path) for path in (weights_path, optimizer_path))
    main_params = bool(fp8_settings(policy).get("fp8_param")) and weights is None and optimizer is None
    settings = section(policy, "megatron_cfg", "checkpoint")
    return create_checkpoint_config(pretrained_path, weights, optimizer, main_params, settings)


def _validate(container: Any, gpus: int | None) -> Any:
    """Bridge's own validation, as on a rank of the run. Returns the sizes that it was done for."""
    from megasetup.planning import ParallelSizes, pretended_world

    one = ParallelSizes.of(container.model, 1)
    fewest = math.lcm(one.tensor * one.pipeline * one.context, one.expert_tensor * one.expert * one.pipeline)
    sizes = ParallelSizes.of(
        container.model,
        fewest if gpus is None else gpus,
        optimizer_instances=container.ddp.num_distributed_optimizer_instances,
        use_tp_pp_dp_mapping=container.dist.use_tp_pp_dp_mapping,
    )
    with pretended_world(sizes, 0):
        container.validate()
    return sizes


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _without_transformer_engine(policy: dict[str, Any], name: str, check: Check) -> dict[str, Any]:
    """The policy as it can be checked here."""
    megatron = policy.get("megatron_cfg")
    if _has_transformer_engine() or not isinstance(megatron, Mapping):
        return policy
    asked = [key for key in _NEED_TRANSFORMER_ENGINE if megatron.get(key)]
    if asked:
        keys = " and ".join(f"{name}.megatron_cfg.{key}" for key in asked)
        check.remarks.append(f"{keys} could not be checked: Transformer Engine is not installed here.")
    return {**policy, "megatron_cfg": {**megatron, **dict.fromkeys(_NEED_TRANSFORMER_ENGINE, False)}}


def _steps(
    policy: Mapping[str, Any],
    hf_model_name: str,
    pretrained_path: str,
    exists: bool,
    weights_path: Path | None,
    optimizer_path: Path | None,
) -> list[str]:
    from megasetup.checkpoint.paths import resolve_iter_dir_from_root
    from megasetup.config.fields import section

    megatron = section(policy, "megatron_cfg")
    kind = section(policy, "pretrained_checkpoint").get("format")
    if kind is not None:
        steps = [f"Nothing is converted: {kind} checkpoint {pretrained_path}."]
    elif exists and not megatron.get("force_reconvert_from_hf"):
        steps = [f"Nothing is converted: the converted checkpoint {pretrained_path} is there."]
    else:
        again = " again, because force_reconvert_from_hf is set" if exists else ""
        steps = [f"Convert {hf_model_name} from Hugging Face to {pretrained_path}{again}."]
    resumed = None
    if weights_path is not None:
        with contextlib.suppress(FileNotFoundError):
            resumed = resolve_iter_dir_from_root(str(weights_path), "")
    if resumed is None:
        steps.append(f"Load the weights from {pretrained_path}.")
        steps.append("Refresh every FP32 copy of the weights, because no optimizer state is loaded.")
        if weights_path is not None:
            steps.append(f"Save training checkpoints in {weights_path}, which holds none yet.")
    elif optimizer_path is None:
        steps.append(f"Resume the weights from {resumed}.")
        steps.append("Refresh every FP32 copy of the weights, because no optimizer state is loaded.")
    else:
        steps.append(f"Resume weights and optimizer state from {resumed}; the FP32 copies stay as they were saved.")
    return steps
