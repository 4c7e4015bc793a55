"""What is frozen and adapted before a model is wrapped, in which order, and what a config may not ask for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from megasetup.compat.bridge import import_bridge
from megasetup.model.hooks import (
    check_supported,
    freeze_hook,
    freeze_routers,
    lora_hook,
    pre_wrap_hooks,
    run_hooks,
)

needs_bridge = pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="needs megatron-bridge")


class Routed(nn.Module):
    """Stand-in for a router: Megatron's contract, a weight, a bias and the expert bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.bias = nn.Parameter(torch.zeros(4))
        self.register_buffer("expert_bias", torch.zeros(4))


class Model(nn.Module):
    """Routers where models have them: in a layer, in an MTP layer, in a language model within another model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"mlp": nn.ModuleDict({"router": Routed()}), "linear": nn.Linear(8, 8)})
        self.mtp = nn.ModuleDict({"router": Routed()})
        self.llava_model = nn.ModuleDict({"language_model": nn.ModuleDict({"router": Routed()})})
        self.frozen: dict[str, Any] = {}

    def freeze(self, **arguments: Any) -> None:
        self.frozen = arguments


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_every_router_is_frozen_and_nothing_else() -> None:
    model = Model()
    assert freeze_routers([model]) == [model]
    assert trained(model) == ["layer.linear.weight", "layer.linear.bias"]


def test_freeze_gets_the_configs_arguments() -> None:
    models = [Model(), Model()]
    assert freeze_hook({"freeze_language_model": True, "freeze_vision_model": False})(list(models)) == models
    for model in models:
        assert model.frozen == {"freeze_language_model": True, "freeze_vision_model": False}


def test_a_model_without_freeze_is_named() -> None:
    with pytest.raises(AttributeError, match=r"policy\.megatron_cfg\.freeze_config is .*Linear has no freeze\(\)"):
        freeze_hook({"freeze_language_model": True})([nn.Linear(1, 1)])


def test_hooks_run_on_what_the_one_before_returned() -> None:
    seen: list[list[str]] = []

    def replacing(chunks: list[Any]) -> list[Any]:
        seen.append(chunks)
        return [*chunks, "more"]

    def in_place(chunks: list[Any]) -> Any:
        seen.append(list(chunks))
        chunks.append("last")

    assert run_hooks([replacing, in_place])(["first"]) == ["first", "more", "last"]
    assert seen == [["first"], ["first", "more"]]
    assert run_hooks([])(["first"]) == ["first"]


@needs_bridge
def test_order() -> None:
    provider = import_bridge("megatron.bridge.models.gpt_provider").GPTModelProvider(
        num_layers=1, hidden_size=8, num_attention_heads=1
    )
    calls: list[str] = []

    def named(name: str) -> Any:
        def hook(chunks: list[Any]) -> list[Any]:
            # Routers are frozen before the model's own freeze(), and LoRA comes after both.
            calls.append(f"{name}: {len(trained(chunks[0]))} trained, freeze({sorted(chunks[0].frozen)})")
            return chunks

        return hook

    provider.register_pre_wrap_hook(named("provider"))
    config = {"megatron_cfg": {"freeze_moe_router": True, "freeze_config": {"a": 1}}}
    hooks = pre_wrap_hooks(config, provider, named("lora"), [named("caller"), named("caller 2")])
    assert len(hooks) == 6
    run_hooks(hooks)([Model()])
    assert calls == [
        "provider: 8 trained, freeze([])",
        "lora: 2 trained, freeze(['a'])",
        "caller: 2 trained, freeze(['a'])",
        "caller 2: 2 trained, freeze(['a'])",
    ]


@needs_bridge
@pytest.mark.parametrize("settings", [{}, {"freeze_moe_router": False, "freeze_config": None}])
def test_nothing_to_do(settings: dict[str, Any]) -> None:
    provider = import_bridge("megatron.bridge.models.gpt_provider").GPTModelProvider(
        num_layers=1, hidden_size=8, num_attention_heads=1
    )
    assert pre_wrap_hooks({"megatron_cfg": settings}, provider, None) == []


@needs_bridge
def test_lora_without_its_base_model(tmp_path: Any) -> None:
    from types import SimpleNamespace

    state = SimpleNamespace(cfg=SimpleNamespace(checkpoint=SimpleNamespace(pretrained_checkpoint=str(tmp_path))))
    with pytest.raises(FileNotFoundError, match="LoRA needs its base model"):
        lora_hook(None, state, load_base=True)([])


@pytest.mark.parametrize("missing", ["modelopt", "transformer_engine"])
def test_what_is_not_supported_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(NotImplementedError, match=rf"policy\.draft\.enabled is True: must be false, or {missing} inst"):
        check_supported({"draft": {"enabled": True}, "megatron_cfg": {}})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    check_supported({"draft": {"enabled": True}, "megatron_cfg": {}})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_supported(
        {
            "draft": None,
            "router_replay": {"enabled": True},
            "megatron_cfg": {"use_fused_linear_logprobs": True},
        }
    )


def test_lora_needs_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"megatron_cfg": {"peft": {"enabled": True, "dim": 8, "alpha": 32}}}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformer_engine" else object())
    with pytest.raises(
        NotImplementedError,
        match=r"policy\.megatron_cfg\.peft\.enabled is True: must be false, or transformer_engine inst",
    ):
        check_supported(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "modelopt" else object())
    check_supported(config)
