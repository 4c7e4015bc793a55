"""Megatron's own refusals, said in the words of the config.

Megatron and Bridge check hundreds of things when a provider is finalized and a container validated, and say what is
wrong in the names of their own fields, if at all. A person who wrote a YAML file wants to hear of the key there. So the
first name in the message that the config decides is looked up, with its path and value; a bare assert is quoted.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from megasetup.config.errors import ConfigAssertionError, ConfigError, ConfigKeyError, ConfigTypeError, Problem, Words
from megasetup.config.fields import MEGATRON, POLICY
from megasetup.config.overrides import SETTINGS

REFUSALS = (ValueError, AssertionError, TypeError, LookupError, AttributeError, ArithmeticError, NotImplementedError)
"""What Megatron and Bridge raise for settings that they do not take. Others (a missing library, a GPU) are not."""

_BATCHES = {
    f"{prefix}{name}": f"{POLICY}.train_{name}"
    for prefix in ("", "eval_")
    for name in ("global_batch_size", "micro_batch_size")
}


def refusal(error: Exception, config: Mapping[str, Any], who: str) -> ConfigError:
    """What an exception of Megatron's or Bridge's says about a config.

    Args:
        error: one of REFUSALS.
        config: the policy config.
        who: who says it, of what ("Megatron says of some/model").

    Returns:
        An error of one problem, to be raised from the exception: a ValueError, and of the builtin class that a bare
        AssertionError, KeyError or TypeError was.
    """
    text = _text(error)
    given = dict(_given(config, POLICY))
    path = _named_in(text, given) or _quoted_in(text, given)
    found = Words("refused") if path is None else given[path]
    kind: type[ConfigError] = ConfigAssertionError
    if isinstance(error, TypeError):
        kind = ConfigTypeError
    elif isinstance(error, KeyError):
        kind = ConfigKeyError
    return kind(Problem(path or MEGATRON, found, f"{who}: {text}"))


def names_no_key(error: ConfigError) -> bool:
    """Whether a refusal speaks of Megatron's settings as a whole: no news where some are known to be wrong."""
    return all(problem.path == MEGATRON and isinstance(problem.found, Words) for problem in error.problems)


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    if text and not isinstance(error, KeyError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line if frames else ""
    return ": ".join(filter(None, (text or type(error).__name__, line)))


def _given(value: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Every value of a config that is no section, by its full path."""
    for key, inner in value.items():
        full = f"{path}.{key}"
        if isinstance(inner, Mapping):
            yield from _given(inner, full)
        else:
            yield full, inner


def _named_in(text: str, given: Mapping[str, Any]) -> str | None:
    by_name = {path.rpartition(".")[2]: path for path in given}
    for name in re.findall(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+", text):  # (a word without _ may be plain English)
        for path in (by_name.get(name), SETTINGS.get(name), _BATCHES.get(name)):
            if path in given:
                return path
    return None


def _quoted_in(text: str, given: Mapping[str, Any]) -> str | None:
    quoted = set(re.findall(r"'([^']+)'", text))
    return next((path for path, value in given.items() if isinstance(value, str) and value in quoted), None)
