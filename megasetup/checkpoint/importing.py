"""A Megatron checkpoint from a Hugging Face model: made once, whole or not at all, whoever asks and however often.

Each conversion builds its checkpoint beside the place and moves it there when it is whole, so a run that is killed
leaves nothing that looks finished. Processes that share a folder agree through a lock on who converts. The ranks of one
process group convert together with the sizes of the config; where their machines do not share the folder, one rank of
each machine converts for it, in a process of its own, because a process group cannot be two at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasetup.checkpoint import nodes
from megasetup.checkpoint.converting import Conversion, convert
from megasetup.checkpoint.locks import FileLock
from megasetup.checkpoint.marks import MARK, what_is_missing, write_mark
from megasetup.checkpoint.progress import LOG_EVERY_SECONDS
from megasetup.checkpoint.settings import ALONE
from megasetup.checkpoint.worlds import lone_world
from megasetup.config.fields import section

_logger = logging.getLogger("megasetup")

_RETRY_SECONDS = 0.2
_ABANDONED_SECONDS = 3600.0


def handle_model_import(
    config: Mapping[str, Any],
    hf_model_name: str,
    pretrained_path: str,
    pt_checkpoint_exists: bool,
    model_post_wrap_hook: Callable[[Any], Any] | None = None,
    transformer_layer_spec: Any | None = None,
    mamba_stack_spec: Any | None = None,
) -> None:
    """Convert the Hugging Face model that a config starts from, unless a checkpoint is there.

    Nothing is done for a pretrained_checkpoint, which needs no conversion, and for a checkpoint that exists, unless
    policy.megatron_cfg.force_reconvert_from_hf is set. Where there is a process group, every rank calls this.

    Args:
        config: the policy config: pretrained_checkpoint, hf_config_overrides and megatron_cfg are read.
        hf_model_name: a Hugging Face id, or a folder as save_pretrained makes it.
        pretrained_path: the folder to put the checkpoint in, as validate_model_paths gives it.
        pt_checkpoint_exists: whether it is there, as validate_model_paths says.
        model_post_wrap_hook: called with each chunk of the model when its weights are loaded.
        transformer_layer_spec: a ModuleSpec, or a callable that returns one, in place of the provider's.
        mamba_stack_spec: the same for the layer stack of Mamba and hybrid models.

    Raises:
        ValueError: Megatron-Bridge does not know the model, or it needs code that may not run: code of a model runs
            only when policy.megatron_cfg.trust_remote_code is true.
        OSError: there is no such model, or the folder cannot be written.
        RuntimeError: the ranks do not fit the sizes, or a machine does not see the result.
    """
    if section(config, "pretrained_checkpoint"):
        return
    megatron = section(config, "megatron_cfg")
    force = bool(megatron.get("force_reconvert_from_hf"))
    if pt_checkpoint_exists and not force:
        _logger.info("the converted checkpoint %s is there", pretrained_path)
        return
    import_model_from_hf(
        hf_model_name,
        pretrained_path,
        megatron_cfg=megatron,
        hf_config_overrides=section(config, "hf_config_overrides"),
        trust_remote_code=bool(megatron.get("trust_remote_code")),
        force=force,
        model_post_wrap_hook=model_post_wrap_hook,
        transformer_layer_spec=transformer_layer_spec,
        hybrid_stack_spec=mamba_stack_spec,
    )


def import_model_from_hf(
    hf_model_name: str,
    output_path: str | os.PathLike[str],
    *,
    megatron_cfg: Mapping[str, Any] | None = None,
    hf_config_overrides: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    model_post_wrap_hook: Callable[[Any], Any] | None = None,
    transformer_layer_spec: Any | None = None,
    hybrid_stack_spec: Any | None = None,
) -> bool:
    """Convert a Hugging Face model to a Megatron checkpoint, unless another process did or does it.

    With a process group its ranks convert together and all call this; NCCL ranks on their GPUs with Transformer
    Engine's layers, gloo ranks on the CPU. Without one this process converts alone, on the CPU, and touches no GPU.

    Args:
        hf_model_name: a Hugging Face id, or a folder as save_pretrained makes it.
        output_path: the folder to put the checkpoint in.
        megatron_cfg: parallel sizes and stage layer counts, as in policy.megatron_cfg. A process alone needs none.
        hf_config_overrides: fields of the Hugging Face config to change.
        trust_remote_code: whether code that comes with the model may run.
        force: convert though a checkpoint is there. Processes that do so at the same time convert once.
        model_post_wrap_hook: called with each chunk of the model when its weights are loaded.
        transformer_layer_spec: a ModuleSpec, or a callable that returns one, in place of the provider's.
        hybrid_stack_spec: the same for the layer stack of Mamba and hybrid models.

    Returns:
        Whether this call converted; False where the checkpoint was there, or another process made it meanwhile.

    Raises:
        ValueError: Megatron-Bridge does not know the model, it needs code that may not run, or the provider lacks what
            is to be overridden.
        OSError: there is no such model, or the folder cannot be written.
        RuntimeError: Megatron's parallel state is up, the ranks do not fit the sizes, or a machine does not see the
            result.
    """
    settings = megatron_cfg or {}
    conversion = Conversion(
        hf_model_name=hf_model_name,
        sizes={name: settings[name] for name in ALONE if name in settings},
        overrides=dict(hf_config_overrides or {}),
        trust_remote_code=trust_remote_code,
        model_post_wrap_hook=model_post_wrap_hook,
        transformer_layer_spec=transformer_layer_spec,
        hybrid_stack_spec=hybrid_stack_spec,
    )
    target = Path(os.path.abspath(output_path))
    if not dist.is_initialized():
        return import_alone(conversion, target, force=force)
    if nodes.all_see(target.parent):
        return _import_together(conversion, target, force=force)
    return nodes.import_on_each(conversion, target, force=force)


def import_alone(conversion: Conversion, target: Path, *, force: bool) -> bool:
    """Convert in this process, or wait for the process that does. Returns whether this one converted."""
    found = _identity(target)
    lock = _lock(target)
    with contextlib.closing(_Waiting(lock)) as waiting:
        while not lock.try_acquire():
            waiting.again()
    try:
        if _need_not(target, force, found):
            return False
        with _building(target) as folder, lone_world():
            convert(conversion, folder, target)
            _put_in_place(conversion, folder, target)
        return True
    finally:
        lock.release()


def _import_together(conversion: Conversion, target: Path, *, force: bool) -> bool:
    """The same for all ranks of the default process group, on a folder that they share."""
    first = dist.get_rank() == 0
    found = _identity(target)
    lock = _lock(target)
    with contextlib.closing(_Waiting(lock)) as waiting:
        # Short rounds: a rank that waited for long in one broadcast would look hung to the process group.
        while not nodes.from_first(lambda: lock.try_acquire()):
            waiting.again()
    try:
        if nodes.from_first(lambda: _need_not(target, force, found)):
            return False
        with contextlib.ExitStack() as stack:
            folder = Path(nodes.from_first(lambda: str(stack.enter_context(_building(target)))))
            convert(conversion, folder, target)
            nodes.from_first(lambda: _put_in_place(conversion, folder, target))
        nodes.check_all_see(target)
        return True
    finally:
        if first:
            lock.release()


class _Waiting:
    """Says every few seconds that another process is being waited for."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = lock
        self._started = time.monotonic()
        self._next = 0.0

    def again(self) -> None:
        waited = time.monotonic() - self._started
        if waited >= self._next and not (dist.is_initialized() and dist.get_rank()):
            _logger.info(
                "%s converts this model (lock %s); waiting since %.0f s", self._lock.holder(), self._lock.path, waited
            )
            self._next = waited + LOG_EVERY_SECONDS
        time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        if self._next:
            _logger.info("waited %.1f s for another process", time.monotonic() - self._started)


