"""Fields of a provider that are changed for the time of a conversion, and put back for what is written down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ALONE: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "sequence_parallel": False,
}
"""What shares a model out among ranks, with the values of a process alone."""

UNSTAGED: Mapping[str, Any] = {
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "hierarchical_context_parallel_sizes": None,
    "delay_wgrad_compute": False,
    "perform_initialization": False,
}
"""What else a saved provider may say of the run that trained it, with the values of a process alone."""

# What Bridge or Megatron derives from these while a model is built.
_DERIVED = ("pipeline_dtype", "use_cpu_initialization", "variable_seq_lengths")


@contextlib.contextmanager
def changed(provider: Any, settings: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Change fields of a provider, those that it has.

    Args:
        provider: the model provider.
        settings: new values by field.

    Yields:
        A function that puts the fields back, and those that are derived from them.
    """
    names = [name for name in (*settings, *_DERIVED) if hasattr(provider, name)]
    before = {name: getattr(provider, name) for name in names}

    def put_back() -> None:
        for name, value in before.items():
            setattr(provider, name, value)

    for name, value in settings.items():
        if name in before:
            setattr(provider, name, value)
    yield put_back
