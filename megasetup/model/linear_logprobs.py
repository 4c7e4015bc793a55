"""Token log-probabilities straight from hidden states and the output weight, without the logits of all tokens.

A log-probability is one number a token, but the usual way to it holds a row of the whole vocabulary a token: 20 GB of
FP32 logits for 32k tokens of a 152k vocabulary, once as values and once as gradients. Here a chunk of tokens at a time
goes through the output layer; what stays of it is its log-sum-exp, from which the backward pass makes the chunk's
softmax again. Each chunk costs one more matrix product and the peak no longer grows with the tokens.

Megatron's GPTModel hands its last hidden states to an `output_processor` where one is given; LinearLogprobs is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

DEFAULT_CHUNK_SIZE = 1024


class _ChunkedLogprobs(torch.autograd.Function):
    """log p(target) of rows of hidden states; the vocabulary may be cut over a process group.

    The gradient of the hidden states is this rank's part: the caller's mapping sums it over the group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        chunk_size: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        local = targets - rank * len(weight)
        here = (local >= 0) & (local < len(weight))
        local = local.where(here, 0)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _logits(hidden[rows], weight)
            highest = logits.amax(-1)
            if world > 1:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            logits -= highest[:, None]
            chosen = logits.gather(-1, local[rows, None])[:, 0].where(here[rows], 0.0)
            sums = torch.stack((logits.exp_().sum(-1), chosen))
            if world > 1:
                dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            log_sum = sums[0].log()
            logprobs[rows] = sums[1] - log_sum
            log_sums[rows] = highest + log_sum
        ctx.save_for_backward(hidden, weight, local, here, log_sums)
        ctx.chunk_size = chunk_size
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local, here, log_sums = ctx.saved_tensors
        (grad,) = grads
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # In FP32: a sum over chunks in BF16 would lose what a single product over all tokens keeps.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            # d log p(target) / d logits = one_hot(target) - softmax
            slope = _logits(hidden[rows], weight).sub_(log_sums[rows, None]).exp_().mul_(-grad[rows, None])
            slope.scatter_add_(-1, local[rows, None], grad[rows].where(here[rows], 0.0)[:, None])
            low = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(low, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _accumulate(grad_weight, low.t(), hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # Rounded to the model's dtype on the way, as the output layer's own logits are.
    logits = torch.mm(hidden, weight.t())
    return logits.clone() if logits.dtype == torch.float32 else logits.float()


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.is_cuda and left.dtype != torch.float32:
        # The product's own FP32 accumulators go into the total, unrounded.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(left, right)


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The log-probability of each target under softmax(hidden @ weight.T), differentiable in hidden and weight.

    Args:
        hidden: [tokens, hidden size], the model's dtype, the same on every rank of `group`.
        weight: [vocabulary, hidden size] or this rank's equal share of its rows, in rank order.
        targets: [tokens], integer ids of the whole vocabulary.
        chunk_size: tokens whose logits exist at a time.
        group: the tensor-parallel group that the vocabulary is cut over; None when it is whole.

    Returns:
        [tokens] float32. Gradients have the dtypes of their tensors; that of `hidden` is this rank's part of a sum
        over `group` (copy_to_tensor_model_parallel_region or a gather of sequence-parallel hidden states sums it).

    Raises:
        ValueError: shapes that do not fit together, or a chunk size below 1.
        TypeError: hidden states and weight of different dtypes, or targets that are no integers.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: it is a number of tokens, 1 or more")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} and an output weight of shape {tuple(weight.shape)}: "
            "expected [tokens, hidden size] and [vocabulary, hidden size]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets of shape {tuple(targets.shape)} for {len(hidden)} tokens: expected one id a token")
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden states are {hidden.dtype} and the output weight is {weight.dtype}: make them the same")
    if targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise TypeError(f"targets are {targets.dtype}: expected integer token ids")
    logprobs: torch.Tensor = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets.long(), chunk_size, group
    )
    return logprobs


class LinearLogprobs:
    """An `output_processor` for Megatron's GPTModel: the model then returns log-probabilities of its labels.

    `model(input_ids, position_ids, attention_mask, labels=labels, output_processor=LinearLogprobs())` gives float32
    [batch, sequence], where the model otherwise gives logits or losses. Works with tensor and sequence parallelism;
    context parallelism is refused when the config is checked.

    Args:
        chunk_size: tokens whose logits exist at a time.
    """

    def __init__(self, chunk_size: int = DEFAULT_CHUNK_SIZE) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}: it is a number of tokens, 1 or more")
        self.chunk_size = chunk_size

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        labels: torch.Tensor | None,
        scale_logits: Any,
        **_: Any,
    ) -> torch.Tensor:
        """Called by the model's last pipeline stage, with its own parts.

        Args:
            hidden_states: [sequence, batch, hidden size]; this rank's part of the sequence under sequence parallelism.
            output_layer: the model's output layer, whose weight and parallel settings are used.
            output_weight: the weight to use instead, where it is tied to the embedding.
            labels: [batch, sequence] token ids.
            scale_logits: the model's scaling of logits (for muP), which is linear.

        Returns:
            [batch, sequence] float32.

        Raises:
            ValueError: no labels, or an output layer with a bias.
        """
        from megatron.core.tensor_parallel import mappings

        if labels is None:
            raise ValueError("labels is None: the log-probabilities of which tokens? Pass labels to the model")
        if getattr(output_layer, "bias", None) is not None:
            raise ValueError("the output layer has a bias, which fused linear log-probabilities leave out: turn it off")
        group = output_layer.tp_group
        world = 1 if group is None else group.size()
        if world > 1 and output_layer.sequence_parallel:
            hidden_states = mappings.gather_from_sequence_parallel_region(hidden_states, group=group)
        elif world > 1:
            hidden_states = mappings.copy_to_tensor_model_parallel_region(hidden_states, group=group)
        sequence, batch, width = hidden_states.shape
        logprobs = linear_logprobs(
            scale_logits(hidden_states).reshape(-1, width),
            output_layer.weight if output_weight is None else output_weight,
            labels.t().reshape(-1),
            chunk_size=self.chunk_size,
            group=group if world > 1 else None,
        )
        return logprobs.view(sequence, batch).t().contiguous()
