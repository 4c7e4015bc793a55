"""Fine-tunes a model and an Eagle-3 draft of it: python examples/draft.py examples/train.yaml [KEY=VALUE ...]

Needs a GPU. The draft starts from the model's own sizes and LM head; +policy.draft.model_name=... starts from another.
At the end its weights are in draft.safetensors, as inference engines read them.
"""

import logging
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megasetup import handle_model_import, validate_model_paths
from megasetup.config.load import load_config
from megasetup.config.runtime import validate_and_set_config
from megasetup.model.distributed import destroy_parallel_state, setup_distributed
from megasetup.model.draft import capture_hidden_states, export_draft
from megasetup.model.training import setup_model_and_optimizer


def main(config_file, *overrides):
    draft = "+policy.draft={enabled: true, loss_weight: 0.5}"
    policy = load_config(config_file, (draft, *overrides)).config["policy"]
    setup_distributed(policy)
    name, pretrained, exists = validate_model_paths(policy)
    handle_model_import(policy, name, pretrained, exists)
    runtime = validate_and_set_config(policy, dist.get_rank(), name, pretrained, None, None)
    made = setup_model_and_optimizer(policy, runtime.megatron_cfg)
    random = torch.Generator().manual_seed(0)  # (the same tokens on every rank)
    rows = torch.randint(runtime.model_cfg.vocab_size, (2, policy["max_total_sequence_length"] + 1), generator=random)
    for step in range(policy["megatron_cfg"]["train_iters"]):
        losses = train_step(made, rows.cuda(), policy["draft"]["loss_weight"])
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[0]:.4f}, the draft's {losses[1]:.4f}")
    exported = export_draft(made.draft_model)  # (on every rank: each has a part)
    if dist.get_rank() == 0:
        save_file({name: tensor.cpu().contiguous() for name, tensor in exported.items()}, "draft.safetensors")
        print(f"draft.safetensors holds {len(exported)} tensors")
    destroy_parallel_state(made.state)


def train_step(made, rows, weight):
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    draft = made.draft_model

    def forward_step(pieces, model):
        rows = next(pieces)
        positions = torch.arange(rows.shape[1] - 1, device="cuda").expand(len(rows), -1)
        with capture_hidden_states(model, draft.architecture.aux_layers) as captured:
            losses = model(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous())
        # At position t the draft reads the policy's hidden state and token t + 1, and proposes token t + 2.
        logits = draft(captured.hidden_states(), captured.next_embeddings()).logits[:-1]
        drafted = vocab_parallel_cross_entropy(logits.float().contiguous(), rows[:, 2:].T.contiguous()).mean()

        def loss_function(losses):
            # The sum and the number of tokens: Megatron divides the gradients by the tokens of all ranks together.
            tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
            loss = losses.float().mean()
            total = (loss + weight * drafted) * tokens
            return total, tokens, {"losses": torch.stack((loss, drafted)).detach()}

        return losses, loss_function

    made.model.zero_grad_buffer()
    made.optimizer.zero_grad()
    results = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(rows.split(1)), model=made.model, forward_only=False,
        num_microbatches=len(rows), seq_length=rows.shape[1] - 1, micro_batch_size=1,
    )  # fmt: skip
    made.optimizer.step()
    made.scheduler.step(increment=len(rows))
    return torch.stack([result["losses"] for result in results]).mean(0).tolist()


if __name__ == "__main__":  # (Megatron starts a process of its own while it saves, and that imports this file)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megasetup").setLevel(logging.INFO)
    main(*sys.argv[1:])
