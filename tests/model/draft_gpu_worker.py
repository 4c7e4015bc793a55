"""One rank with a policy and a draft on GPUs, trained, saved and resumed: python draft_gpu_worker.py FOLDER.

FOLDER holds dense/, a Hugging Face model, and draft/, an Eagle-3 draft of it. FLOW_PARALLEL gives the parallel sizes.
Prints "all as told" at the end; anything else ends with a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from draft_gpu_model import AUX, CONFIG, WIDTH, weights
from draft_reference import eagle_3
from flow_config import policy_config
from flow_models import LENGTH, SEQUENCES, TAUGHT, VOCABULARY, batch
from flow_worker import FOLDER, Run, masters_of, parallel
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megasetup.masters import audit_master_weights
from megasetup.model.draft import EagleDraft, capture_hidden_states, export_draft, get_attached_draft_model

STEPS = 12


def settings(**draft: Any) -> dict[str, Any]:
    config = policy_config(str(FOLDER / "dense"), **parallel())
    config["draft"] = {"enabled": True, "loss_weight": 1.0, **draft}
    optimizer, scheduler = (config["megatron_cfg"][name] for name in ("optimizer", "scheduler"))
    optimizer["lr"] = optimizer["min_lr"] = scheduler["lr_warmup_init"] = 1e-3
    return config


def start(weights: Path | None = None, **draft: Any) -> Run:
    place = None if weights is None else str(weights)
    return Run(settings(**draft), place, place)


def rows_of(run: Run) -> torch.Tensor:
    return batch(TAUGHT).chunk(run.dp_size)[parallel_state.get_data_parallel_rank()]


def forward(model: Any, rows: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(LENGTH, device="cuda").expand(len(rows), -1)
    found: torch.Tensor = model(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous())
    return found


def draft_loss(draft: EagleDraft, captured: Any, rows: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that the draft has. From position t it proposes token t + 2."""
    logits = draft(captured.hidden_states(), captured.next_embeddings()).logits
    targets = rows[:, 2:].T.contiguous()
    own = draft.policy_tokens()
    index = torch.searchsorted(own, targets).clamp(max=len(own) - 1)
    known = own[index] == targets
    losses = vocab_parallel_cross_entropy(logits[:-1].float().contiguous(), index)
    return (losses * known).sum() / known.sum()


def step(run: Run) -> float:
    """One optimizer step of policy and draft together; the draft's loss before it."""
    draft = run.made.draft_model
    found: list[torch.Tensor] = []

    def forward_step(pieces: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        rows = next(pieces)
        with capture_hidden_states(model, draft.architecture.aux_layers) as captured:
            output = forward(model, rows)
        loss = draft_loss(draft, captured, rows)
        found.append(loss.detach())
        count = torch.tensor(output.numel(), dtype=torch.int, device="cuda")
        return output, lambda output: (output.float().sum() + loss * count, count, {})

    (chunk,) = run.chunks
    chunk.zero_grad_buffer()
    run.made.optimizer.zero_grad()
    pieces = rows_of(run).split(2)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(pieces),
        model=chunk,
        num_microbatches=len(pieces),
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    succeeded, _, _ = run.made.optimizer.step()
    assert succeeded
    run.made.scheduler.step(increment=SEQUENCES)
    run.made.state.train_state.step += 1
    run.made.state.train_state.consumed_train_samples += SEQUENCES
    return torch.stack(found).mean().item()


def check_exported(draft: EagleDraft) -> None:
    exported = export_draft(draft)
    assert exported.keys() == weights().keys()
    for name, tensor in weights().items():
        assert torch.equal(exported[name].cpu(), tensor), name


def check_forward(run: Run) -> None:
    (chunk,) = run.chunks
    draft = run.made.draft_model
    assert draft.architecture.aux_layers == AUX
    rows = rows_of(run)
    chunk.eval()
    with torch.no_grad():
        plain = forward(chunk, rows)
        with capture_hidden_states(chunk, AUX) as captured:
            assert torch.equal(forward(chunk, rows), plain)
        assert torch.equal(forward(chunk, rows), plain)
        hidden, embeddings = captured.hidden_states(), captured.next_embeddings()
        assert hidden.shape == (LENGTH, len(rows), len(AUX) * WIDTH)
        table = export_embedding(chunk)
        torch.testing.assert_close(embeddings[:-1], table[rows[:, 1:-1].T], rtol=0, atol=0)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
        outputs = [draft(hidden, embeddings, given) for given in (None, mask)]
    chunk.train()
    on_gpu = {name: tensor.cuda().float() for name, tensor in weights().items()}
    expected = eagle_3(CONFIG, on_gpu, hidden.float().transpose(0, 1), embeddings.float().transpose(0, 1))
    for output in outputs:
        assert output.hidden_states.shape == (LENGTH, len(rows), WIDTH)
        logits = whole(output.logits, -1).float().transpose(0, 1)
        difference = (logits - expected).abs().max() / expected.abs().max()
        assert difference < 0.05, difference


def whole(part: torch.Tensor, dim: int) -> torch.Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def export_embedding(chunk: Any) -> torch.Tensor:
    return whole(chunk.module.module.embedding.word_embeddings.weight.detach(), 0)


def save(run: Run, target: Path) -> None:
    from megatron.bridge.training.checkpointing import save_checkpoint

    run.cfg.checkpoint.save = str(target)
    save_checkpoint(
        state=run.made.state,
        model=run.chunks,
        optimizer=run.made.optimizer,
        opt_param_scheduler=run.made.scheduler,
        num_floating_point_operations_so_far=0,
        checkpointing_context=run.made.checkpointing_context,
    )


def check_setup(run: Run) -> None:
    draft = run.made.draft_model
    assert isinstance(draft, EagleDraft)
    assert get_attached_draft_model(run.made) is draft
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.bfloat16}
    report = run.made.report
    assert report.weights.startswith("base model "), report.weights
    assert report.weights.endswith(", a draft")
    assert report.sync is not None
    assert report.audit.ok
    check_exported(draft)


