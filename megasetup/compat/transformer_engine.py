"""Lets Megatron-Bridge import on a machine without Transformer Engine, as a laptop or a build machine is.

Bridge's LoRA layers import it at the top of their module, and `import megatron.bridge` imports them: without it not
even a Hugging Face checkpoint can be converted on a CPU. That one module, and no other, is run with a stand-in for it.
The stand-in is gone from `sys.modules` as soon as the module has run: whoever asks whether Transformer Engine is there,
as Bridge, Megatron and transformers all do, gets the honest answer.

Needed with megatron-bridge 0.6.0 to 0.6.2, and any later one that still imports it there; may go when no supported
version does. An installed Transformer Engine, a broken one too, is never hidden.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

logger = logging.getLogger("megasetup")

_NAME = "transformer_engine"
# What imports Transformer Engine, without a way out, while megatron-bridge 0.6 is imported.
_NEED_IT = frozenset({"megatron.bridge.peft.lora_layers"})


class TransformerEngineMissingError(ImportError):
    """Something of Transformer Engine was used on a machine that does not have it."""


def _missing(used: str) -> NoReturn:
    raise TransformerEngineMissingError(
        f"{used} was used, but Transformer Engine is not installed. Install it with "
        "`pip install --no-build-isolation 'transformer-engine[pytorch]'` (it needs an NVIDIA GPU and nvcc), "
        "or choose what works without it: megatron_cfg.transformer_impl: local.",
        name=_NAME,
    )


class _PlaceholderClass(type):
    """Makes classes that can be named, subclassed and asked about with isinstance, but not called."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        _missing(f"{cls.__module__}.{cls.__qualname__}")


class _PlaceholderModule(ModuleType):
    """A module that has every name: a class for a capitalised one, a submodule or function for any other."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        made: Any
        if name[0].isupper():
            made = _PlaceholderClass(name, (), {"__module__": self.__name__})
        else:
            made = _PlaceholderModule(f"{self.__name__}.{name}", "A stand-in: Transformer Engine is not installed.")
        setattr(self, name, made)
        return made

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        _missing(self.__name__)


def _package(name: str) -> _PlaceholderModule:
    module = _PlaceholderModule(name, "A stand-in: Transformer Engine is not installed.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    return module


_root = _package(_NAME)
_pytorch = _package(f"{_NAME}.pytorch")
setattr(_root, "pytorch", _pytorch)  # noqa: B010 - ModuleType declares no such attribute


@contextmanager
def _visible() -> Iterator[None]:
    placed = {_NAME: _root, f"{_NAME}.pytorch": _pytorch}
    sys.modules.update(placed)
    try:
        yield
    finally:
        for name in placed:
            sys.modules.pop(name, None)


class _Loader(Loader):
    """Runs a module as its own loader does, with the stand-in visible meanwhile."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Once run, the module is its own loader's again: source, resources and reload behave as ever.
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        with _visible():
            self._real.exec_module(module)
        logger.debug(
            "%s was imported without Transformer Engine: what it needs of it raises when used", module.__name__
        )


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _NEED_IT:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_finder = _Finder()
_lock = threading.Lock()


def is_installed() -> bool:
    """Whether Transformer Engine can be found; it is not imported."""
    try:
        return importlib.util.find_spec(_NAME) is not None
    except ValueError:  # some other stand-in, without a spec, holds the name: it is not ours to judge
        return True


def ensure_importable() -> bool:
    """Make `import megatron.bridge` possible where Transformer Engine is missing.

    Does nothing where it is installed, and nothing more when called again. Imports megatron.core first, so that
    Megatron finds out for itself that it has no Transformer Engine.

    Returns:
        Whether Bridge does without Transformer Engine on this machine.

    Raises:
        ImportError: megatron-core is not installed.
    """
    if is_installed():
        return False
    # These two, because Bridge's module imports them too: they must not see the stand-in.
    importlib.import_module("megatron.core.extensions.transformer_engine")
    importlib.import_module("megatron.core.transformer.moe.moe_utils")
    with _lock:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
            logger.debug("Transformer Engine is not installed; a stand-in lets megatron-bridge 0.6 import without it")
    return True