def _lock(target: Path) -> FileLock:
    return FileLock(target.parent / f".{target.name}.lock")


def _identity(target: Path) -> str | None:
    """What tells one conversion at a place from the next: None where there is none of ours."""
    try:
        return str(json.loads((target / MARK).read_text())["identity"])
    except (OSError, ValueError, KeyError):
        return None


def _need_not(target: Path, force: bool, found: str | None) -> bool:
    """Whether the checkpoint is there: with `force`, whether another process has made it since this one asked."""
    missing = what_is_missing(target)
    if missing is None and (not force or _identity(target) != found):
        _logger.info("the converted checkpoint %s is there", target)
        return True
    if missing is not None and target.exists():
        _logger.warning("%s is not a whole checkpoint and will be replaced: %s", target, missing)
    return False


def _prefix(target: Path) -> str:
    return f".{target.name}.importing-"


@contextlib.contextmanager
def _building(target: Path) -> Iterator[Path]:
    """A fresh folder beside the target, gone afterwards unless it was moved into place."""
    _remove_abandoned(target)
    folder = target.parent / f"{_prefix(target)}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(target: Path) -> None:
    """Remove what conversions of this target left when they were killed.

    The lock is held, so none should be running. Where it does not reach other machines one may be, so what does not
    come from a dead process of this machine is left until nothing has been written to it for an hour.
    """
    here = f"{_prefix(target)}{socket.gethostname()}-"
    for folder in target.parent.glob(f"{_prefix(target)}*"):
        own = folder.name.removeprefix(here).split("-")[0] if folder.name.startswith(here) else ""
        if (own.isdigit() and not _alive(int(own))) or _age(folder) > _ABANDONED_SECONDS:
            _logger.info("removing %s, left by a conversion that was killed", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _age(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return time.time() - max(times)


def _put_in_place(conversion: Conversion, folder: Path, target: Path) -> None:
    """Mark the finished checkpoint and move it to its place, over what is there."""
    write_mark(
        folder,
        {
            "identity": uuid.uuid4().hex,
            "hf_model_name": conversion.hf_model_name,
            "hf_config_overrides": dict(conversion.overrides),
            "made_with": {name: _version(name) for name in ("megatron-bridge", "megatron-core", "transformers")},
        },
    )
    if target.exists():
        aside = target.parent / f"{_prefix(target)}{socket.gethostname()}-{os.getpid()}-replaced"
        os.rename(target, aside)
        os.rename(folder, target)
        shutil.rmtree(aside, ignore_errors=True)
        return
    try:
        os.rename(folder, target)
    except OSError:
        # Another process, which the lock did not reach, was faster: its checkpoint is as good.
        if what_is_missing(target) is not None:
            raise


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
