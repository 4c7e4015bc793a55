"""The shape of an Eagle-3 draft: read from the draft's own config.json, or taken over from the policy.

An Eagle-3 draft is a Llama-like decoder of few layers. Its first attention reads twice the hidden size: the embedding
of the next token beside a projection of hidden states that the policy computed. ModelOpt's module builds just that, so
a config that asks for anything else is refused rather than built as something it is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megasetup.config.draft import DRAFT, aux_layers
from megasetup.config.errors import MISSING, Problems, config_error
from megasetup.config.fields import section

_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_OTHERS = ("num_key_value_heads", "head_dim", "num_hidden_layers", "draft_vocab_size")
# What Megatron's Llama 3 rope scaling is fixed to.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class DraftArchitecture:
    """The sizes of a draft.

    Attributes:
        hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups, kv_channels, num_layers: as Megatron's.
        vocab_size: the policy's tokens, without padding.
        draft_vocab_size: the tokens that the draft can propose, without padding.
        layernorm_epsilon, init_method_std: as Megatron's.
        rotary_base: theta of the rotary embedding.
        rope_factor: of Llama 3's scaling of it; None without.
        aux_layers: the policy's layers whose hidden states it reads, counted from 0, ascending.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    layernorm_epsilon: float
    init_method_std: float
    rotary_base: float
    rope_factor: float | None
    aux_layers: tuple[int, ...]


def architecture_of(policy_cfg: Mapping[str, Any], policy: Any, folder: Path | None) -> DraftArchitecture:
    """The shape of a policy's draft.

    Args:
        policy_cfg: the policy config; policy.draft.num_layers and aux_layer_indices go before what the draft says.
        policy: the policy's provider, or another config with Megatron's names and a vocab_size.
        folder: the draft's, with its config.json; None for the policy's own sizes.

    Raises:
        ConfigError: there is no config, or it describes what is no draft of this policy; all problems together.
    """
    if folder is None:
        found = _of_policy(policy, tuple(aux_layers(policy_cfg, policy.num_layers)))
    else:
        found = _of_folder(policy_cfg, policy, folder)
    layers = section(policy_cfg, "draft").get("num_layers")
    found = found if layers is None else replace(found, num_layers=layers)
    _check(found, policy, folder)
    return found


def _of_policy(policy: Any, layers: tuple[int, ...]) -> DraftArchitecture:
    heads = policy.num_attention_heads
    return DraftArchitecture(
        hidden_size=policy.hidden_size,
        ffn_hidden_size=policy.ffn_hidden_size or 4 * policy.hidden_size,
        num_attention_heads=heads,
        num_query_groups=policy.num_query_groups or heads,
        kv_channels=policy.kv_channels or policy.hidden_size // heads,
        num_layers=1,
        vocab_size=policy.vocab_size,
        draft_vocab_size=policy.vocab_size,
        layernorm_epsilon=policy.layernorm_epsilon,
        init_method_std=policy.init_method_std,
        rotary_base=float(getattr(policy, "rotary_base", 10_000)),
        rope_factor=policy.rope_scaling_factor if getattr(policy, "rope_scaling", False) else None,
        aux_layers=layers,
    )


def _of_folder(policy_cfg: Mapping[str, Any], policy: Any, folder: Path) -> DraftArchitecture:
    path, file = f"{DRAFT}.model_name", folder / "config.json"
    problems = Problems()
    if not file.is_file():
        problems.add(path, str(folder), "must be a model with a config.json")
        problems.raise_any()
    config = _read(file, path)
    for name in (*_NEEDED, *(name for name in _OTHERS if config.get(name) is not None)):
        size = config.get(name, MISSING)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            problems.add(f"{path}: {file}: {name}", size, "must be a whole number above 0")
    problems.raise_any()
    eagle = config.get("eagle_config") or {}
    for name, value, right in (
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", config.get("attention_bias", False), False),
        ("mlp_bias", config.get("mlp_bias", False), False),
        ("norm_before_residual", config.get("norm_before_residual", False), False),
        ("eagle_config.use_aux_hidden_state", eagle.get("use_aux_hidden_state", True), True),
        ("eagle_config.use_last_layernorm", eagle.get("use_last_layernorm", True), True),
    ):
        if value != right:
            problems.add(f"{path}: {file}: {name}", value, f"must be {right!r}: no other Eagle-3 draft can be built")
    theta, factor = _rope(config, f"{path}: {file}", problems)
    with problems.collect():
        layers = aux_layers(policy_cfg, policy.num_layers, _aux_of(config))
    problems.raise_any()
    heads = config["num_attention_heads"]
    return DraftArchitecture(
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        num_layers=config.get("num_hidden_layers") or 1,
        vocab_size=config["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        layernorm_epsilon=config.get("rms_norm_eps", 1e-6),
        init_method_std=config.get("initializer_range", 0.02),
        rotary_base=theta,
        rope_factor=factor,
        aux_layers=tuple(layers),
    )


def _read(file: Path, path: str) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise config_error(path, str(file), f"must be a model whose config.json can be read ({error})") from error
    if not isinstance(config, dict):
        raise config_error(path, str(file), f"must be a model whose config.json is a mapping, not {config!r}")
    return config


def _aux_of(config: Mapping[str, Any]) -> list[int] | None:
    """As ModelOpt writes them: the layers after which a state is taken, counted from 0."""
    for place in (config, config.get("eagle_config") or {}):
        found = place.get("eagle_aux_hidden_state_layer_ids")
        if found:
            return list(found)
    return None


def _rope(config: Mapping[str, Any], path: str, problems: Problems) -> tuple[float, float | None]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        problems.add(f"{path}: rope_scaling", dict(scaling), "must be of type default or llama3")
    elif any(float(scaling.get(name, value)) != value for name, value in _LLAMA3.items()):
        problems.add(f"{path}: rope_scaling", dict(scaling), f"must have {_LLAMA3}, which Megatron is fixed to")
    return theta, float(scaling.get("factor", 8.0))


def _check(found: DraftArchitecture, policy: Any, folder: Path | None) -> None:
    problems = Problems()
    if folder is None:
        where = f"{DRAFT}.model_name is None and the policy's own sizes are no draft's"
    else:
        where = f"{DRAFT}.model_name: {folder / 'config.json'}"
    tensor = policy.tensor_model_parallel_size
    if found.hidden_size != policy.hidden_size:
        problems.add(
            f"{where}: hidden_size",
            found.hidden_size,
            f"must be {policy.hidden_size}, the policy's, whose hidden states the draft reads",
        )
    if found.vocab_size != policy.vocab_size:
        problems.add(f"{where}: vocab_size", found.vocab_size, f"must be {policy.vocab_size}, the policy's")
    if found.draft_vocab_size > found.vocab_size:
        problems.add(
            f"{where}: draft_vocab_size", found.draft_vocab_size, f"must be at most vocab_size, {found.vocab_size}"
        )
    sizes = {
        "num_attention_heads": found.num_attention_heads,
        "num_key_value_heads": found.num_query_groups,
        "intermediate_size": found.ffn_hidden_size,
    }
    if found.draft_vocab_size != found.vocab_size:
        sizes["draft_vocab_size"] = found.draft_vocab_size
    for name, size in sizes.items():
        if size % tensor:
            problems.add(f"{where}: {name}", size, f"must be a multiple of the tensor-parallel size, {tensor}")
    if found.num_attention_heads % found.num_query_groups:
        problems.add(
            f"{where}: num_attention_heads",
            found.num_attention_heads,
            f"must be a multiple of num_key_value_heads, {found.num_query_groups}",
        )
    problems.raise_any()
