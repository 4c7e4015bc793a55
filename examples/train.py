"""Fine-tunes a model for three steps: python examples/train.py examples/train.yaml [KEY=VALUE ...] [--dry-run]

torchrun --nproc-per-node 8 in place of python trains on eight GPUs. --dry-run ends where a GPU is needed.
"""

import logging
import sys

import torch
import torch.distributed as dist

from megasetup import handle_model_import, validate_model_paths
from megasetup.config.load import load_config
from megasetup.config.runtime import validate_and_set_config
from megasetup.model.distributed import destroy_parallel_state, setup_distributed
from megasetup.model.finalize import finalize_megatron_setup
from megasetup.model.training import setup_model_and_optimizer


def main(config_file, *overrides, dry_run):
    policy = load_config(config_file, overrides).config["policy"]
    setup_distributed(policy)
    name, pretrained, exists = validate_model_paths(policy)
    handle_model_import(policy, name, pretrained, exists)
    runtime = validate_and_set_config(policy, dist.get_rank(), name, pretrained, None, None)
    if dry_run:
        print(f"dry run: {name} is in {pretrained}, trains in {runtime.dtype}")
        destroy_parallel_state()
        return
    made = setup_model_and_optimizer(policy, runtime.megatron_cfg)
    _, _, _, dp_size = finalize_megatron_setup(policy, runtime.megatron_cfg, name, None, made.model, made.optimizer)
    made.report.write_json(f"setup-report-{dist.get_rank()}.json")
    train(policy, runtime.model_cfg.vocab_size, made, dp_size)
    destroy_parallel_state(made.state)


def train(policy, vocab_size, made, dp_size):
    from megatron.core import parallel_state, pipeline_parallel

    # One batch of random tokens, a share for each data-parallel rank, where a trainer has its own.
    share, length = policy["train_global_batch_size"] // dp_size, policy["max_total_sequence_length"]
    random = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    pieces = torch.randint(vocab_size, (share, length + 1), generator=random).split(policy["train_micro_batch_size"])
    for step in range(policy["megatron_cfg"]["train_iters"]):
        for chunk in made.model if isinstance(made.model, list) else [made.model]:
            chunk.zero_grad_buffer()
        made.optimizer.zero_grad()
        results = pipeline_parallel.get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(pieces), model=made.model, forward_only=False,
            num_microbatches=len(pieces), seq_length=length, micro_batch_size=len(pieces[0]),
        )  # fmt: skip
        made.optimizer.step()
        made.scheduler.step(increment=policy["train_global_batch_size"])
        if results and dist.get_rank() == dist.get_world_size() - 1:  # (the last pipeline stage knows the loss)
            print(f"step {step + 1}: loss {sum(float(result['loss']) for result in results) / len(results):.4f}")


def forward_step(pieces, model):
    rows = next(pieces).cuda()
    positions = torch.arange(rows.shape[1] - 1, device="cuda").expand(len(rows), -1)
    return model(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous()), summed_loss


def summed_loss(losses):
    # The sum and the number of tokens: Megatron divides the gradients by the tokens of all ranks and pieces together.
    total, tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, tokens, {"loss": total.detach() / tokens}


if __name__ == "__main__":  # (Megatron starts a process of its own while it saves, and that imports this file)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megasetup").setLevel(logging.INFO)
    main(*(argument for argument in sys.argv[1:] if argument != "--dry-run"), dry_run="--dry-run" in sys.argv)
