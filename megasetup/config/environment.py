"""Every environment variable that megasetup sets, in one table, and the functions that set them.

Environment variables reach further than an argument does: NCCL, Transformer Engine and torch read them once, in this
process and in its children, and a reader of a log cannot see where one came from. So no other file of the package
writes one, each change is logged, and what becomes of a setting that the user already made is part of the table.
docs/environment.md shows it to users, and a test keeps the two alike.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from megasetup.config.errors import MISSING, ConfigKeyError, config_error

_logger = logging.getLogger("megasetup")


class Variable(NamedTuple):
    """One variable that megasetup sets.

    Attributes:
        name: its name.
        when: which setting or call makes megasetup set it.
        value: what it is set to.
        own_setting: what happens to a value that the user has set.
    """

    name: str
    when: str
    value: str
    own_setting: str


_RENDEZVOUS = "setup_distributed, when the launcher did not set it"
_KEPT = "kept"

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "NCCL_CUMEM_ENABLE",
        "policy.generation is given and its colocated.enabled is false",
        "0 for the sglang backend, 1 for others: both ends of the weight transfer must allocate alike",
        "replaced, with a warning; kept in every other case",
    ),
    Variable(
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
        "the flex dispatcher's backend is hybridep",
        "the config's value; without one min(expert_model_parallel_size, 64), with a warning",
        "kept when the config has no value, else replaced",
    ),
    Variable(
        "USE_MNNVL",
        "the flex dispatcher's backend is hybridep",
        "the config's value as 1 or 0; without one 1 when expert_model_parallel_size is above 4, with a warning",
        "kept when the config has no value, else replaced",
    ),
    Variable(
        "NVTE_FUSED_ATTN",
        "policy.megatron_cfg.attention_backend is given",
        "removed: Megatron sets it from the attention backend",
        "removed, which is logged",
    ),
    Variable(
        "NVTE_FLASH_ATTN",
        "policy.megatron_cfg.attention_backend is given",
        "removed: Megatron sets it from the attention backend",
        "removed, which is logged",
    ),
    Variable(
        "NVTE_UNFUSED_ATTN",
        "policy.megatron_cfg.attention_backend is given",
        "removed: Megatron sets it from the attention backend",
        "removed, which is logged",
    ),
    Variable("RANK", _RENDEZVOUS, "SLURM_PROCID; 0 for a process that nothing launched", _KEPT),
    Variable("WORLD_SIZE", _RENDEZVOUS, "SLURM_NTASKS; 1 for a process that nothing launched", _KEPT),
    Variable("LOCAL_RANK", _RENDEZVOUS, "SLURM_LOCALID; 0 for a process that nothing launched", _KEPT),
    Variable("MASTER_ADDR", _RENDEZVOUS, "the first host of SLURM_JOB_NODELIST; 127.0.0.1 for one process", _KEPT),
    Variable(
        "MASTER_PORT",
        _RENDEZVOUS,
        "15000 plus the last four digits of SLURM_JOB_ID; a free port for one process",
        _KEPT,
    ),
)

_NAMES = frozenset(variable.name for variable in VARIABLES)
_ATTENTION = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN")


def _set(name: str, value: str, reason: str) -> None:
    if name not in _NAMES:
        raise KeyError(f"{name} is not in the table of environment variables: add it to VARIABLES first")
    before = os.environ.get(name)
    os.environ[name] = value
    if before != value:
        _logger.info("environment: %s=%s (was %s): %s", name, value, before if before is not None else "unset", reason)


@contextmanager
def environment_restored() -> Iterator[None]:
    """Put the variables of the table back to what they were before the block, whoever set them in it."""
    held = {name: os.environ.get(name) for name in _NAMES}
    try:
        yield
    finally:
        for name, value in held.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def configure_refit_environment(config: Mapping[str, Any]) -> None:
    """Set how NCCL allocates, before it reads it, where weights will travel to a generation engine elsewhere.

    NCCL_CUMEM_ENABLE becomes "0" for the sglang backend and "1" for others when generation is configured and not
    colocated. Otherwise the environment is left alone.

    Args:
        config: the policy config; `generation` is optional.

    Raises:
        ConfigKeyError: generation does not say whether it is colocated.
    """
    generation = config.get("generation")
    if generation is None:
        return
    colocated = generation.get("colocated")
    if colocated is None or "enabled" not in colocated:
        raise config_error(
            "policy.generation.colocated.enabled",
            MISSING,
            "must be true (generation shares these GPUs) or false (it has its own)",
            ConfigKeyError,
        )
    if colocated["enabled"]:
        return
    name, backend = "NCCL_CUMEM_ENABLE", generation.get("backend")
    wanted = "0" if backend == "sglang" else "1"
    own = os.environ.get(name)
    if own is not None and own != wanted:
        _logger.warning(
            "%s=%s is replaced by %s, which the weight transfer to generation backend %r needs",
            name,
            own,
            wanted,
            backend,
        )
    _set(name, wanted, f"generation is not colocated, backend {backend}")


def clear_attention_environment() -> dict[str, str]:
    """Remove NVTE_FUSED_ATTN, NVTE_FLASH_ATTN and NVTE_UNFUSED_ATTN, so that the config's attention_backend decides.

    Returns:
        What was removed, by name.
    """
    removed = {name: value for name in _ATTENTION if (value := os.environ.pop(name, None)) is not None}
    for name, value in removed.items():
        _logger.info("environment: %s=%s removed: attention_backend in the config decides", name, value)
    return removed


def configure_hybridep_environment(
    expert_model_parallel_size: int,
    *,
    ranks_per_nvlink_domain: int | None = None,
    use_mnnvl: bool | None = None,
) -> None:
    """Set what the HybridEP dispatcher reads from the environment: from the config, else as found, else by a guess.

    Args:
        expert_model_parallel_size: ranks that share out the experts.
        ranks_per_nvlink_domain: the config's value, None when it has none. The guess is
            min(expert_model_parallel_size, 64).
        use_mnnvl: the config's value, None when it has none. The guess is expert_model_parallel_size above 4.

    A guess is logged as a warning.
    """
    guesses = {
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": (
            None if ranks_per_nvlink_domain is None else str(ranks_per_nvlink_domain),
            str(min(expert_model_parallel_size, 64)),
        ),
        "USE_MNNVL": (
            None if use_mnnvl is None else str(int(use_mnnvl)),
            str(int(expert_model_parallel_size > 4)),
        ),
    }
    for name, (configured, guess) in guesses.items():
        if configured is not None:
            _set(name, configured, "from the config")
        elif name not in os.environ:
            _logger.warning(
                "HybridEP needs %s, which neither the config nor the environment gives: taking %s, from "
                "expert_model_parallel_size %d",
                name,
                guess,
                expert_model_parallel_size,
            )
            _set(name, guess, "a guess from expert_model_parallel_size")


def configure_rendezvous_environment() -> None:
    """Make sure that torch finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    What the launcher (torchrun, Ray, a script) has set is kept. What is missing comes from Slurm's variables where srun
    started this process; a process that nothing launched becomes a world of its own.

    Raises:
        RuntimeError: the launcher set some of these variables and not others, and nothing tells the rest.
    """
    environment = os.environ
    # A launcher of its own (torchrun, Ray) inside a Slurm job numbers its processes itself, so the two are not mixed.
    launched = "RANK" in environment or environment.get("WORLD_SIZE", "1") != "1"
    if not launched and "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
        found = _from_slurm()
        reason = "from Slurm"
    elif not launched:
        found = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        if "MASTER_PORT" not in environment:
            found["MASTER_PORT"] = str(_free_port())
        reason = "one process that nothing launched"
    else:
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in environment]
        if missing:
            given = ", ".join(f"{name}={environment[name]}" for name in needed if name in environment)
            raise RuntimeError(
                f"the launcher set {given or 'none of ' + ', '.join(needed)} and not {', '.join(missing)}: start the "
                "processes with torchrun or srun, or set all four"
            )
        return
    for name, value in found.items():
        if name not in environment:
            _set(name, value, reason)


def _from_slurm() -> dict[str, str]:
    found = {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_NTASKS"]}
    if "SLURM_LOCALID" in os.environ:
        found["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    hosts = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST")
    found["MASTER_ADDR"] = first_slurm_host(hosts) if hosts else "127.0.0.1"
    # The same on every task of a job, and different for jobs that share a host.
    found["MASTER_PORT"] = str(15_000 + int(re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", "0"))[-4:] or 0))
    return found


def first_slurm_host(nodelist: str) -> str:
    """The first host that a Slurm node list names: "node[003-005,9],other" gives "node003"."""
    match = re.match(r"\s*([^,\[\s]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[\s]*)", nodelist)
    if match is None:
        raise RuntimeError(f"SLURM_JOB_NODELIST is {nodelist!r}, which names no host: set MASTER_ADDR")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
