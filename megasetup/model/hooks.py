"""What happens to a model between its construction and its wrapping: freezing, adapters, the caller's own changes.

Each hook takes the list of model chunks and returns it. They run in one order, which `pre_wrap_hooks` knows: routers
are frozen first and the model's own freeze() follows, because LoRA freezes all the rest itself and must find what is
left to adapt; a draft comes after it, so that it is trained whole; the caller's hooks see the finished model.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megasetup.config.draft import DRAFT, draft_enabled
from megasetup.config.errors import ConfigAttributeError, ConfigNotImplementedError, config_error
from megasetup.config.fields import MEGATRON, megatron_cfg, section
from megasetup.model.bridge import is_checkpoint, load_weights_from
from megasetup.model.draft import create_draft_pre_wrap_hook
from megasetup.moe import find_routers

_logger = logging.getLogger("megasetup")

_INSTALL: Mapping[str, str] = {
    "modelopt": "pip install nvidia-modelopt",
    "transformer_engine": "pip install --no-build-isolation 'transformer-engine[pytorch]'",
}

type Hook = Callable[[list[Any]], list[Any]]


def check_supported(policy_cfg: Mapping[str, Any]) -> None:
    """Refuse what a config asks for and this machine has not the packages for, before anything is built.

    Raises:
        ConfigNotImplementedError: a draft model without ModelOpt or Transformer Engine, or LoRA without the latter.
    """
    if draft_enabled(policy_cfg):
        for package in _INSTALL:
            _need(package, f"{DRAFT}.enabled", "drafts")
    if section(policy_cfg, "megatron_cfg", "peft").get("enabled"):
        # Megatron-Bridge asks of every layer whether it is one of Transformer Engine's, and fails where there is none.
        _need("transformer_engine", f"{MEGATRON}.peft.enabled", "adapters")


def _need(package: str, key: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise config_error(
            key,
            True,
            f"must be false, or {package} installed, which {what} are built with: {_INSTALL[package]}",
            ConfigNotImplementedError,
        )


def draft_hook(policy_cfg: Mapping[str, Any], cfg: Any, state: Any, *, load_base: bool) -> Hook | None:
    """The hook that attaches a draft, or None without one.

    Args:
        policy_cfg: the policy config.
        cfg: the ConfigContainer.
        state: the GlobalState.
        load_base: whether the policy's weights are to be loaded from the pretrained checkpoint first.
    """
    if not draft_enabled(policy_cfg):
        return None
    return create_draft_pre_wrap_hook(policy_cfg, cfg, state, preload_policy_from_pretrained=load_base)


def freeze_routers(chunks: list[Any]) -> list[Any]:
    """Leave the weights and biases of every router untrained, wherever it sits in the model."""
    frozen = 0
    for _, router in find_routers(chunks):
        for parameter in router.parameters():
            parameter.requires_grad_(False)
        frozen += 1
    _logger.info("froze %d routers", frozen)
    return chunks


def freeze_hook(arguments: Mapping[str, Any]) -> Hook:
    """A hook that calls each chunk's own freeze() with these arguments."""

    def freeze(chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            if not hasattr(chunk, "freeze"):
                raise config_error(
                    f"{MEGATRON}.freeze_config",
                    dict(arguments),
                    f"must be absent: {type(chunk).__name__} has no freeze()",
                    ConfigAttributeError,
                )
            chunk.freeze(**arguments)
        return chunks

    return freeze


def lora_hook(lora: Any, state: Any, *, load_base: bool) -> Hook:
    """A hook that loads the base model's weights and puts adapters beside them.

    The weights must be there first: the adapters change the names under which a checkpoint would be found.

    Args:
        lora: what create_lora made.
        state: the GlobalState; its checkpoint config names the pretrained checkpoint.
        load_base: whether to load it; False leaves the weights as initialised.
    """

    def add_lora(chunks: list[Any]) -> list[Any]:
        if load_base:
            path = state.cfg.checkpoint.pretrained_checkpoint
            if not is_checkpoint(path):
                raise FileNotFoundError(
                    f"LoRA needs its base model, and {path} holds no checkpoint: give pretrained_path, or convert the "
                    "model first (handle_model_import)"
                )
            load_weights_from(path, state, chunks)
        adapted = lora(chunks, training=True)
        lora.set_params_to_save(adapted)
        parameters = [parameter for chunk in adapted for parameter in chunk.parameters()]
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        _logger.info("LoRA trains %s of %s parameters", f"{trained:,}", f"{sum(p.numel() for p in parameters):,}")
        return list(adapted)

    return add_lora


def pre_wrap_hooks(
    policy_cfg: Mapping[str, Any],
    provider: Any,
    lora: Hook | None,
    additional: Sequence[Hook] = (),
    draft: Hook | None = None,
) -> list[Hook]:
    """All hooks, in the order in which they run.

    Args:
        policy_cfg: the policy config.
        provider: the model provider, whose own hooks (registered on it) come first.
        lora: the LoRA hook, if there is one.
        additional: the caller's, last.
        draft: the hook that attaches a draft, if there is one.
    """
    megatron = megatron_cfg(policy_cfg)
    hooks: list[Hook] = []
    if getattr(provider, "pre_wrap_hook", None) is not None:
        hooks.append(provider.pre_wrap_hook)
    if megatron.get("freeze_moe_router"):
        hooks.append(freeze_routers)
    if megatron.get("freeze_config"):
        hooks.append(freeze_hook(megatron["freeze_config"]))
    if lora is not None:
        hooks.append(lora)
    if draft is not None:
        hooks.append(draft)
    hooks += additional
    return hooks


def run_hooks(hooks: Sequence[Hook]) -> Hook:
    """One hook that runs several, each on what the one before returned; None means that it changed them in place."""

    def run(chunks: list[Any]) -> list[Any]:
        for hook in hooks:
            changed: Any = hook(chunks)
            chunks = chunks if changed is None else changed
        return chunks

    return run
