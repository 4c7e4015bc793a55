"""`megasetup import` and `megasetup export`: where things are, who converts, and errors as one message.

Megatron and Bridge print while they convert, and nothing of it answers the question that the command was asked. It is
held back; how far the conversion is stands on standard error, the answer on standard output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasetup.cli.configs import load, policy_of, quiet_libraries
from megasetup.cli.console import duration
from megasetup.cli.errors import CommandError

if TYPE_CHECKING:
    from rich.console import Console


def run_import(
    console: Console,
    model: str,
    *,
    out: Path | None,
    config: Path | None,
    trust_remote_code: bool,
    force: bool,
) -> None:
    """Convert a Hugging Face model; under torchrun or Slurm by all ranks together.

    Args:
        console: takes the answer.
        model: a Hugging Face id, or a folder as save_pretrained makes it.
        out: the folder to make; None for the cache folder in which a trainer looks for this model.
        config: a trainer's file, for parallel sizes, hf_config_overrides and trust_remote_code.
        trust_remote_code: whether code that comes with the model may run, also where the config says nothing.
        force: convert though a checkpoint is there.

    Raises:
        CommandError: anything that the user can mend.
    """
    with _as_messages():
        policy: Mapping[str, Any] = {} if config is None else policy_of(load(config, ()).config, config)
        megatron = policy.get("megatron_cfg") or {}
        overrides = policy.get("hf_config_overrides") or {}
        from megasetup.checkpoint.paths import cache_folder_name, get_checkpoint_dir

        target = out or Path(get_checkpoint_dir()) / cache_folder_name(model, overrides)
        started = time.monotonic()
        with _quietly(), _launched_ranks():
            from megasetup.checkpoint.importing import import_model_from_hf

            converted = import_model_from_hf(
                model,
                target,
                megatron_cfg=megatron,
                hf_config_overrides=overrides,
                trust_remote_code=trust_remote_code or bool(megatron.get("trust_remote_code")),
                force=force or bool(megatron.get("force_reconvert_from_hf")),
            )
    if os.environ.get("RANK", "0") == "0":
        done = f"converted in {duration(time.monotonic() - started)}" if converted else "was there already"
        console.print(f"{target}: {model}, {done}", soft_wrap=True, markup=False)


def run_export(console: Console, checkpoint: Path, *, out: Path, model: str | None, trust_remote_code: bool) -> None:
    """Write a Megatron-Bridge checkpoint as a Hugging Face folder.

    Args:
        console: takes the answer.
        checkpoint: an iteration's folder, or one that holds iterations, of which the latest is taken.
        out: the folder to make.
        model: the Hugging Face id or folder of the model's kind; None for the one it was converted from.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        CommandError: anything that the user can mend.
    """
    started = time.monotonic()
    with _as_messages(), _quietly():
        from megasetup.checkpoint.exporting import export_model_to_hf

        iteration = export_model_to_hf(checkpoint, out, hf_model_name=model, trust_remote_code=trust_remote_code)
    done = duration(time.monotonic() - started)
    console.print(f"{out}: {iteration.name} of {iteration.parent}, written in {done}", soft_wrap=True, markup=False)


@contextmanager
def _as_messages() -> Iterator[None]:
    try:
        yield
    except CommandError:
        raise
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        notes = [note.removeprefix("megasetup: ") for note in getattr(error, "__notes__", ())]
        raise CommandError("\n".join([str(error), *notes])) from error


@contextmanager
def _quietly() -> Iterator[None]:
    logger = logging.getLogger("megasetup")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with quiet_libraries(), Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def _launched_ranks() -> Iterator[None]:
    """The process group of the ranks that a launcher started, if it started several."""
    # (a shell within a Slurm allocation has SLURM_NTASKS too, and is no task of it)
    tasks = os.environ.get("SLURM_NTASKS", "1") if "SLURM_STEP_ID" in os.environ else "1"
    if int(os.environ.get("WORLD_SIZE") or tasks) < 2:
        yield
        return
    from megasetup.model.distributed import destroy_parallel_state, setup_distributed

    setup_distributed({})
    try:
        yield
    finally:
        destroy_parallel_state()
