"""Trainers' YAML files: `defaults:` that name files to build on, overrides from the command line, interpolations.

OmegaConf merges and interpolates. What it does not do is tell where a value came from once files have been merged, and
that is the first thing that a person asks who sees a wrong one. So each file's own lines are kept beside the values,
and a message, of this file or of validation, can name file and line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megasetup.config.errors import (
    MISSING,
    ConfigError,
    ConfigKeyError,
    ConfigTypeError,
    Problem,
    Problems,
    Words,
    config_error,
)

_DEFAULTS = "defaults"
_REPLACE = "_override_"
_COMMAND_LINE = "command line"
_PART = r"[^=+~.\[\]\s][^=.\[\]\s]*"
_OVERRIDE = re.compile(rf"(?P<sign>\+\+|\+|~)?(?P<key>{_PART}(?:\.{_PART}|\[[0-9]+\])*)(?:=(?P<value>.*))?", re.DOTALL)
_KINDS = {yaml.SequenceNode: Words("a list"), yaml.ScalarNode: Words("a single value")}

# What trainers' files compute with, besides OmegaConf's own (oc.env, oc.select ...).
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": lambda *values: functools.reduce(operator.mul, values),
    "max": max,
    "min": min,
}


class Loaded(NamedTuple):
    """A config and where its values come from.

    Attributes:
        config: plain dicts and lists, interpolations resolved.
        origins: "file:line" or "command line" by the full path of a key ("policy.megatron_cfg.optimizer.lr"); the file
            by "", which is the path of all of it.
    """

    config: dict[str, Any]
    origins: dict[str, str]

    def located(self, problem: Problem) -> Problem:
        """The same problem, with the place that its value comes from at the end of the remedy.

        For a key that is missing, the place of the section that it is missing from, or the file.
        """
        return _located(problem, self.origins)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a YAML file, the files that it builds on, and overrides.

    A file's `defaults:` names one file or a list of files, relative to itself; later ones and the file itself override
    earlier ones, mappings key by key, lists whole. A mapping that holds `_override_: true` replaces the one that it
    would be merged with. Interpolations (`${policy.precision}`, `${oc.env:HOME}`, `${mul:2,3}`) are resolved at the
    end, so they see overrides.

    Args:
        path: the file.
        overrides: `key.path=value`, with the value in YAML, sets a key and merges a mapping; `+key.path=value` the same
            for a key that must not be there yet; `++key.path=value` is like the first; `~key.path` removes one.

    Raises:
        FileNotFoundError: the file, or one that it builds on, is not there.
        ConfigError: a file is not YAML or no mapping, files build on each other in a circle, overrides cannot be
            applied, or interpolations not resolved. Names file, line and key; problems of one kind come together.
    """
    merged, origins = _read(Path(path), ())
    origins[""] = str(Path(path).resolve())
    problems = Problems()
    for override in overrides:
        with problems.collect():
            _apply_override(merged, override, origins)
    problems.raise_any()
    with _resolvers():
        _check_values(merged, "", origins, problems)
        problems.raise_any()
        config = OmegaConf.to_container(merged, resolve=True)
    return Loaded(config, origins)  # type: ignore[arg-type]  # (a DictConfig gives a dict)


def _read(path: Path, chain: tuple[Path, ...], named_by: str = "") -> tuple[DictConfig, dict[str, str]]:
    """A file merged with those that it builds on, unresolved, and the lines of its keys."""
    path = path.resolve()
    if path in chain:
        circle = " -> ".join(str(file) for file in (*chain[chain.index(path) :], path))
        raise config_error(named_by, str(path), f"files must not build on each other in a circle: {circle}")
    named = named_by and f" (named by {named_by})"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file{named}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} is a folder: give the file{named}") from None
    except UnicodeDecodeError as error:
        raise config_error(str(path), Words("no text file"), f"must be YAML in UTF-8{named}") from error
    own, lines = _parse(text, path)
    parents = []
    origins: dict[str, str] = {}
    for place, parent in _parents(own, path, lines):
        content, parent_origins = _read(path.parent / parent, (*chain, path), place)
        parents.append(content)
        origins |= parent_origins
    own.pop(_DEFAULTS, None)
    base = _merge(parents, path)
    for section in list(_marked(own, "")):
        _remove(base, section)
    return _merge([base, own], path), origins | lines


def _parse(text: str, path: Path) -> tuple[DictConfig, dict[str, str]]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return OmegaConf.create({}), {}
        if not isinstance(node, yaml.MappingNode):
            place = f"{path}:{node.start_mark.line + 1}"
            raise config_error(place, _KINDS[type(node)], "must be a mapping", ConfigTypeError)
        lines = {key: f"{path}:{line}" for key, line in _lines(node, "")}
        return OmegaConf.create(text), lines  # type: ignore[return-value]  # (a mapping gives a DictConfig)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = 0 if mark is None else mark.line
        found = (text.splitlines() or [""])[min(line, text.count("\n"))].strip()
        raise config_error(f"{path}:{line + 1}", found, f"cannot be read as YAML: {error.problem}") from error
    except OmegaConfBaseException as error:
        key = error.full_key or "its content"
        place = lines.get(str(error.full_key), str(path))
        raise config_error(f"{place} ({key})", Words("unreadable"), _reason(error)) from error
    except yaml.YAMLError as error:
        raise config_error(str(path), Words("no YAML"), _reason(error)) from error
    except RecursionError as error:
        raise config_error(str(path), Words("endless"), "an anchor must not lie within itself") from error


