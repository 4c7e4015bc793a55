"""Lets Hugging Face configs take nested configs that are built already.

Bridge saves a provider's Hugging Face config in run_config.yaml and builds it again from the inside out: each nested
config first, then the one that holds it. Qwen3OmniMoeTalkerConfig takes only mappings in their place and fails with a
TypeError ("argument after ** must be a mapping"), so a Qwen3-Omni checkpoint can be saved and never loaded. Of the 206
configs with nested ones in transformers 5.12 it is the only one.

Needed with transformers 5.8 to 5.16 (4.57 does without). Whether the installed version needs it is tried, not looked
up, so this may go when no supported version does.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

logger = logging.getLogger("megasetup")

_FAULTY = (("transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe", "Qwen3OmniMoeTalkerConfig"),)


def _takes_built_configs(config_class: Any) -> bool:
    nested = {name: kind() for name, kind in config_class.sub_configs.items()}
    try:
        config_class(**nested)
    except TypeError:
        return False
    return True


def _guard(config_class: Any) -> None:
    """Give the class a __post_init__ that builds what is not built: a mapping from its keys, None from the defaults."""
    after = config_class.__mro__[1].__post_init__

    def __post_init__(self: Any, **kwargs: Any) -> None:
        for name, kind in config_class.sub_configs.items():
            value = getattr(self, name)
            if value is None or isinstance(value, dict):
                setattr(self, name, kind(**(value or {})))
        after(self, **kwargs)

    config_class.__post_init__ = __post_init__


def patch_hf_configs() -> list[str]:
    """Mend the config classes of the installed transformers that need it, each once.

    Returns:
        The names of the classes mended by this call: none on a version without the fault, none when called again, none
        where transformers is not installed.
    """
    mended = []
    for module, name in _FAULTY:
        try:
            config_class = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if config_class is not None and not _takes_built_configs(config_class):
            _guard(config_class)
            mended.append(name)
            logger.debug("%s of the installed transformers now takes nested configs that are built already", name)
    return mended
