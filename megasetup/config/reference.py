"""Writes docs/config.md, the page of every config key, from the schema: `python -m megasetup.config.reference FILE`.

A page written by hand is out of date after the first change. This one is compared with the schema by a test.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import get_original_bases
from typing import Any, is_typeddict

from megasetup.config.schema import TrainerConfig
from megasetup.config.schema.describe import Described, in_words, keys_of

_HEAD = """\
# Every key of a config

<!-- Made by `make docs` from megasetup/config/schema: change it there. -->

A trainer's YAML file holds the model to train in `policy` and, for PPO, the value model in `value`. Its other \
sections are not read. A key that is absent leaves the default; a key that is present is honoured, also when it is \
false, 0 or null. A key that is not listed is a warning, or an error where the check is strict, except in sections \
that say that they pass keys on.

A file may build on others (`defaults: base.yaml`, or a list, relative to itself). Values may refer to others \
(`${policy.precision}`) and to the environment (`${oc.env:HOME}`), and the command line may override them \
(`policy.megatron_cfg.optimizer.lr=1e-6`).

"Where it goes" names the object and field that receive a value: `provider` is Megatron-Bridge's model provider; \
`optimizer`, `ddp`, `train`, `dist` and `checkpoint` are parts of its ConfigContainer.
"""

_COLUMNS = ("key", "type", "default", "what it does", "where it goes")


def render() -> str:
    """The page, in Markdown."""
    written: dict[Any, str] = {}
    return "\n".join([_HEAD, *_section(TrainerConfig, "", written)])


def _section(section: Any, path: str, written: dict[Any, str]) -> Iterator[str]:
    """A heading and tables for one section, then the sections inside it. One that has been written is referred to."""
    written[section] = path
    if path:
        yield f"## {path}\n"
        yield f"{inspect.getdoc(section)}\n"
    inside: list[tuple[str, Any]] = []
    for title, origin, keys in _groups(section):
        if origin in written and origin is not section:
            yield f"{title} See [{written[origin]}](#{_anchor(written[origin])}).\n"
            continue
        written.setdefault(origin, path)
        if title:
            yield f"### {title.rstrip('.')}\n"
        yield from _table(keys, path)
        inside.extend((_join(path, key.name), key.section) for key in keys if key.section is not None)
    for inner_path, inner in inside:
        if inner not in written:
            yield from _section(inner, inner_path, written)


def _groups(section: Any) -> Iterator[tuple[str, Any, list[Described]]]:
    """The keys of a section in the groups that it is put together from, its own last."""
    left = dict(keys_of(section))
    for base in get_original_bases(section):
        if is_typeddict(base):
            yield str(inspect.getdoc(base)), base, [left.pop(name) for name in keys_of(base)]
    if left:
        title = "The rest." if len(left) < len(keys_of(section)) else ""
        yield title, section, list(left.values())


def _table(keys: list[Described], path: str) -> Iterator[str]:
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{' --- |' * len(_COLUMNS)}"
    for key in keys:
        kind = in_words(key.type).removeprefix("a ")
        if key.section is not None:
            inner = _join(path, key.name)
            kind = kind.replace("mapping", f"[mapping](#{_anchor(inner)})")
        default = "needed" if key.required else key.key.default
        cells = (f"`{key.name}`", kind, default, key.key.does, key.key.goes)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _anchor(path: str) -> str:
    """The link to a heading, as Markdown viewers name it."""
    return path.replace(".", "")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
