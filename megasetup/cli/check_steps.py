"""What a run of a config will do with its weights: convert or not, load from where, resume or refresh."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any


def steps_of_a_run(
    policy: Mapping[str, Any],
    hf_model_name: str,
    pretrained_path: str,
    exists: bool,
    weights_path: str | None,
    optimizer_path: str | None,
) -> list[str]:
    """What happens to the weights, in order, as sentences.

    Args:
        policy: the policy config.
        hf_model_name, pretrained_path, exists: what validate_model_paths says.
        weights_path, optimizer_path: of training checkpoints, None where the trainer gives none.

    Raises:
        ValueError: the file that names the latest training checkpoint holds something else.
    """
    from megasetup.checkpoint.paths import resolve_iter_dir_from_root
    from megasetup.config.fields import section

    megatron = section(policy, "megatron_cfg")
    kind = section(policy, "pretrained_checkpoint").get("format")
    if kind is not None:
        steps = [f"Nothing is converted: {kind} checkpoint {pretrained_path}."]
    elif exists and not megatron.get("force_reconvert_from_hf"):
        steps = [f"Nothing is converted: the converted checkpoint {pretrained_path} is there."]
    else:
        again = " again, because force_reconvert_from_hf is set" if exists else ""
        steps = [f"Convert {hf_model_name} from Hugging Face to {pretrained_path}{again}."]
    resumed = None
    if weights_path is not None:
        with contextlib.suppress(FileNotFoundError):
            resumed = resolve_iter_dir_from_root(weights_path, "")
    if resumed is None:
        steps.append(f"Load the weights from {pretrained_path}.")
        steps.append("Refresh every FP32 copy of the weights, because no optimizer state is loaded.")
        if weights_path is not None:
            steps.append(f"Save training checkpoints in {weights_path}, which holds none yet.")
    elif optimizer_path is None:
        steps.append(f"Resume the weights from {resumed}.")
        steps.append("Refresh every FP32 copy of the weights, because no optimizer state is loaded.")
    else:
        steps.append(f"Resume weights and optimizer state from {resumed}; the FP32 copies stay as they were saved.")
    return steps
