"""Log-probabilities without logits, against torch's log_softmax over all of them: values, gradients and peak memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launch import launch

from megasetup.model.linear_logprobs import DEFAULT_CHUNK_SIZE, LinearLogprobs, linear_logprobs, linear_logprobs_of

TOKENS, WIDTH, VOCABULARY = 37, 24, 101
WORKER = Path(__file__).with_name("linear_logprobs_worker.py")


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(TOKENS, generator=generator)


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.t()).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk_size", [1, 8, TOKENS, 1000])
def test_values_and_gradients_in_fp32(chunk_size):
    hidden, weight, targets, grad = _inputs(torch.float32)
    expected = _plain(hidden, weight, targets)
    wanted = torch.autograd.grad(expected, (hidden, weight), grad)
    found = linear_logprobs(hidden, weight, targets, chunk_size=chunk_size)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(found, (hidden, weight), grad), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_bf16_rounds_as_the_plain_path_does():
    hidden, weight, targets, grad = _inputs(torch.bfloat16)
    expected = _plain(hidden, weight, targets)
    wanted = torch.autograd.grad(expected, (hidden, weight), grad)
    found = linear_logprobs(hidden, weight, targets, chunk_size=10)
    assert found.dtype == torch.float32
    # The same BF16 logits went in, so the values agree far below BF16's rounding.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(found, (hidden, weight), grad), wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-6)


def test_a_temperature_divides_the_logits():
    hidden, weight, targets, grad = _inputs(torch.float32)
    expected = _plain(hidden / 0.7, weight, targets)
    wanted = torch.autograd.grad(expected, (hidden, weight), grad)
    found = linear_logprobs(hidden, weight, targets, chunk_size=8, temperature=0.7)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(found, (hidden, weight), grad), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_processor_as_the_config_says():
    assert linear_logprobs_of({"megatron_cfg": {"fused_linear_logprobs_chunk_size": 7}}) is None
    megatron = {"use_fused_linear_logprobs": True}
    default = linear_logprobs_of({"megatron_cfg": megatron})
    assert (default.chunk_size, default.temperature) == (DEFAULT_CHUNK_SIZE, 1.0)
    config = {
        "megatron_cfg": megatron | {"fused_linear_logprobs_chunk_size": 7},
        "generation": {"temperature": 0.6},
    }
    made = linear_logprobs_of(config)
    assert (made.chunk_size, made.temperature) == (7, 0.6)


def test_targets_outside_the_vocabulary_are_ignored():
    hidden, weight, targets, grad = _inputs(torch.float32)
    targets[[0, 11, 36]] = -100
    expected = -F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    wanted = torch.autograd.grad(expected, (hidden, weight), grad)
    targets[11] = VOCABULARY
    found = linear_logprobs(hidden, weight, targets, chunk_size=8)
    assert found[[0, 11, 36]].tolist() == [0, 0, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(found, (hidden, weight), grad), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_no_tokens_have_no_log_probabilities():
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(VOCABULARY, WIDTH, requires_grad=True)
    found = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    assert found.shape == (0,)
    found.sum().backward()
    assert hidden.grad.shape == (0, WIDTH)
    assert not weight.grad.any()


def test_hidden_states_need_not_be_contiguous():
    hidden, weight, targets, grad = _inputs(torch.float32)
    across = hidden.detach().t().contiguous().t().requires_grad_()
    assert not across.is_contiguous()
    wanted = torch.autograd.grad(_plain(hidden, weight, targets), hidden, grad)
    found = torch.autograd.grad(linear_logprobs(across, weight, targets, chunk_size=5), across, grad)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_costs_no_gradient():
    hidden, weight, targets, grad = _inputs(torch.float32)
    weight.requires_grad_(False)
    wanted = torch.autograd.grad(_plain(hidden, weight, targets), hidden, grad)[0]
    linear_logprobs(hidden, weight, targets, chunk_size=8).backward(grad)
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size is 0"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, ValueError, r"targets of shape \(3,\) for 37 tokens"),
        ({"targets": torch.zeros(TOKENS)}, TypeError, "targets are torch.float32"),
        ({"weight": torch.zeros(VOCABULARY, 5)}, ValueError, r"\(37, 24\) and an output weight of shape \(101, 5\)"),
        ({"weight": torch.zeros(VOCABULARY, WIDTH).half()}, TypeError, "the output weight is torch.float16"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    hidden, weight, targets, _ = _inputs(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(error, match=message):
        linear_logprobs(**arguments)


def test_a_processor_without_labels_says_so():
    pytest.importorskip("megatron.core")
    with pytest.raises(ValueError, match="labels is None"):
        LinearLogprobs()(hidden_states=None, output_layer=None, output_weight=None, labels=None, scale_logits=None)


def test_an_output_layer_with_an_adapter_is_refused():
    with pytest.raises(TypeError, match="the output layer is a Linear"):
        LinearLogprobs()(
            hidden_states=torch.zeros(2, 1, WIDTH),
            output_layer=torch.nn.Linear(WIDTH, VOCABULARY),
            output_weight=None,
            labels=torch.zeros(1, 2, dtype=torch.long),
            scale_logits=None,
        )


@pytest.mark.parametrize("world", [1, 2])
def test_a_megatron_model_gives_what_its_logits_give(world):
    """Whole and vocabulary-parallel, tied and not, on a real GPTModel."""
    for rank, ended in enumerate(launch(WORKER, world, "cpu")):
        assert ended.status == 0, ended.output
        assert f"rank {rank}: 2 of 2 agree" in ended.output


@pytest.mark.multigpu
def test_sequence_parallel_hidden_states():
    for rank, ended in enumerate(launch(WORKER, 2, "cuda")):
        assert ended.status == 0, ended.output
        assert f"rank {rank}: 4 of 4 agree" in ended.output


@pytest.mark.gpu
def test_peak_memory_at_32k_tokens_of_a_152k_vocabulary():
    tokens, width, vocabulary = 32_768, 1_536, 151_936
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    grad = torch.randn(tokens, device="cuda")
    found, peaks = [], []
    for way in (lambda: linear_logprobs(hidden, weight, targets), lambda: _plain(hidden, weight, targets)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprobs = way()
        found.append((logprobs.detach(), *torch.autograd.grad(logprobs, (hidden, weight), grad)))
        del logprobs
        peaks.append(torch.cuda.max_memory_allocated() - before)
    print(f"peak memory at 32k tokens: fused {peaks[0] / 1e9:.2f} GB, plain {peaks[1] / 1e9:.2f} GB")
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        # Of the whole tensor: single elements near zero are sums that cancel.
        assert (one.float() - other.float()).norm() / other.float().norm() < 2**-7
    assert peaks[0] < peaks[1] / 8
