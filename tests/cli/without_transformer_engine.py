"""Runs `megasetup` with Transformer Engine hidden, as on a machine with a GPU that was never given it."""

from __future__ import annotations

from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_find = PathFinder.find_spec


def _without(name: str, *more: Any) -> ModuleSpec | None:
    return None if name.partition(".")[0] == "transformer_engine" else _find(name, *more)


if __name__ == "__main__":
    PathFinder.find_spec = staticmethod(_without)  # type: ignore[method-assign,assignment]
    from megasetup.cli import main

    main()
