"""One pass over a config that reports everything wrong with it at once, with full paths.

What a value may be comes from the schema, and nothing is converted on the way: YAML that says "1e-5" where a number
belongs is a problem, not a number. The rules between settings are those that the setup itself checks later, gathered
here so that one run shows them all. A key that nobody knows is most often a slip of the pen, so it is reported with the
nearest known one; it is a warning, because a trainer's files may hold keys of its own, unless the caller is strict.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megasetup.config.errors import ConfigAttributeError, ConfigError, Problem, Problems
from megasetup.config.fields import megatron_cfg, section
from megasetup.config.schema import PolicyConfig, TrainerConfig, ValueConfig
from megasetup.config.schema.conform import check

_logger = logging.getLogger("megasetup")

type Rule = Callable[[Mapping[str, Any]], object]
"""A check between settings of one policy, which raises a ConfigError."""


type Locate = Callable[[Problem], Problem]
"""Adds to a problem where its value comes from."""


class _LocatedProblems(Problems):
    """Problems that say where their values come from."""

    def __init__(self, locate: Locate) -> None:
        super().__init__()
        self._locate = locate

    def add(self, path: str, found: Any, remedy: str, kind: type[ConfigError] = ConfigError) -> None:
        super().add(path, found, self._locate(Problem(path, found, remedy)).remedy, kind)


@dataclass
class Findings:
    """What one pass found.

    Attributes:
        problems: what must be put right.
        warnings: keys that are not known. A strict pass puts them among the problems.
    """

    problems: Problems = field(default_factory=Problems)
    warnings: list[Problem] = field(default_factory=list)

    def log_warnings(self) -> None:
        """Log the warnings."""
        for warning in self.warnings:
            _logger.warning("%s", warning)

    def raise_any(self) -> None:
        """Log the warnings, then raise the problems as one error.

        Raises:
            ConfigError: there is at least one problem; the error is also of the builtin classes that they are of.
        """
        self.log_warnings()
        self.problems.raise_any()


def examine_policy(config: Mapping[str, Any], *, strict: bool = False) -> Findings:
    """Find everything that is wrong with a policy.

    Args:
        config: the policy, as YAML gives it. Tuples pass for lists, dtypes for their names.
        strict: an unknown key is a problem, not a warning.
    """
    return _examine(config, PolicyConfig, "policy", ("policy",), strict)


def examine_value(config: Mapping[str, Any], *, strict: bool = False) -> Findings:
    """Find everything that is wrong with a value model; the arguments are those of `examine_policy`."""
    return _examine(config, ValueConfig, "value", ("value",), strict)


def examine_file(config: Mapping[str, Any], *, strict: bool = False, locate: Locate | None = None) -> Findings:
    """Find everything that is wrong with a trainer's file: its `policy` and, where there is one, its `value`.

    Args:
        config: what the file holds (`load_config`). Its other sections are the trainer's and are not looked at.
        strict: an unknown key is a problem, not a warning.
        locate: adds to a problem where its value comes from (`Loaded.located`: file and line).
    """
    return _examine(config, TrainerConfig, "", ("policy", "value"), strict, locate)


def rules() -> Sequence[Rule]:
    """The checks between settings that the config alone decides."""
    # (here, because they need torch)
    from megasetup.config import (
        colocated,
        data_parallel,
        draft,
        logprobs,
        optimizer,
        overrides,
        parallelism,
        peft,
        performance,
        reward,
        rope,
        router_replay,
    )

    return (
        reward.validate_reward_model_config,
        rope.validate_rope_config,
        parallelism.validate_parallelism_config,
        performance.fp8_settings,
        optimizer.validate_optimizer_config,
        data_parallel.validate_data_parallel_config,
        logprobs.validate_chunking_config,
        logprobs.fused_linear_logprobs_settings,
        peft.validate_peft_config,
        router_replay.validate_router_replay_config,
        draft.validate_draft_config,
        colocated.validate_colocated_config,
        lambda config: overrides.validate_model_override_conflicts(
            megatron_cfg(config), section(config, "megatron_cfg", "model_overrides")
        ),
    )


def _examine(
    config: Any, schema: Any, path: str, models: Sequence[str], strict: bool, locate: Locate | None = None
) -> Findings:
    findings = Findings() if locate is None else Findings(_LocatedProblems(locate))
    unknown = check(config, schema, path, findings.problems)
    if strict:
        for problem in unknown:
            findings.problems.add(problem.path, problem.found, problem.remedy, ConfigAttributeError)
    else:
        findings.warnings.extend(unknown if locate is None else map(locate, unknown))
    for model in models:
        policy = config if path else config.get(model) if isinstance(config, Mapping) else None
        if isinstance(policy, Mapping):
            _apply_rules(policy, model, findings.problems)
    return findings


def _apply_rules(policy: Mapping[str, Any], model: str, problems: Problems) -> None:
    known = problems.paths()
    for rule in rules():
        try:
            rule(policy)
        except ConfigError as error:
            problems.add_news(of_model(error, model), known)
        except Exception:
            if not known:  # (what a rule makes of a value of the wrong type is no news)
                raise


def of_model(error: ConfigError, model: str) -> ConfigError:
    """The same error with the paths of another model: rules, and the setup, call every model a policy.

    Args:
        error: whose paths begin with "policy".
        model: the model's own section of the file.
    """
    return type(error)(
        *(replace(problem, path=re.sub(r"^policy(?![^.\[])", model, problem.path)) for problem in error.problems)
    )
