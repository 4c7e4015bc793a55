"""A second model in the layout that generation wants, on the same GPUs, for colocated generation by Megatron.

Training and generation want different parallel sizes. The second model has process groups of its own and gets its
weights by a reshard before each generation, so it is built without any.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from megasetup.compat import memory_saver
from megasetup.config.colocated import SIZES
from megasetup.config.errors import ConfigAssertionError, Problems
from megasetup.config.fields import MEGATRON, POLICY, section
from megasetup.config.performance import choose_layer_spec
from megasetup.model import bridge
from megasetup.model.chunks import build_chunks

_MEMORY = "inference_model"  # (torch_memory_saver's name of it)


def build_inference_model(policy_cfg: Mapping[str, Any], megatron_cfg: Any, initial_model_provider: Any) -> Any:
    """Build the inference model.

    Collective: every rank calls it, after setup_model_and_optimizer. The model is on the GPU; its weights mean nothing
    until the first reshard (megatron.core.resharding.refit.swap_model_weights).

    Args:
        policy_cfg: the policy config. generation.mcore_generation_config gives the parallel sizes; those that it lacks
            are the training model's.
        megatron_cfg: the ConfigContainer that the training model was set up with; not changed.
        initial_model_provider: the provider as it was before the training model was built
            (state.colocated_reshard_plan.initial_model_provider); not changed.

    Returns:
        The model: one module, in evaluation mode, not wrapped for data parallelism.

    Raises:
        ConfigError: FSDP2, virtual pipeline stages, LoRA or a draft, with which this does not work; names every key.
        RuntimeError: the sizes do not divide the number of ranks; the memory of an earlier one is paused.
    """
    _check(policy_cfg, megatron_cfg)
    provider = _inference_provider(policy_cfg, initial_model_provider)
    cfg = copy.copy(megatron_cfg)
    cfg.model = provider
    groups = bridge.new_process_groups(provider)
    with memory_saver.pausable_memory(_MEMORY, "the inference model"):
        (chunk,) = build_chunks(policy_cfg, cfg, groups, [], wrap_with_ddp=False)
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    return chunk.eval()


def _check(policy_cfg: Mapping[str, Any], cfg: Any) -> None:
    problems = Problems()
    without = "must be absent: an inference model on the training GPUs does not work with it"
    if cfg.dist.use_torch_fsdp2:
        problems.add("dist.use_torch_fsdp2", True, without, ConfigAssertionError)
    stages = getattr(cfg.model, "virtual_pipeline_model_parallel_size", None)
    if stages is not None:
        problems.add("provider.virtual_pipeline_model_parallel_size", stages, without, ConfigAssertionError)
    if section(policy_cfg, "megatron_cfg", "peft").get("enabled"):
        problems.add(f"{MEGATRON}.peft.enabled", True, without, ConfigAssertionError)
    if section(policy_cfg, "draft").get("enabled"):
        problems.add(f"{POLICY}.draft.enabled", True, without, ConfigAssertionError)
    problems.raise_any()


def _inference_provider(policy_cfg: Mapping[str, Any], initial: Any) -> Any:
    settings = section(policy_cfg, "generation", "mcore_generation_config")
    provider = copy.deepcopy(initial)
    for name in SIZES:
        if settings.get(name) is not None:
            setattr(provider, name, settings[name])
    if provider.pipeline_model_parallel_size != initial.pipeline_model_parallel_size:
        # What the training model's stages hold says nothing about another number of stages.
        provider.num_layers_in_first_pipeline_stage = provider.num_layers_in_last_pipeline_stage = None
        provider.pipeline_model_parallel_layout = None
        provider.account_for_embedding_in_pipeline_split = provider.account_for_loss_in_pipeline_split = False
    provider.context_parallel_size = 1
    provider.sequence_parallel = provider.tensor_model_parallel_size > 1 and initial.sequence_parallel
    provider.recompute_granularity = provider.recompute_method = provider.recompute_num_layers = None
    if settings.get("transformer_impl") is not None:
        provider.transformer_impl = settings["transformer_impl"]
        choose_layer_spec(provider, settings["transformer_impl"])
    if "cuda_graph_impl" in settings:
        provider.cuda_graph_impl = settings["cuda_graph_impl"]
    provider.finalize()
    return provider


def pause_inference_model() -> bool:
    """Give the GPU memory of the inference model's weights back while the policy trains.

    Their addresses stay reserved, so nothing that knows them (CUDA graphs) has to be made again. What they held is
    lost: resume_inference_model and the reshard before the next generation bring it back. Nothing is done where it is
    paused already.

    Returns:
        Whether the memory is given back: False without torch_memory_saver, and before an inference model was built.
    """
    return memory_saver.pause(_MEMORY)


def resume_inference_model() -> bool:
    """Put memory under the inference model's weights again, at the same addresses; call it before the reshard.

    Nothing is done where it was not paused.

    Returns:
        Whether the memory can be given back: False without torch_memory_saver, and before an inference model was built.
    """
    return memory_saver.resume(_MEMORY)
