"""What each environment variable becomes, and that the documentation's table is the code's."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megasetup.config import environment
from megasetup.config.environment import (
    VARIABLES,
    clear_attention_environment,
    configure_hybridep_environment,
    configure_refit_environment,
    configure_rendezvous_environment,
    first_slurm_host,
)

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[007-010]",
    "SLURM_JOB_ID": "1234567",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None of the variables is set before a test, and those of before are back after it."""
    before = dict(os.environ)
    for name in [*(variable.name for variable in VARIABLES), *SLURM, "SLURM_NODELIST"]:
        monkeypatch.delenv(name, raising=False)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def generation(backend: str, *, colocated: bool) -> dict[str, object]:
    return {"generation": {"backend": backend, "colocated": {"enabled": colocated}}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"generation": None}, None),
        (generation("vllm", colocated=True), None),
        (generation("vllm", colocated=False), "1"),
        (generation("megatron", colocated=False), "1"),
        (generation("sglang", colocated=False), "0"),
        (generation("sglang", colocated=True), None),
    ],
)
def test_refit(config: dict[str, object], expected: str | None) -> None:
    configure_refit_environment(config)
    assert os.environ.get("NCCL_CUMEM_ENABLE") == expected


def test_refit_replaces_a_contrary_setting_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        configure_refit_environment(generation("sglang", colocated=False))
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"
    assert "NCCL_CUMEM_ENABLE=1 is replaced by 0" in caplog.text


@pytest.mark.parametrize("config", [{}, generation("sglang", colocated=True)])
def test_refit_keeps_a_setting_where_it_needs_none(monkeypatch: pytest.MonkeyPatch, config: dict[str, object]) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "2")
    configure_refit_environment(config)
    assert os.environ["NCCL_CUMEM_ENABLE"] == "2"


def test_refit_needs_to_know_whether_generation_is_colocated() -> None:
    with pytest.raises(KeyError, match=r"policy\.generation\.colocated\.enabled is missing"):
        configure_refit_environment({"generation": {"backend": "vllm"}})


def test_attention_switches_are_removed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    with caplog.at_level(logging.INFO, logger="megasetup"):
        assert clear_attention_environment() == {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"}
    assert not {"NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"} & os.environ.keys()
    assert "NVTE_FLASH_ATTN=0 removed" in caplog.text
    assert clear_attention_environment() == {}


@pytest.mark.parametrize(("size", "ranks", "mnnvl"), [(1, "1", "0"), (4, "4", "0"), (8, "8", "1"), (128, "64", "1")])
def test_hybridep_guesses_with_a_warning(size: int, ranks: str, mnnvl: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        configure_hybridep_environment(size)
    assert os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] == ranks
    assert os.environ["USE_MNNVL"] == mnnvl
    assert len(caplog.records) == 2


def test_hybridep_keeps_the_environment_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "32")
    monkeypatch.setenv("USE_MNNVL", "0")
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        configure_hybridep_environment(64)
    assert os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] == "32"
    assert os.environ["USE_MNNVL"] == "0"
    assert not caplog.records


def test_hybridep_config_wins(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "32")
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        configure_hybridep_environment(64, ranks_per_nvlink_domain=8, use_mnnvl=False)
    assert os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] == "8"
    assert os.environ["USE_MNNVL"] == "0"
    assert not caplog.records


def rendezvous() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in RENDEZVOUS}


def test_a_process_that_nothing_launched_is_a_world_of_its_own() -> None:
    configure_rendezvous_environment()
    found = rendezvous()
    port = found.pop("MASTER_PORT")
    assert port is not None
    assert 1024 <= int(port) < 65536
    assert found == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    configure_rendezvous_environment()
    assert rendezvous() == {
        "RANK": "5",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "19567",
    }


def test_a_launcher_inside_a_slurm_job_is_not_mixed_with_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    for name, value in (SLURM | own).items():
        monkeypatch.setenv(name, value)
    configure_rendezvous_environment()
    assert rendezvous() == own | {"LOCAL_RANK": None}


def test_half_a_launcher_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError, match=r"set RANK=1, WORLD_SIZE=4 and not MASTER_ADDR, MASTER_PORT: start the"):
        configure_rendezvous_environment()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-005,9],other", "node003"),
        ("node[7,9]", "node7"),
        ("r1-n[01-02].cluster", "r1-n01.cluster"),
        ("login-3.example.org", "login-3.example.org"),
    ],
)
def test_first_slurm_host(nodelist: str, host: str) -> None:
    assert first_slurm_host(nodelist) == host


def test_no_slurm_host() -> None:
    with pytest.raises(RuntimeError, match="names no host"):
        first_slurm_host(",")


def test_only_variables_of_the_table_can_be_set() -> None:
    with pytest.raises(KeyError, match="OTHER is not in the table"):
        environment._set("OTHER", "1", "no reason")
    assert "OTHER" not in os.environ


def test_the_documentation_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    assert rows == [[f"`{name}`", when, value, own] for name, when, value, own in VARIABLES]


def test_what_is_set_inside_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    monkeypatch.delenv("USE_MNNVL", raising=False)
    with environment.environment_restored():
        environment.clear_attention_environment()
        environment.configure_hybridep_environment(8, use_mnnvl=True)
        assert os.environ["USE_MNNVL"] == "1"
    assert os.environ["NVTE_FLASH_ATTN"] == "1"
    assert "USE_MNNVL" not in os.environ


def test_no_other_file_sets_a_variable() -> None:
    writes = re.compile(r"environ\[[^\]]+\][^=\n]*=(?!=)|environ\.(setdefault|pop|update)|putenv\(")
    package = Path(environment.__file__).parents[1]
    writers = {file.name for file in package.rglob("*.py") if writes.search(file.read_text())}
    # (a benchmark's ranks are processes of their own, and the demo has a cache folder of its own while it runs)
    assert writers == {"environment.py", "ranks.py", "imported.py"}
