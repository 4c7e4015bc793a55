"""What the commands that take a CONFIG.yaml share: reading it, finding its policy, and keeping libraries quiet.

Megatron, Bridge and transformers talk while they are imported and configured, on a laptop mostly of what it lacks. A
command's output is what it was asked for; `megasetup doctor` says what is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasetup.cli.errors import CommandError

if TYPE_CHECKING:
    from megasetup.config.load import Loaded

_TALKERS = ("megatron", "transformers", "torch.utils.cpp_extension", "nemo", "nv_one_logger")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hold back warnings of other packages while the block runs."""
    with contextlib.suppress(ImportError):
        # It sets its own level when it is first imported.
        importlib.import_module("transformers.utils.logging").get_logger()
    levels = {name: logging.getLogger(name).level for name in _TALKERS}
    for name in _TALKERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """Collect what the package itself warns of while the block runs, instead of printing it."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megasetup")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


def load(path: Path, overrides: Sequence[str]) -> Loaded:
    """Read a config with its `defaults:` and overrides; a file that is a policy itself is taken for one.

    Raises:
        ConfigError, FileNotFoundError: see load_config.
    """
    from megasetup.config.load import Loaded, load_config

    loaded = load_config(path, overrides)
    if "policy" in loaded.config or "megatron_cfg" not in loaded.config:
        return loaded
    origins = {f"policy.{key}" if key else "policy": place for key, place in loaded.origins.items()}
    return Loaded({"policy": loaded.config}, origins)


def policy_of(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The policy of a config that was read and examined.

    Raises:
        CommandError: it has none.
    """
    policy = config.get("policy")
    if not isinstance(policy, Mapping):
        raise CommandError(f"{path} has no policy: a trainer's file holds one under `policy:`")
    return policy
