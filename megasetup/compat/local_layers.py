"""Megatron's own layers in place of Transformer Engine's, for the time of a conversion.

Weights are the same whichever layers hold them, so a checkpoint made with Megatron's local layers on a machine without
a GPU serves Transformer Engine's on one with, if its tensors have the names that those ask for. Megatron sees to that
for dense layers and plain attention; for experts and multi-latent attention, whose norms the two fuse differently, it
is done here. Only what the layers need is changed, and all of it is put back before the config is written.

More gaps are filled. Megatron keeps experts of its local layers one by one, a form that most of Bridge's converters
have no names for (Qwen3's has). Its local attention does not take the head sizes of multi-latent attention, which it
has no weights for and, in a conversion, no use. And Bridge builds multi-token prediction of Transformer Engine's layers
alone.

Needed as long as Transformer Engine's layers need a GPU; the gaps with megatron-bridge 0.6 and megatron-core 0.19.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megasetup.compat.bridge import import_bridge
from megasetup.compat.layer_names import FUSED_NORMS

# What Megatron's local layers cannot do, or what is fused by Transformer Engine alone.
_WITHOUT_FUSIONS: Mapping[str, Any] = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "cross_entropy_fusion_impl": "native",
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "fp8": None,
    "fp8_param": False,
    "gradient_accumulation_fusion": False,
    "moe_enable_deepep": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "allgather",
    "overlap_moe_expert_parallel_comm": False,
    "persist_layer_norm": False,
    "tp_comm_overlap": False,
    "use_te_rng_tracker": False,
    "use_transformer_engine_op_fuser": False,
}

# The keyword by which Bridge's layer specs choose.
_SWITCH = "use_transformer_engine"
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12]\.(?:weight|bias))\*$")


def uses_local_layers(provider: Any) -> bool:
    """Whether a provider says that its model has Megatron's local layers, and so a checkpoint of it their names."""
    spec = getattr(provider, "transformer_layer_spec", None)
    if isinstance(spec, functools.partial):
        return spec.keywords.get(_SWITCH) is False
    return bool(spec is import_bridge("megatron.bridge.models.gpt_provider").local_layer_spec)


def local_layer_settings(provider: Any) -> dict[str, Any]:
    """The fields of a provider to change so that it builds Megatron's local layers, by name.

    A provider that brings layers of its own (as those of vision and hybrid models do) keeps them: whether they work
    without Transformer Engine is for them to say.

    Args:
        provider: a Bridge model provider. It is not changed.
    """
    gpt_provider = import_bridge("megatron.bridge.models.gpt_provider")
    settings = {name: value for name, value in _WITHOUT_FUSIONS.items() if hasattr(provider, name)}
    spec = getattr(provider, "transformer_layer_spec", None)
    if spec in (gpt_provider.default_layer_spec, gpt_provider.transformer_engine_layer_spec):
        settings["transformer_layer_spec"] = gpt_provider.local_layer_spec
    elif isinstance(spec, functools.partial) and _SWITCH in spec.keywords:
        settings["transformer_layer_spec"] = _switched(spec, False)
    return settings


def layer_spec_of_any_machine(spec: Any) -> Any:
    """A provider's layer spec as it is on a machine with Transformer Engine, for a config that is to serve there.

    Bridge gives many models a spec that was switched to local layers because of the machine alone.
    """
    if isinstance(spec, functools.partial) and _SWITCH in spec.keywords:
        return _switched(spec, True)
    return spec


def _switched(spec: functools.partial[Any], on: bool) -> functools.partial[Any]:
    return functools.partial(spec.func, *spec.args, **{**spec.keywords, _SWITCH: on})


def name_as_transformer_engine(model: list[Any]) -> list[Any]:
    """Have the local layers of a model save and load their tensors under the names of Transformer Engine's.

    Args:
        model: the chunks of the model, changed in place: a pre-wrap hook.
    """
    layers = import_bridge("megatron.core.transformer.transformer_layer").TransformerLayer
    for chunk in model:
        for layer in chunk.modules():
            if isinstance(layer, layers):
                names = _transformer_engines_names(layer)
                layer.submodules_config = dataclasses.replace(
                    layer.submodules_config, sharded_state_dict_keys_map=names
                )
    return model


