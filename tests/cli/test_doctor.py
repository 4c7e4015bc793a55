"""doctor tells the truth about this machine, and what to do about what is missing."""

import json
import os
from importlib import metadata

import pytest
import torch

from megasetup import kernels
from megasetup.cli import doctor


@pytest.fixture
def found(megasetup):
    return json.loads(megasetup("doctor", "--json").stdout)


def test_json_holds_this_machines_facts(found):
    status = kernels.native_status()
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["versions"]["megatron-core"] == metadata.version("megatron-core")
    assert found["versions"]["torch CUDA"] == torch.version.cuda
    assert found["kernels"]["cpu_instruction_set"] == status.cpu_instruction_set
    assert found["kernels"]["problems"] == []
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["threads"] == kernels.get_num_threads()
    assert 0 < found["memory"]["usable"] <= found["memory"]["available"] < found["memory"]["total"]


def test_without_a_gpu_it_says_so_and_succeeds(found, megasetup):
    assert found["gpus"] == []
    assert any("GPU" in line for line in found["what_to_do"])
    printed = megasetup("doctor").stdout
    assert "none that torch can use" in printed
    assert "What to do" in printed
    assert "right, for all 65,536 BF16 patterns" in printed
    assert "room for" in printed


def test_elements_of_an_offloaded_optimizer():
    assert doctor._offload({"usable": 24e9, "lock_limit": None}) == (
        "room for 2.00 B elements, 12 bytes each, 4 of them pinned"
    )
    assert doctor._offload({"usable": 24e9, "lock_limit": 8_000_000_000}).endswith("4 of them pinned")
    assert doctor._offload({"usable": 24e9, "lock_limit": 8_000_000}).endswith("where the driver counts, allows 2.0 M")


def test_local_ranks_and_threads_come_from_the_environment(megasetup, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    monkeypatch.setenv("MEGASETUP_NUM_THREADS", "abc")
    found = json.loads(megasetup("doctor", "--json").stdout)
    assert found["local_ranks"] == 64
    assert any("64 local ranks" in line for line in found["what_to_do"])
    assert any("MEGASETUP_NUM_THREADS is 'abc'" in line for line in found["what_to_do"])


@pytest.mark.parametrize("command", [("doctor",), ("bench", "expert-bias", "--device", "cpu")], ids=["doctor", "bench"])
def test_kernels_that_cannot_run_are_one_message(megasetup, monkeypatch, command):
    monkeypatch.setenv("MEGASETUP_CPU_ISA", "foo")
    done = megasetup(*command, status=1)
    assert done.stdout == ""
    assert done.stderr.startswith("Error: CPU kernels 'foo' cannot run here")
    assert "MEGASETUP_CPU_ISA" in done.stderr
    assert "Traceback" not in done.stderr


# A machine on which nothing is missing, as examine() would describe it.
_WIRE = {"device_to_host": 55.4e9, "host_to_device": 55.4e9}
_GPU = {
    "index": 0,
    "name": "x",
    "memory": 150e9,
    "numa_node": 0,
    "numa_cores": 8,
    "link_bandwidth": 63e9,
    "wire": _WIRE,
}
_GOOD = {
    "versions": dict.fromkeys(("megatron-core", "transformers", "safetensors", "matplotlib", "torch CUDA"), "1"),
    "kernels": {"cpu": True, "gpu": True, "why": "", "problems": []},
    "driver": "580",
    "gpus_of_driver": 1,
    "gpus": [_GPU],
    "cores": 16,
    "processor_quota": None,
    "local_ranks": 1,
    "threads": 8,
    "threads_setting": "6",
    "huge_pages": "madvise",
    "memory": {"total": 128e9, "container_limit": None, "lock_limit": None},
}


def test_nothing_to_do_where_nothing_is_missing():
    assert doctor.advise(_GOOD) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {**_GOOD["versions"], "megatron-core": None}}, "pip install megatron-core"),
        ({"versions": {**_GOOD["versions"], "matplotlib": None}}, "megasetup[plot]"),
        ({"versions": {**_GOOD["versions"], "transformers": None}}, "megasetup[demo]"),
        ({"kernels": {"cpu": False, "gpu": False, "why": "", "problems": []}}, "pip install ."),
        ({"kernels": {"cpu": True, "gpu": False, "why": "no nvcc", "problems": []}}, "no nvcc"),
        ({"kernels": {"cpu": True, "gpu": True, "why": "", "problems": ["wrong"]}}, "wrong: rebuild"),
        ({"gpus": []}, "CUDA_VISIBLE_DEVICES"),
        ({"gpus": [], "gpus_of_driver": 0}, "No GPU is usable"),
        ({"gpus": [{**_GPU, "wire": {**_WIRE, "host_to_device": 20e9}}]}, "20.0 GB/s of the 63"),
        ({"gpus": [{**_GPU, "wire": "not measured: out of memory"}]}, "out of memory"),
        ({"gpus": [{**_GPU, "numa_cores": 0}]}, "--cpunodebind=0"),
        ({"local_ranks": 16}, "16 local ranks"),
        ({"processor_quota": 1.5}, "1.5 cores for 1 local ranks"),
        (
            {"threads_setting": "abc"},
            "MEGASETUP_NUM_THREADS is 'abc', which is no whole number from 1 on, and 8 worker",
        ),
        ({"threads_setting": "0"}, "MEGASETUP_NUM_THREADS is '0'"),
        ({"huge_pages": "never"}, "transparent_hugepage"),
        ({"memory": {**_GOOD["memory"], "container_limit": 16e9}}, "16.0 GB of the machine's 128.0 GB"),
        ({"memory": {**_GOOD["memory"], "lock_limit": 8e6}}, "ulimit -l"),
    ],
)
def test_each_lack_has_its_remedy(change, said):
    (line,) = doctor.advise({**_GOOD, **change})
    assert said in line


@pytest.mark.parametrize(("problems", "healthy"), [([], True), (["a kernel gives wrong values"], False)])
def test_only_wrong_values_are_fatal(problems, healthy):
    assert doctor.healthy({"kernels": {"problems": problems}}) is healthy


@pytest.mark.gpu
def test_a_gpu_is_described_and_its_wire_measured():
    found = doctor.examine()
    gpu = found["gpus"][0]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert gpu["memory"] == torch.cuda.get_device_properties(0).total_memory
    assert all(1e9 < bandwidth < 1e12 for bandwidth in gpu["wire"].values())
    assert found["kernels"]["problems"] == []
    assert found["driver"]
