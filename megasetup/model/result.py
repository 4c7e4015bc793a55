"""What a setup hands to the trainer."""

from __future__ import annotations

from typing import Any, NamedTuple

from megasetup.model.report import SetupReport


class ColocatedReshardPlan(NamedTuple):
    """What is needed to build the inference model of generation by Megatron on the training GPUs.

    There is one where generation has another layout or other layers than training; without, the training model
    generates itself.

    Attributes:
        initial_model_provider: the provider as it was before the training model was built from it; for
            build_inference_model.
    """

    initial_model_provider: Any


class _StateFields(NamedTuple):
    state: Any
    model: Any
    optimizer: Any
    scheduler: Any
    checkpointing_context: dict[str, Any]
    param_sync_func: Any
    draft_model: Any
    colocated_reshard_plan: ColocatedReshardPlan | None


class ModelAndOptimizerState(_StateFields):
    """What setup_model_and_optimizer made.

    Attributes:
        state: Megatron-Bridge's GlobalState.
        model: the wrapped model: one module, or a list of chunks where there are virtual pipeline stages.
        optimizer: Megatron's optimizer; None without one.
        scheduler: its schedule; None without an optimizer.
        checkpointing_context: what Bridge's load and save functions share.
        param_sync_func: what starts the gathering of parameters where that overlaps and is aligned (one function, or a
            list for several chunks), else None.
        draft_model: the draft on the ranks that have one (the last pipeline stage), else None.
        colocated_reshard_plan: for colocated generation by Megatron with a model of its own, else None.
        report: what the setup did, a SetupReport. Not one of the tuple's fields.
    """

    report: SetupReport
