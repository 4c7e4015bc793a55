"""Token log-probabilities straight from hidden states and the output weight, without the logits of all tokens.

A log-probability is one number a token, but the usual way to it holds a row of the whole vocabulary a token: 20 GB of
FP32 logits for 32k tokens of a 152k vocabulary, once as values and once as gradients. Here a chunk of tokens at a time
goes through the output layer; what stays of it is its log-sum-exp, from which the backward pass makes the chunk's
softmax again. Each chunk costs one more matrix product and the peak no longer grows with the tokens.

Megatron's GPTModel hands its last hidden states to an `output_processor` where one is given; LinearLogprobs is one.
policy.megatron_cfg.use_fused_linear_logprobs asks for it, and `linear_logprobs_of` makes it as the config says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist

from megasetup.config.logprobs import fused_linear_logprobs_settings

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
        scale: float,
        group: dist.ProcessGroup | None,
        into_main_grad: bool,
    ) -> torch.Tensor:
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        local = targets - rank * len(weight)
        here = (local >= 0) & (local < len(weight))
        local = local.where(here, 0)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _logits(hidden[rows], weight, scale)
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
        # (a softmax of zeros, and so no gradient, for what is no token)
        outside = (targets < 0) | (targets >= world * len(weight))
        logprobs.masked_fill_(outside, 0.0)
        log_sums.masked_fill_(outside, torch.inf)
        ctx.save_for_backward(hidden, weight, local, here, log_sums)
        ctx.chunk_size, ctx.scale = chunk_size, scale
        # (Megatron keeps the gradients' buffer on the parameter itself)
        ctx.parameter = weight if into_main_grad else None
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local, here, log_sums = ctx.saved_tensors
        (grad,) = grads
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        main_grad = ctx.parameter.main_grad if wants_weight and ctx.parameter is not None else None
        grad_weight = None
        if main_grad is not None and main_grad.dtype == torch.float32:
            grad_weight = main_grad
        elif wants_weight:
            # In FP32: a sum over chunks in BF16 would lose what a single product over all tokens keeps.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            # d log p(target) / d logits = one_hot(target) - softmax
            slope = _logits(hidden[rows], weight, ctx.scale).sub_(log_sums[rows, None]).exp_().mul_(-grad[rows, None])
            slope.scatter_add_(-1, local[rows, None], grad[rows].where(here[rows], 0.0)[:, None])
            if ctx.scale != 1.0:
                slope *= ctx.scale
            low = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(low, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _accumulate(grad_weight, low.t(), hidden[rows])
        if main_grad is not None:
            if grad_weight is not main_grad:
                main_grad += grad_weight
            grad_weight = _added_to_main_grad(ctx.parameter)
        elif grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *(None,) * 5


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    # Rounded to the model's dtype on the way, as the output layer's own logits are.
    logits = torch.mm(hidden, weight.t()).float()
    return logits if scale == 1.0 else logits.mul_(scale)


def _added_to_main_grad(parameter: Any) -> torch.Tensor:
    """Say so, and return what autograd is to think the gradient is.

    The hook of Megatron's DistributedDataParallel runs where there is a gradient, and then passes it over; it adds it
    all the same where zero_out_wgrad is set, for a weight that the embedding has a gradient for, too.
    """
    from megatron.core.tensor_parallel import layers

    parameter.grad_added_to_main_grad = True
    # Transformer Engine's is one buffer for all calls.
    shared = getattr(layers, "get_dummy_wgrad", None)
    if shared is None or not parameter.is_cuda:
        return torch.zeros_like(parameter)
    dummy: torch.Tensor = shared(
        list(parameter.shape), parameter.dtype, zero=bool(getattr(parameter, "zero_out_wgrad", False))
    )
    return dummy


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
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    into_main_grad: bool = False,
) -> torch.Tensor:
    """The log-probability of each target under softmax(hidden @ weight.T / temperature).

    Differentiable in hidden and weight.

    Args:
        hidden: [tokens, hidden size], the model's dtype, the same on every rank of `group`.
        weight: [vocabulary, hidden size] or this rank's equal share of its rows, in rank order.
        targets: [tokens], integer ids of the whole vocabulary. An id outside of it, such as the -100 of padding, has a
            log-probability of 0 and no gradient.
        chunk_size: tokens whose logits exist at a time.
        temperature: divides the logits.
        group: the tensor-parallel group that the vocabulary is cut over; None when it is whole.
        into_main_grad: whether the gradient of `weight`, a parameter, is added to its main_grad, as Megatron's fused
            gradient accumulation does, instead of being returned to autograd. No rounding and no second tensor of the
            weight's size, if main_grad is float32.

    Returns:
        [tokens] float32. Gradients have the dtypes of their tensors; that of `hidden` is this rank's part of a sum
        over `group` (copy_to_tensor_model_parallel_region or a gather of sequence-parallel hidden states sums it).

    Raises:
        ValueError: shapes that do not fit together, a chunk size below 1, or a temperature that is not above 0.
        TypeError: hidden states and weight of different dtypes, or targets that are no integers.
    """
    _check_settings(chunk_size, temperature)
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
        hidden, weight, targets.long(), chunk_size, 1.0 / temperature, group, into_main_grad
    )
    return logprobs


def _check_settings(chunk_size: int, temperature: float) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: it is a number of tokens, 1 or more")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: it divides the logits, so it must be above 0")


class LinearLogprobs:
    """An `output_processor` for Megatron's GPTModel: the model then returns log-probabilities of its labels.

    `model(input_ids, position_ids, attention_mask, labels=labels, output_processor=LinearLogprobs())` gives float32
    [batch, sequence], where the model otherwise gives logits or losses. Works with tensor and sequence parallelism;
    context parallelism is refused when the config is checked.

    Args:
        chunk_size: tokens whose logits exist at a time.
        temperature: divides the logits.

    Raises:
        ValueError: a chunk size below 1, or a temperature that is not above 0.
    """

    def __init__(self, chunk_size: int = DEFAULT_CHUNK_SIZE, temperature: float = 1.0) -> None:
        _check_settings(chunk_size, temperature)
        self.chunk_size, self.temperature = chunk_size, temperature

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
            labels: [batch, sequence] token ids; one outside the vocabulary has a log-probability of 0.
            scale_logits: the model's scaling of logits (for muP), which is linear.

        Returns:
            [batch, sequence] float32.

        Raises:
            ValueError: no labels, or an output layer with a bias.
            TypeError: an output layer that is more than a matrix (one with an adapter), so that its weight alone would
                not give its logits.
        """
        from megatron.core.tensor_parallel import ColumnParallelLinear, mappings

        if labels is None:
            raise ValueError("labels is None: the log-probabilities of which tokens? Pass labels to the model")
        if not isinstance(output_layer, ColumnParallelLinear):
            raise TypeError(
                f"the output layer is a {type(output_layer).__name__}, of which fused linear log-probabilities would "
                "leave out all but the weight: leave it without adapters, or set use_fused_linear_logprobs to false"
            )
        if getattr(output_layer, "bias", None) is not None:
            raise ValueError("the output layer has a bias, which fused linear log-probabilities leave out: turn it off")
        group = output_layer.tp_group
        world = 1 if group is None else group.size()
        if world > 1 and output_layer.sequence_parallel:
            hidden_states = mappings.gather_from_sequence_parallel_region(hidden_states, group=group)
        elif world > 1:
            hidden_states = mappings.copy_to_tensor_model_parallel_region(hidden_states, group=group)
        sequence, batch, width = hidden_states.shape
        weight = output_layer.weight if output_weight is None else output_weight
        logprobs = linear_logprobs(
            scale_logits(hidden_states).reshape(-1, width),
            weight,
            labels.t().reshape(-1),
            chunk_size=self.chunk_size,
            temperature=self.temperature,
            group=group if world > 1 else None,
            into_main_grad=_fuses_accumulation(output_layer, weight),
        )
        return logprobs.view(sequence, batch).t().contiguous()