def check_training(run: Run) -> None:
    draft = run.made.draft_model
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    losses = [step(run) for _ in range(STEPS)]
    print("draft losses", [round(loss, 3) for loss in losses], flush=True)
    assert losses[-1] < 0.9 * losses[0], losses
    still = [name for name, parameter in draft.named_parameters() if torch.equal(parameter, before[name])]
    # (a norm's weights near 1 move less than BF16 can show, at first)
    assert all("norm" in name for name in still), still
    assert audit_master_weights(run.made.optimizer, run.chunks).ok
    for name, parameter in draft.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            parts = whole(parameter.detach()[None], 0)
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} is not the same on all ranks"


def check_resume(run: Run, target: Path) -> None:
    exported = export_draft(run.made.draft_model)
    save(run, target)
    masters = masters_of(run.made.optimizer)
    expected = [step(run) for _ in range(3)]
    again = start(weights=target, model_name=str(FOLDER / "draft"))
    resumed = export_draft(again.made.draft_model)
    assert resumed.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(resumed[name], tensor), name
    loaded = masters_of(again.made.optimizer)
    assert len(masters) == len(loaded)
    assert all(map(torch.equal, masters, loaded))
    assert again.made.report.weights.endswith("with optimizer state"), again.made.report.weights
    losses = [step(again) for _ in range(3)]
    for loss, wanted in zip(losses, expected, strict=True):
        assert abs(loss - wanted) < 1e-3 * wanted, (losses, expected)


def check_pipeline(target: Path) -> None:
    """The draft is on the last stage; a step without it, saving and resuming work as ever."""
    run = start(model_name=str(FOLDER / "draft"))
    last = parallel_state.is_pipeline_last_stage()
    assert (run.made.draft_model is not None) == last
    run.step()
    save(run, target)
    if last:
        check_exported(run.made.draft_model)
    again = start(weights=target, model_name=str(FOLDER / "draft"))
    if last:
        check_exported(again.made.draft_model)


def check_fresh() -> None:
    """Without a draft of its own the LM head is the policy's, which has its weights by then."""
    run = start()
    draft = run.made.draft_model
    policy = run.chunks[0].module.module
    assert policy.output_layer.weight.std() > 0
    assert torch.equal(draft.eagle.eagle_output_layer.weight, policy.output_layer.weight)
    assert draft.architecture.draft_vocab_size == VOCABULARY
    assert draft.eagle.fc.weight.isfinite().all()
    losses = [step(run) for _ in range(4)]
    assert losses[-1] < losses[0], losses


def main() -> None:
    target = FOLDER / "saved" / "-".join(parallel()) / "draft"
    if parallel().get("pipeline_model_parallel_size", 1) > 1:
        check_pipeline(target)
    else:
        run = start(model_name=str(FOLDER / "draft"))
        check_setup(run)
        check_forward(run)
        check_training(run)
        check_resume(run, target)
        del run
        check_fresh()
    print("all as told", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
