"""What a wrong config raises, and how several problems of one config come together in one error.

A person who starts a run on hundreds of GPUs wants to hear of every mistake at once, each with the full path of its
key, the value found and what would be right. So a check says what is wrong with `Problems.add`, or raises a
`ConfigError` which `Problems.collect` keeps, and the error that finally leaves lists them all. Callers that were
written against other setup code catch AssertionError, KeyError, TypeError, AttributeError or NotImplementedError; every
class here is a ValueError and one of those as well, and an error of several problems is of all their classes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final


class _Missing:
    """The type of MISSING."""

    def __repr__(self) -> str:
        return "missing"

    def __reduce__(self) -> str:
        return "MISSING"  # (there is one)


MISSING: Final = _Missing()
"""In the place of a value found: the key is absent."""


class Words(str):
    """In the place of a value found, where it is no value that is wrong: shown as it is, without quotes."""

    __slots__ = ()

    __repr__ = str.__str__


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config.

    Attributes:
        path: the full path of the key ("policy.megatron_cfg.optimizer.lr").
        found: the value found, MISSING, or Words that say what is there.
        remedy: what would be right, as the end of a sentence ("must be above 0").
    """

    path: str
    found: Any
    remedy: str

    def __str__(self) -> str:
        return f"{self.path} is {self.found!r}: {self.remedy}"


class ConfigError(ValueError):
    """A config with one or more problems.

    Attributes:
        problems: all of them, in the order in which they were found.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:  # (a KeyError would show the repr of its argument)
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"{len(self.problems)} problems in the config:", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:  # (a worker sends its error to the trainer)
        kinds = tuple(kind for kind in type(self).__mro__ if kind in _KINDS)
        return _remake, (kinds, self.problems)


class ConfigAssertionError(ConfigError, AssertionError):
    """A rule between settings does not hold. Code that was written for an assert catches it too."""


class ConfigKeyError(ConfigError, KeyError):
    """A key that is needed is absent."""


class ConfigTypeError(ConfigError, TypeError):
    """A value, or an object that it is to be set on, has the wrong type."""


class ConfigAttributeError(ConfigError, AttributeError):
    """A setting for a field that the object does not have."""


class ConfigNotImplementedError(ConfigError, NotImplementedError):
    """A setting that is understood and not supported."""


_KINDS: Final = (
    ConfigNotImplementedError,
    ConfigAttributeError,
    ConfigTypeError,
    ConfigKeyError,
    ConfigAssertionError,
    ConfigError,
)


@functools.cache
def _class_of(kinds: frozenset[type[ConfigError]]) -> type[ConfigError]:
    """The class that is all of these."""
    # A class that derives from another one stands for it.
    needed = tuple(kind for kind in _KINDS if kind in kinds and not any(kind in other.__mro__[1:] for other in kinds))
    return needed[0] if len(needed) == 1 else type("ConfigError", needed, {"__module__": __name__})


def _remake(kinds: tuple[type[ConfigError], ...], problems: tuple[Problem, ...]) -> ConfigError:
    return _class_of(frozenset(kinds))(*problems)


def config_error(path: str, found: Any, remedy: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """An error of one problem, ready to be raised.

    Args:
        path: the full path of the key.
        found: the value found, or MISSING.
        remedy: what would be right.
        kind: the class of the error.
    """
    return kind(Problem(path, found, remedy))


class Problems:
    """Collects what several checks find, and raises it as one error."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __iter__(self) -> Iterator[Problem]:
        return (problem for error in self._errors for problem in error.problems)

    def add(self, path: str, found: Any, remedy: str, kind: type[ConfigError] = ConfigError) -> None:
        """Note one problem; the arguments are those of `config_error`."""
        self._errors.append(config_error(path, found, remedy, kind))

    def paths(self) -> frozenset[str]:
        """The full paths of the keys that are known to be wrong."""
        return frozenset(problem.path for problem in self)

    def add_news(self, error: ConfigError, known: Collection[str]) -> None:
        """Note what an error says, except of keys that are known to be wrong and of what lies in them.

        Args:
            error: what a check raised that went on from values which had been found wrong.
            known: the full paths of those.
        """
        for problem in error.problems:
            if not any(problem.path == path or problem.path.startswith((f"{path}.", f"{path}[")) for path in known):
                self.add(problem.path, problem.found, problem.remedy, type(error))

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keep a ConfigError that the body raises, so that the next check still runs. Other exceptions pass."""
        try:
            yield
        except ConfigError as error:
            self._errors.append(error)

    def raise_any(self, cause: BaseException | None = None) -> None:
        """Raise what was collected: one error with all problems, each once, and of every class among them.

        Args:
            cause: another exception that the problems may have led to, to be shown with them.

        Raises:
            ConfigError: there is at least one problem.
        """
        if not self._errors:
            return
        if len(self._errors) == 1:
            raise self._errors[0] from cause
        kind = _class_of(frozenset(known for error in self._errors for known in type(error).__mro__ if known in _KINDS))
        raise kind(*self._unique()) from cause

    def _unique(self) -> list[Problem]:
        # (a value found may be unhashable, so problems are told apart by what they say)
        return list({str(problem): problem for problem in self}.values())
