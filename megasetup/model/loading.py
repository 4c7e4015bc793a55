"""The load of a setup: which checkpoint, what of it, and whether the optimizer's state was restored."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from megasetup.compat.optimizer_state import loading_state_of_torch_adam
from megasetup.model import bridge
from megasetup.model.stages import Stages

_logger = logging.getLogger("megasetup")


def load(
    stages: Stages,
    state: Any,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    context: dict[str, Any],
    before: Callable[[list[Any]], object] | None,
    beside: list[str],
) -> bool:
    """Load a checkpoint, as a stage of its own: the one to resume if there is one, else the pretrained one's weights.

    Args:
        stages: the setup's stages, whose report is told where the weights came from.
        state: the GlobalState.
        chunks: the model's chunks, wrapped.
        optimizer: Megatron's optimizer, or None.
        scheduler: its schedule, or None.
        context: what Bridge's load and save functions share.
        before: called with the chunks before anything is loaded.
        beside: what hooks have put beside the base model; they have loaded its weights then, unless this is a resume.

    Returns:
        Whether optimizer state was restored.

    Raises:
        FileNotFoundError: there is no checkpoint.
        NotImplementedError: the optimizer's state cannot be loaded on this machine.
    """
    cfg = state.cfg
    settings = cfg.checkpoint
    remedy = (
        "check that every node sees the folder and that it is complete; a checkpoint of an older Megatron-Bridge must "
        "be converted anew, and optimizer state needs the optimizer settings that it was saved with"
    )
    with stages.stage("load", remedy) as stage:
        resumes = bridge.is_checkpoint(settings.load)
        if not resumes and not bridge.is_checkpoint(settings.pretrained_checkpoint):
            raise FileNotFoundError(
                f"there is no checkpoint to load: neither in checkpoint.load ({settings.load}) nor in "
                f"checkpoint.pretrained_checkpoint ({settings.pretrained_checkpoint}). Convert the model first "
                "(handle_model_import), or pass load_weights=False"
            )
        if beside and not resumes:
            stages.report.weights = f"base model {settings.pretrained_checkpoint}, {', '.join(beside)}"
            return False
        if before is not None:
            before(chunks)
        if resumes and settings.load_optim and optimizer is not None:
            if bridge.saved_optimizer(settings.load):
                layers = getattr(cfg.model, "transformer_impl", "transformer_engine")
                bridge.check_order_of_state(settings.load, layers)
            else:
                _logger.warning(
                    "%s was saved without optimizer state: only the weights are resumed, and the optimizer starts "
                    "afresh",
                    settings.load,
                )
                settings.load_optim = False
        finetune = settings.finetune
        with (
            _noting_state_loads(optimizer) as restored,
            loading_state_of_torch_adam(optimizer, restored)
            if resumes and settings.load_optim
            else contextlib.nullcontext(),
            bridge.economical_state_loading(optimizer),
        ):
            stage.bytes = bridge.load_checkpoint(state, chunks, optimizer, scheduler, context)
        settings.finetune = finetune  # (Bridge sets it when it falls back on the pretrained checkpoint)
        where = settings.load if resumes else f"pretrained, {settings.pretrained_checkpoint}"
        stages.report.weights = f"{where}{', with optimizer state' if restored else ''}"
    return bool(restored)


@contextlib.contextmanager
def _noting_state_loads(optimizer: Any) -> Iterator[list[bool]]:
    """A list that gets an entry when the optimizer's state is loaded.

    Whether Bridge loads it hangs on the config, on the checkpoint's own settings and on its kind, so it is watched
    rather than foretold.
    """
    restored: list[bool] = []
    if optimizer is None:
        yield restored
        return
    load_state_dict = optimizer.load_state_dict

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = load_state_dict(*args, **kwargs)
        restored.append(True)
        return result

    optimizer.load_state_dict = noted
    try:
        yield restored
    finally:
        del optimizer.load_state_dict
