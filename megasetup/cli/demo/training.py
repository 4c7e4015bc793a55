"""The part of the demo that needs a GPU: the same model set up twice, without the refresh and with it, and trained.

Without the refresh is what happens where nothing refreshes the FP32 copies after a fine-tuning load: the optimizer is
there, Megatron-Bridge loads the weights and calls Megatron's reload_model_params, and Megatron's own hybrid optimizer
steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megasetup.cli.demo import model as models
from megasetup.cli.demo.imported import quietly
from megasetup.masters import AuditReport, audit_master_weights
from megasetup.model.report import SetupReport


class Setup(NamedTuple):
    """A model that can take steps.

    Attributes:
        model: wrapped for training.
        optimizer, scheduler: Megatron's.
        report: what the setup did.
    """

    model: Any
    optimizer: Any
    scheduler: Any
    report: SetupReport


@contextmanager
def one_rank(policy: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """A process group of this process alone, on the device."""
    from megasetup.model.distributed import destroy_parallel_state, setup_distributed

    with quietly():
        setup_distributed(policy)
        torch.cuda.set_device(device)
    try:
        yield
    finally:
        with quietly():
            destroy_parallel_state()


def set_up(policy: Mapping[str, Any], *, refresh: bool) -> Setup:
    """From a policy to a model that can take steps, in a process group that exists.

    Args:
        policy: the policy config; its model has been imported.
        refresh: whether the setup loads the weights and refreshes the FP32 copies; else they are loaded afterwards, and
            nothing is refreshed but what Megatron itself does.
    """
    from megasetup.checkpoint.paths import validate_model_paths
    from megasetup.config.runtime import validate_and_set_config
    from megasetup.model import bridge
    from megasetup.model.finalize import finalize_megatron_setup
    from megasetup.model.training import setup_model_and_optimizer

    with quietly():
        name, path, _ = validate_model_paths(policy)
        cfg = validate_and_set_config(policy, 0, name, path, None, None).megatron_cfg
        made = setup_model_and_optimizer(policy, cfg, load_weights=refresh)
        if not refresh:
            bridge.load_checkpoint(made.state, [made.model], made.optimizer, made.scheduler, made.checkpointing_context)
        finalize_megatron_setup(policy, cfg, name, None, made.model, made.optimizer)
    return Setup(made.model, made.optimizer, made.scheduler, made.report)


def audit(setup: Setup) -> AuditReport:
    """The state of every FP32 copy."""
    return audit_master_weights(setup.optimizer, [setup.model])


def train(setup: Setup, device: torch.device, steps: int) -> list[float]:
    """Train on the batch that the model knows. Returns the loss before each step, and after the last one."""
    losses = []
    with quietly():
        for _ in range(steps):
            setup.model.zero_grad_buffer()
            setup.optimizer.zero_grad()
            losses.append(_pass(setup.model, device, train=True))
            setup.optimizer.step()
            setup.scheduler.step(increment=models.SEQUENCES)
        setup.model.eval()
        with torch.no_grad():
            losses.append(_pass(setup.model, device, train=False))
        setup.model.train()
    return losses


def _pass(model: Any, device: torch.device, *, train: bool) -> float:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    pieces = models.batch(device).chunk(2)
    results = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter(pieces),
        model=model,
        num_microbatches=len(pieces),
        seq_length=models.LENGTH,
        micro_batch_size=len(pieces[0]),
        forward_only=not train,
    )
    return sum(float(result["loss"]) for result in results) / len(results)


def _forward_step(pieces: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    rows = next(pieces)
    positions = torch.arange(models.LENGTH, device=rows.device).expand(len(rows), -1)
    output = model(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous())
    return output, functools.partial(_summed)


def _summed(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = output.float().sum()
    count = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
    return total, count, {"loss": total.detach() / count}