def _fuses_accumulation(output_layer: Any, weight: torch.Tensor) -> bool:
    # As the layer's own backward pass would decide. Where another user of the weight (an MTP head) adds to main_grad,
    # DistributedDataParallel passes over all that autograd has, so that it is not only a matter of memory. (Megatron's
    # FSDP makes main_grad when it is needed, and takes autograd's gradient too.)
    return bool(
        output_layer.gradient_accumulation_fusion
        and hasattr(weight, "main_grad")
        and hasattr(weight, "grad_added_to_main_grad")
        and not hasattr(weight, "__fsdp_param__")
    )


def linear_logprobs_of(config: Mapping[str, Any]) -> LinearLogprobs | None:
    """The output processor that a policy asks for, or None where it has the model return logits.

    policy.megatron_cfg.use_fused_linear_logprobs decides; fused_linear_logprobs_chunk_size is its chunk size, and
    policy.generation.temperature its temperature, so that training and generation speak of the same distribution.

    Args:
        config: the policy config. What excludes it is refused when the config is checked.

    Raises:
        ConfigError: a temperature that is not above 0.
    """
    settings = fused_linear_logprobs_settings(config)
    if settings is None:
        return None
    chunk_size, temperature = settings
    return LinearLogprobs(DEFAULT_CHUNK_SIZE if chunk_size is None else chunk_size, temperature)