def with_extra_states(model: list[Any]) -> list[Any]:
    """Have the local layers of a model save an empty extra state for every module that Transformer Engine has one for.

    Its norms and its attention keep some, empty without FP8, and a checkpoint without it is refused. Megatron's local
    linear layers save an empty one already.

    Args:
        model: the chunks of the model, changed in place: a pre-wrap hook, after `name_as_transformer_engine`.
    """
    layers = import_bridge("megatron.core.transformer.transformer_layer").TransformerLayer
    nothing = import_bridge("megatron.core.transformer.identity_op").IdentityOp
    for chunk in model:
        modules = dict(chunk.named_modules())
        # What Transformer Engine fuses into a linear layer has that layer's state.
        fused = {
            f"{name}.{norm}".strip(".")
            for name, layer in modules.items()
            if isinstance(layer, layers)
            for norm in layer.submodules_config.sharded_state_dict_keys_map
        }
        for name, module in modules.items():
            last = name.rpartition(".")[2]
            if name not in fused and (last.endswith("norm") or last == "core_attention"):
                kind = type(module)
                if kind is not nothing and kind.get_extra_state is torch.nn.Module.get_extra_state:
                    module.__class__ = type(kind.__name__, (_ExtraState, kind), {})
    return model


class _ExtraState:
    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        """There is nothing to set."""


def _transformer_engines_names(layer: Any) -> dict[str, str]:
    """Where Transformer Engine's layers keep the norms: each fused into the linear layer after it, if that is one."""
    attention = import_bridge("megatron.core.transformer.multi_latent_attention").MultiLatentAttention
    experts = import_bridge("megatron.core.transformer.moe.moe_layer").MoELayer
    if isinstance(layer.self_attention, attention):
        norms = ["self_attention.q_layernorm.", "self_attention.kv_layernorm."]
    else:
        norms = ["input_layernorm."]
    if not isinstance(layer.mlp, experts):
        norms.append("pre_mlp_layernorm.")
    return {norm: FUSED_NORMS[norm] for norm in norms}


def with_names_of_local_experts(registry: Any) -> Any:
    """A converter's names, with those of experts kept one by one beside those of experts kept together.

    Args:
        registry: a MegatronMappingRegistry. It is not changed.

    Returns:
        One with more names, or the same where none is missing.
    """
    mappings = registry.get_all_mappings()
    known = {mapping.megatron_param for mapping in mappings}
    more = []
    for mapping in mappings:
        name = _GROUPED_EXPERT.sub(r".experts.local_experts.*.\1", mapping.megatron_param)
        if name not in known:
            known.add(name)
            another = copy.copy(mapping)
            another.megatron_param = name
            more.append(another)
    return type(registry)(*mappings, *more) if more else registry


@contextmanager
def building_local_layers() -> Iterator[None]:
    """Fill what Megatron and Bridge lack for local layers while a model is built.

    Megatron's local attention passes over the head sizes of multi-latent attention, and multi-token prediction, which
    Bridge builds of Transformer Engine's layers whatever the others are, is local too.
    """
    attention = import_bridge("megatron.core.transformer.dot_product_attention").DotProductAttention
    specs = import_bridge("megatron.core.models.gpt.gpt_layer_specs")
    make = attention.__init__

    def make_without(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        make(self, *args, **kwargs)

    def local(function: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(function).bind(*args, **kwargs)
            given.arguments[_SWITCH] = False
            return function(*given.args, **given.kwargs)

        return build

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention, "__init__", make_without))
        for name in ("get_gpt_mtp_block_spec", "get_gpt_decoder_layer_specs"):
            if hasattr(specs, name):
                stack.enter_context(mock.patch.object(specs, name, local(getattr(specs, name))))
        yield


def fields_of_the_machine(provider: Any) -> list[str]:
    """The fields whose defaults Bridge takes from what the machine has installed, such as fused kernels.

    A config that is to serve other machines too must leave them out.

    Args:
        provider: a Bridge model provider, which is a dataclass.
    """
    return [
        field.name
        for field in dataclasses.fields(provider)
        if getattr(field.default_factory, "__module__", "") == "megatron.bridge.utils.fusions"
    ]
