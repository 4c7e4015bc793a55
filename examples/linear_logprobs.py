"""Log-probabilities and gradients without whole logits, against torch's own over all of them.

Runs anywhere, on a GPU if there is one, and then says what memory each way took. In a training run a Megatron model
calls it: docs/linear_logprobs.md.
"""

from collections.abc import Callable

import torch

from megasetup.model.linear_logprobs import linear_logprobs


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def run(way: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Log-probabilities, both gradients, and the bytes that it took at most."""
    on_gpu = inputs[0].is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    logprobs = way(*inputs)
    grads = torch.autograd.grad(logprobs.sum(), inputs[:2])
    return [logprobs.detach(), *grads], torch.cuda.max_memory_allocated() - before if on_gpu else 0


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, width, vocabulary = (16_384, 2_048, 151_936) if device == "cuda" else (256, 64, 4_096)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) * width**-0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    expected, plain_bytes = run(plain, hidden, weight, targets)
    found, fused_bytes = run(linear_logprobs, hidden, weight, targets)
    for name, one, other in zip(("log-probabilities", "d hidden", "d weight"), found, expected, strict=True):
        error = ((one.float() - other.float()).norm() / other.float().norm()).item()
        if not error < 2**-7:
            raise SystemExit(f"{name} differ by {error:.1e}")
        print(f"{name}: relative difference {error:.1e}")
    if device == "cuda":
        print(f"peak memory: {plain_bytes / 1e9:.2f} GB with logits, {fused_bytes / 1e9:.2f} GB without")


if __name__ == "__main__":
    main()
