"""The parameters of one pipeline stage, as Megatron's own model code makes them, without memory behind them.

The model is built on the meta device from Megatron's local layers, inside a pretended world, so every shape is the one
that this rank would hold: split over the tensor- and expert-parallel ranks, padded to the vocabulary's multiple, with
the embedding copy that tied weights need on the last stage. Local layers hold the same parameters as Transformer
Engine's; only names, and the order within a layer, differ.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megasetup.compat.local_layers import building_local_layers
from megasetup.compat.no_gpu import no_gpu
from megasetup.planning.world import PlanningError

# Settings that say how a model computes, not what it holds, at the value that needs neither a GPU nor Transformer
# Engine. The last ones are buffers of a few bytes an expert, made on a GPU whatever the device of the model.
_WITHOUT_HARDWARE: dict[str, Any] = {
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "init_model_with_meta_device": True,
    "transformer_impl": "local",
    "sequence_parallel": False,
    "memory_efficient_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "use_fused_weighted_squared_relu": False,
    "fused_single_qkv_rope": False,
    "use_te_activation_func": False,
    "use_transformer_engine_op_fuser": False,
    "persist_layer_norm": False,
    "tp_comm_overlap": False,
    "delay_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
    "offload_modules": [],
    "fp8": None,
    "fp8_param": False,
    "fp4": None,
    "fp4_param": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_router_padding_for_fp8": False,
    "moe_router_padding_for_quantization": False,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_enable_routing_replay": False,
    "variable_seq_lengths": False,
    "moe_router_load_balancing_type": "none",
    "moe_router_enable_expert_bias": False,
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what Megatron warns of: it belongs to the run, not to its plan, and comes once a stage."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def plain_provider(provider: Any) -> Any:
    """A copy of a provider that builds the same parameters on any machine.

    Args:
        provider: a Megatron-Bridge GPTModelProvider, finalized or not; it is left as it is.

    Raises:
        PlanningError: not a GPTModelProvider, or Megatron refuses its settings.
    """
    from megasetup.compat.bridge import import_bridge

    gpt = import_bridge("megatron.bridge.models.gpt_provider").GPTModelProvider
    if not isinstance(provider, gpt):
        raise PlanningError(
            f"the model's provider is a {type(provider).__module__}.{type(provider).__qualname__}: a plan can be made "
            "for Megatron-Bridge's GPTModelProvider and what derives from it"
        )
    plain = copy.copy(provider)
    for name, value in _WITHOUT_HARDWARE.items():
        if hasattr(plain, name):
            setattr(plain, name, value)
    if plain.position_embedding_type != "learned_absolute":
        plain.position_embedding_type = "none"  # the others have no parameters, and some models a kind of their own
    try:
        with _quiet():
            plain.finalize()
    except (ValueError, AssertionError) as error:
        raise PlanningError(f"Megatron refuses the model's settings: {error}") from error
    return plain


def left_out(provider: Any) -> list[str]:
    """What a provider builds beyond Megatron's decoder, as sentences: a plan does not count it."""
    from megasetup.compat.bridge import import_bridge

    module = import_bridge("megatron.bridge.models.gpt_provider")
    name = type(provider).__name__
    notes = []
    if type(provider).provide is not module.GPTModelProvider.provide:
        more = "what it adds to the decoder (a vision tower, more norms) is not counted"
        notes.append(f"{name} builds its model itself; {more}.")
    return notes


def build_chunks(plain: Any, vocabulary: int, *, stage: int, stages: int) -> list[Any]:
    """The model chunks of the pretended rank, on the meta device, in the run's dtype.

    Args:
        plain: what plain_provider gave.
        vocabulary: rows of the embedding, padding included.
        stage: this rank's pipeline stage.
        stages: how many there are.

    Raises:
        PlanningError: Megatron cannot build the model.
    """
    from megatron.core.transformer.module import Float16Module

    virtual = plain.virtual_pipeline_model_parallel_size if stages > 1 else None
    chunks = []
    for chunk in range(virtual or 1):
        with torch.device("meta"), _quiet(), no_gpu(), building_local_layers():
            try:
                model = _build_model(
                    plain,
                    vocabulary,
                    first=stage == 0 and chunk == 0,
                    last=stage == stages - 1 and chunk == (virtual or 1) - 1,
                    chunk=None if virtual is None else chunk,
                )
            except (RuntimeError, ValueError, AssertionError, TypeError) as error:
                raise PlanningError(f"Megatron cannot build stage {stage} of the model: {error}") from error
            chunks.append(Float16Module(plain, model) if plain.bf16 or plain.fp16 else model)
    return chunks


def _build_model(plain: Any, vocabulary: int, *, first: bool, last: bool, chunk: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    spec = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=False, normalization=plain.normalization, vp_stage=chunk
    )
    mtp_spec = None
    if plain.mtp_num_layers:
        # A stage may hold no decoder layer; the MTP layers are of the kind of the model's last one.
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

        layers = get_gpt_decoder_layer_specs(plain, use_transformer_engine=False, normalization=plain.normalization)
        mtp_spec = get_gpt_mtp_block_spec(plain, layers[-1], use_transformer_engine=False, vp_stage=chunk)
    return GPTModel(
        plain,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=plain.seq_length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=plain.share_embeddings_and_output_weights,
        position_embedding_type=plain.position_embedding_type,
        rotary_percent=plain.rotary_percent,
        rotary_base=plain.rotary_base,
        mtp_block_spec=mtp_spec,
        vp_stage=chunk,
    )


def padded_vocabulary(provider: Any) -> int:
    """Rows of the embedding in Megatron: the model's, rounded up as the provider says."""
    from megasetup.compat.bridge import import_bridge

    if provider.vocab_size is None:
        raise PlanningError("the model's vocab_size is None: set it, or give a config.json that has one")
    size = int(provider.vocab_size)
    if not provider.should_pad_vocab:
        return size
    padded = import_bridge("megatron.bridge.utils.vocab_utils").calculate_padded_vocab_size
    divisor, tensor = provider.make_vocab_size_divisible_by, provider.tensor_model_parallel_size
    return int(padded(size, divisor, tensor, logging_enabled=False))


def whole_parameters(chunks: list[Any], *, tensor: int, expert_tensor: int, expert: int, padding: int) -> int:
    """Elements of the whole model that the parameters of one pretended rank stand for, each counted once.

    Args:
        chunks: one rank's, as built.
        tensor, expert_tensor, expert: the sizes of the groups that split them.
        padding: rows of the embedding that the model's own vocabulary does not have.
    """
    total = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if getattr(parameter, "shared", False):
                continue  # the last stage's copy of the first one's embedding
            is_expert = not getattr(parameter, "allreduce", True) or ".experts." in name
            copies = 1
            if getattr(parameter, "tensor_model_parallel", False):
                copies = expert_tensor if is_expert else tensor
            total += parameter.numel() * copies * (expert if is_expert else 1)
            if name.endswith(("embedding.word_embeddings.weight", "output_layer.weight")):
                total -= padding * parameter.shape[1]
    return total
