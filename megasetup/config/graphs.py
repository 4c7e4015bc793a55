"""Which CUDA graphs a config asks for: for training, and for Megatron's own generation on the same GPUs.

Two concerns need to know: graphs of either kind need Transformer Engine's RNG tracker, and graphs of generation need
experts whose input has a fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasetup.config.fields import section

GENERATION_KEY = "policy.generation.mcore_generation_config.cuda_graph_impl"


def generation_graph_impl(config: Mapping[str, Any]) -> str:
    """What captures the CUDA graphs of generation: "none", "local" or another of Megatron's names.

    "none" where generation is not Megatron's own, or has GPUs of its own: it is set up elsewhere then.

    Args:
        config: the policy config.
    """
    generation = section(config, "generation")
    if generation.get("backend") != "megatron" or not section(config, "generation", "colocated").get("enabled"):
        return "none"
    return section(config, "generation", "mcore_generation_config").get("cuda_graph_impl") or "none"


def uses_training_graphs(model_cfg: Any) -> bool:
    """Whether a provider has CUDA graphs for training switched on, under any of the names that Megatron gave them."""
    return (getattr(model_cfg, "cuda_graph_impl", None) or "none") != "none" or any(
        getattr(model_cfg, name, False) is True for name in ("enable_cuda_graph", "external_cuda_graph")
    )
