"""One rank with a policy and a draft on the CPU: python draft_worker.py FOLDER CASE [CASE ...].

As many tensor-parallel ranks as there are ranks. Each case prints "CASE as told", or the worker ends with a traceback.
The layers are those of draft_parts.plain_layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from draft_parts import (
    LAYERS,
    LENGTH,
    PADDED,
    VOCABULARY,
    WIDTH,
    draft_config,
    draft_weights,
    make_policy,
    plain_layers,
    write_draft,
)
from draft_reference import eagle_3
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.transformer.module import Float16Module

from megasetup.compat.bridge import import_bridge
from megasetup.compat.no_gpu import no_gpu
from megasetup.model.draft import (
    DraftWeightsError,
    capture_hidden_states,
    create_draft_pre_wrap_hook,
    export_draft,
    get_attached_draft_model,
)
from megasetup.model.draft.attach import build_draft

FOLDER = Path(sys.argv[1])
CASES: dict[str, Callable[[], None]] = {}
BATCH = 2


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def group() -> Any:
    return parallel_state.get_tensor_model_parallel_group()


def whole(part: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous(), group=group())
    return torch.cat(parts, dim=dim)


def policy_of(**changes: Any) -> Any:
    return make_policy(tensor=dist.get_world_size(), **changes)


def settings(folder: Path | None = None, **changes: Any) -> dict[str, Any]:
    return {"draft": {"enabled": True, "model_name": None if folder is None else str(folder), **changes}}


def written(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None) -> Path:
    if dist.get_rank() == 0:
        write_draft(FOLDER / name, config, tensors)
    dist.barrier()
    return FOLDER / name


def with_draft(policy: Any, folder: Path | None = None, **changes: Any) -> Any:
    return build_draft(settings(folder, **changes), policy.config, policy)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return tokens, torch.arange(LENGTH).expand(BATCH, LENGTH), mask


@case
def exported_as_loaded() -> None:
    for name, changes, dtype in (
        ("own_tokens", {}, torch.float32),
        ("all_tokens", {"draft_vocab_size": VOCABULARY}, torch.float32),
        ("two_layers", {"num_hidden_layers": 2}, torch.float32),
        ("in_bf16", {}, torch.bfloat16),
    ):
        config = draft_config(**changes)
        tensors = draft_weights(config, dtype=dtype)
        draft = with_draft(policy_of(dtype=dtype), written(name, config, tensors)).to(dtype)  # (as the wrapper does)
        exported = export_draft(draft)
        assert exported.keys() == tensors.keys(), name
        for key, tensor in tensors.items():
            assert torch.equal(exported[key], tensor), (name, key)
            assert exported[key].dtype == tensor.dtype, (name, key)


@case
def other_names() -> None:
    config = draft_config(num_hidden_layers=2)
    tensors = draft_weights(config)
    deep = {}
    for name, tensor in tensors.items():
        ours = name.replace("layers.", "midlayer.")
        deep["model." + (ours.replace("1.input_layernorm", "1.hidden_norm"))] = tensor
    deep["embed_tokens.weight"] = torch.zeros(VOCABULARY, WIDTH)
    draft = with_draft(policy_of(), written("deep", config, deep))
    exported = export_draft(draft)
    for name, tensor in deep.items():
        if not name.endswith(("embed_tokens.weight", "t2d")):
            assert torch.equal(exported[name], tensor), name
    fresh = with_draft(policy_of())
    assert "midlayer.self_attn.q_proj.weight" in export_draft(fresh)
    assert "layers.1.self_attn.q_proj.weight" in export_draft(with_draft(policy_of(), num_layers=2))


@case
def logits_of_eagle_3() -> None:
    config = draft_config()
    tensors = draft_weights(config)
    policy = policy_of()
    draft = with_draft(policy, written("logits", config, tensors))
    tokens, positions, mask = inputs()
    with torch.no_grad(), capture_hidden_states(policy, draft.architecture.aux_layers) as captured:
        policy(tokens, positions, mask)
    hidden, embeddings = captured.hidden_states(), captured.next_embeddings()
    output = draft(hidden, embeddings, mask)
    assert not output.hidden_states.requires_grad
    assert output.hidden_states.shape == (LENGTH, BATCH, WIDTH)
    logits = whole(output.logits.detach(), -1).transpose(0, 1)
    expected = eagle_3(config, tensors, hidden.transpose(0, 1), embeddings.transpose(0, 1))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    again = draft(output.hidden_states, embeddings, mask, projected=True)
    assert again.logits.shape == output.logits.shape
    output.logits.square().mean().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 0, name
    assert all(parameter.grad is None for parameter in policy.parameters())


@case
def what_is_captured() -> None:
    policy = policy_of()
    tokens, positions, mask = inputs()
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda layer, _, output: seen.update({layer.layer_number - 1: output[0]}))
        for layer in policy.decoder.layers
    ]
    plain = policy(tokens, positions, mask)
    for hook in hooks:
        hook.remove()
    with capture_hidden_states(policy, [7, 2]) as captured:
        with pytest.raises(RuntimeError, match=r"layers \[2, 7\]"):
            captured.hidden_states()
        output = policy(tokens, positions, mask)
    assert torch.equal(output, plain)
    hidden = captured.hidden_states()
    assert torch.equal(hidden, torch.cat((seen[2], seen[7]), -1))
    assert not hidden.requires_grad
    embeddings = policy.embedding(tokens, positions).detach()
    following = captured.next_embeddings()
    assert torch.equal(following[:-1], embeddings[1:])
    assert not following[-1].any()
    assert torch.equal(captured.next_embeddings(), following)
    assert not any(layer._forward_hooks for layer in policy.decoder.layers)
    output.sum().backward()
    assert policy.decoder.layers[0].mlp.linear_fc1.weight.grad.norm() > 0


@case
def head_from_the_policy() -> None:
    for tied in (False, True):
        policy = policy_of(tied=tied)
        head = policy.embedding.word_embeddings.weight if tied else policy.output_layer.weight
        draft = with_draft(policy)
        assert torch.equal(draft.eagle.eagle_output_layer.weight, head)
        assert draft.architecture.aux_layers == (1, LAYERS // 2 - 1, LAYERS - 4)
    projection = draft.eagle.fc.weight.detach()
    assert 0.01 < projection.std() < 0.03
    assert torch.equal(whole(projection[None], 0), projection.expand(dist.get_world_size(), -1, -1))
    config = draft_config()
    tensors = draft_weights(config)
    del tensors["lm_head.weight"]
    draft = with_draft(policy, written("no_head", config, tensors))
    rows = tensors["d2t"] + torch.arange(config["draft_vocab_size"])
    assert torch.equal(whole(draft.eagle.eagle_output_layer.weight.detach(), 0), whole(head.detach(), 0)[rows])


@case
def shapes_that_do_not_fit() -> None:
    config = draft_config()
    tensors = draft_weights(config)
    tensors["midlayer.self_attn.q_proj.weight"] = torch.zeros(64, WIDTH)
    del tensors["norm.weight"]
    tensors["what.weight"] = torch.zeros(3)
    folder = written("misfit", config, tensors)
    policy = policy_of()
    with pytest.raises(DraftWeightsError) as raised:
        with_draft(policy, folder)
    message = str(raised.value)
    for part in (
        str(folder),
        "midlayer.self_attn.q_proj.weight is (64, 32), and the draft's is (64, 64)",
        "norm.weight is missing",
        "what.weight (3,) is no weight",
    ):
        assert part in message, message


@case
def values_that_do_not_fit() -> None:
    policy = policy_of()
    config = draft_config()
    tensors = draft_weights(config)
    d2t = tensors["d2t"]
    outside, twice = d2t.clone(), d2t.clone()
    outside[-1] = VOCABULARY
    twice[1] = twice[0] - 1
    for name, changes, said in (
        ("outside", {"d2t": outside}, rf"d2t leads to 1 tokens .* as {VOCABULARY + len(d2t) - 1}"),
        ("twice", {"d2t": twice}, "some of the policy's tokens twice"),
        ("others", {"t2d": tensors["t2d"].roll(1)}, "t2d names other tokens than d2t"),
        ("float_tokens", {"d2t": d2t.float()}, "d2t is torch.float32, expected one of torch.int64"),
        ("quantised", {"fc.weight": tensors["fc.weight"].to(torch.int8)}, "fc.weight is torch.int8, expected one of"),
    ):
        with pytest.raises(DraftWeightsError, match=said):
            with_draft(policy, written(name, config, tensors | changes))


@case
def states_in_fp32() -> None:
    """A policy that keeps its residuals in FP32 hands such states to a draft in BF16."""
    policy = policy_of(dtype=torch.bfloat16)
    draft = with_draft(policy, written("fp32_states", draft_config(), draft_weights(draft_config()))).bfloat16()
    hidden, embeddings = (torch.randn(LENGTH, BATCH, width) for width in (3 * WIDTH, WIDTH))
    mask = inputs()[2]
    logits = draft(hidden, embeddings, mask).logits
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, draft(hidden.bfloat16(), embeddings.bfloat16(), mask).logits)


def state_of(pretrained: Path | None = None) -> Any:
    return SimpleNamespace(cfg=SimpleNamespace(checkpoint=SimpleNamespace(pretrained_checkpoint=pretrained), peft=None))


@case
def attached_once() -> None:
    policy = policy_of()
    cfg = SimpleNamespace(model=policy.config)
    hook = create_draft_pre_wrap_hook(settings(), cfg, state_of(), preload_policy_from_pretrained=False)
    assert get_attached_draft_model(policy) is None
    chunks = hook([policy])
    assert chunks == [policy]
    draft = get_attached_draft_model(policy)
    assert draft is policy.draft_model
    assert any(name.startswith("draft_model.eagle.decoder.layers.0.") for name in policy.state_dict())
    policy.config.bf16 = True
    wrapped = Float16Module(policy.config, policy)
    assert get_attached_draft_model([wrapped]) is draft
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="a draft model already"):
        hook([policy])
    middle = policy_of()
    middle.post_process = False
    hook([middle])
    assert get_attached_draft_model(middle) is None


@case
def nothing_to_preload() -> None:
    import_bridge("megatron.bridge.training.checkpointing")
    policy = policy_of()
    cfg = SimpleNamespace(model=policy.config)
    for path in (str(FOLDER / "nowhere"), None):
        hook = create_draft_pre_wrap_hook(settings(), cfg, state_of(path), preload_policy_from_pretrained=True)
        with pytest.raises(ValueError, match=rf"{path} holds no checkpoint"):
            hook([policy])
        assert get_attached_draft_model(policy) is None


@case
def saved() -> None:
    """Into FOLDER/checkpoint, for any number of ranks to load."""
    config = draft_config()
    policy = policy_of()
    policy.draft_model = with_draft(policy, written("saved", config, draft_weights(config)))
    target = FOLDER / "checkpoint"
    if dist.get_rank() == 0:
        target.mkdir()
    dist.barrier()
    dist_checkpointing.save(policy.sharded_state_dict(), str(target))


@case
def resumed() -> None:
    """From FOLDER/checkpoint, into a draft with other weights."""
    config = draft_config()
    policy = policy_of()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in draft_weights(config).items()}
    zeros["t2d"][: len(zeros["d2t"])] = True
    policy.draft_model = draft = with_draft(policy, written("zeros", config, zeros))
    assert not draft.eagle.fc.weight.any()
    policy.load_state_dict(dist_checkpointing.load(policy.sharded_state_dict(), str(FOLDER / "checkpoint")))
    exported = export_draft(draft)
    for name, tensor in draft_weights(config).items():
        assert torch.equal(exported[name], tensor), name


def main() -> None:
    plain_layers()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    assert PADDED % dist.get_world_size() == 0
    with no_gpu():
        for name in sys.argv[2:]:
            CASES[name]()
            print(f"{name} as told", flush=True)
            dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
