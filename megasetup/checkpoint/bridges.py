"""The way into Megatron-Bridge's converters: a model opened by name, with our progress and our rule about its code.

Code that comes with a model runs only when the caller says so; the answer is passed on explicitly, because a library
that finds none may ask on the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from megasetup.checkpoint.progress import tracked
from megasetup.compat.bridge import import_bridge
from megasetup.compat.hf_config import patch_hf_configs
from megasetup.compat.local_layers import with_names_of_local_experts


def open_model(
    name: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    shown: bool = True,
) -> Any:
    """A Bridge for a Hugging Face model. Its config is read; its weights are read when they are asked for.

    Args:
        name: a Hugging Face id, or a folder as save_pretrained makes it.
        overrides: fields of its config to change.
        trust_remote_code: whether code that comes with the model may run.
        shown: whether this rank shows progress.

    Returns:
        A megatron.bridge.AutoBridge.

    Raises:
        ValueError: Megatron-Bridge does not know the architecture, or the model needs code that may not run.
        OSError: there is no such model.
    """
    patch_hf_configs()
    auto_bridge = import_bridge().AutoBridge
    # A class of its own for each call: `shown` differs between ranks, and Bridge's class stays as it is.
    opened: Any = type(
        "AutoBridge", (auto_bridge,), {"_model_bridge": property(partial(_with_ours, auto_bridge, shown))}
    )
    try:
        return opened.from_hf_pretrained(name, trust_remote_code=trust_remote_code, **(overrides or {}))
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in f"{error} {error.__cause__}":
            error.add_note(
                f"megasetup: {name} comes with code of its own. Read it, and if you trust it set "
                "policy.megatron_cfg.trust_remote_code: true (--trust-remote-code on the command line)"
            )
        raise


def _with_ours(auto_bridge: Any, shown: bool, opened: Any) -> Any:
    converter = auto_bridge._model_bridge.fget(opened)
    if hasattr(converter, "_with_progress_tracking"):
        converter._with_progress_tracking = _tracker(shown)
    names = converter.mapping_registry
    converter.mapping_registry = lambda: with_names_of_local_experts(names())
    return converter


def _tracker(shown: bool) -> Callable[..., Iterator[Any]]:
    def track(tasks: Collection[Any], description: str, show_progress: bool = True) -> Iterator[Any]:
        return tracked(tasks, description, shown=shown and show_progress)

    return track