def _lines(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """The line of every key and list item under a YAML node, by its full path."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":  # <<: *anchor
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _lines(merged, path)
            else:
                full = f"{path}.{key.value}" if path else str(key.value)
                yield full, key.start_mark.line + 1
                yield from _lines(value, full)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{path}[{index}]", item.start_mark.line + 1
            yield from _lines(item, f"{path}[{index}]")


def _parents(own: DictConfig, path: Path, lines: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The files that a file builds on, each with the place that names it."""
    place = f"{lines.get(_DEFAULTS, path)} ({_DEFAULTS})"
    try:
        named = own.get(_DEFAULTS)
    except OmegaConfBaseException as error:
        raise config_error(place, Words("an interpolation"), f"cannot be resolved: {_reason(error)}") from error
    files = [] if named is None else list(named) if isinstance(named, ListConfig) else [named]
    for file in files:
        if not isinstance(file, str):
            raise config_error(place, named, "must be the path of a file or a list of paths", ConfigTypeError)
        yield place, file


def _merge(parts: Sequence[DictConfig], path: Path) -> DictConfig:
    try:
        return OmegaConf.merge(OmegaConf.create({}), *parts)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = error.full_key or "its content"
        raise config_error(f"{path} ({key})", Words("in conflict"), f"cannot be merged: {_reason(error)}") from error


def _marked(node: Any, path: str) -> Iterator[str]:
    """The sections that replace what they would be merged with. Takes the marks away."""
    if isinstance(node, DictConfig):
        if node.pop(_REPLACE, False) and path:
            yield path
        for key in list(node):
            if not OmegaConf.is_interpolation(node, key) and not OmegaConf.is_missing(node, key):
                yield from _marked(node[key], f"{path}.{key}" if path else str(key))


def _remove(config: DictConfig, key: str) -> bool:
    """Remove a key; False where there is none."""
    *inner, last = key.split(".")
    parent = OmegaConf.select(config, ".".join(inner)) if inner else config
    if not isinstance(parent, DictConfig) or last not in parent:
        return False
    del parent[last]
    return True


def _apply_override(config: DictConfig, override: str, origins: dict[str, str]) -> None:
    place = f"override {override!r}"
    match = _OVERRIDE.fullmatch(override)
    if match is None or (match["sign"] == "~") != (match["value"] is None):
        raise config_error(place, Words("malformed"), "must be key.path=value, +key.path=value or ~key.path")
    key = match["key"]
    if match["sign"] == "~":
        if not _remove(config, key):
            raise config_error(place, Words("without effect"), f"there is no {key} to remove", ConfigKeyError)
        return
    try:
        if match["sign"] == "+" and OmegaConf.select(config, key, default=MISSING) is not MISSING:
            raise config_error(place, Words("an addition"), f"{key} is there already: leave the + out to change it")
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={match['value']}"]), resolve=False)
        _check_indices(config, key)
        OmegaConf.update(config, key, parsed["value"], merge=True)
    except ConfigError:
        raise
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError, LookupError) as error:
        raise config_error(place, Words("not applicable"), _reason(error)) from error
    origins.update(dict.fromkeys(_paths(parsed["value"], key), _COMMAND_LINE))


def _check_indices(config: DictConfig, key: str) -> None:
    """Raise TypeError where a key counts the items of what is no list: OmegaConf would make a mapping of it."""
    for match in re.finditer(r"\[[0-9]+\]", key):
        counted = key[: match.start()]
        if not isinstance(OmegaConf.select(config, counted), ListConfig):
            raise TypeError(f"{counted} is no list")


def _paths(value: Any, path: str) -> Iterator[str]:
    """The full paths of a value and of everything in it."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, f"{path}[{index}]")


def _check_values(node: DictConfig | ListConfig, path: str, origins: dict[str, str], problems: Problems) -> None:
    """Note every interpolation that does not resolve and every value that is still to be filled in (???)."""
    is_list = isinstance(node, ListConfig)
    for key in range(len(node)) if is_list else list(node):
        full = f"{path}[{key}]" if is_list else f"{path}.{key}" if path else str(key)
        if OmegaConf.is_missing(node, key):
            _add(Problem(full, "???", "must be given, in a file or as an override"), origins, problems)
        elif OmegaConf.is_interpolation(node, key):
            try:
                node[key]
            except OmegaConfBaseException as error:
                raw: Any = OmegaConf.to_container(node, resolve=False)
                _add(Problem(full, raw[key], f"cannot be resolved: {_reason(error)}"), origins, problems)
        elif isinstance(node[key], DictConfig | ListConfig):
            _check_values(node[key], full, origins, problems)


def _add(problem: Problem, origins: dict[str, str], problems: Problems) -> None:
    located = _located(problem, origins)
    problems.add(located.path, located.found, located.remedy)


def _located(problem: Problem, origins: dict[str, str]) -> Problem:
    path = problem.path
    origin = origins.get(path)
    while origin is None and problem.found is MISSING and path:
        path = path.rpartition(".")[0]
        origin = origins.get(path)
    return problem if origin is None else dataclasses.replace(problem, remedy=f"{problem.remedy} ({origin})")


def _reason(error: BaseException) -> str:
    """The one line of an error that says why, without what OmegaConf and YAML say about where."""
    text = (error.problem or str(error)) if isinstance(error, yaml.MarkedYAMLError) else str(error)
    line = next(iter(text.splitlines()), type(error).__name__)
    cause = line.partition(" raised while resolving interpolation: ")[2]
    return re.sub(r"^(['\"])(.*)\1$", r"\2", cause) or line


@contextlib.contextmanager
def _resolvers() -> Iterator[None]:
    """Lend OmegaConf the resolvers of trainers' files, and leave it as it was: a trainer may bring its own."""
    lent = [name for name in _RESOLVERS if not OmegaConf.has_resolver(name)]
    for name in lent:
        OmegaConf.register_new_resolver(name, _RESOLVERS[name])
    try:
        yield
    finally:
        for name in lent:
            OmegaConf.clear_resolver(name)
