"""What real optimizers hold on one and two GPUs is what was planned, to the byte where no allocator rounds."""

import json
from pathlib import Path

import pytest
from launch import launch
from planning.architectures import SMALL, SMALL_MOE, configs, provider_of, write

from megasetup.planning import plan_run

_WORKER = Path(__file__).with_name("real_worker.py")
_EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
_TENSOR = {"tensor_model_parallel_size": 2}
# name: architecture, provider's fields, offload fraction, precision-aware
_ANYWHERE = {
    "all offloaded": (SMALL, {}, 1.0, False),
    "half offloaded": (SMALL, {}, 0.5, False),
    "a tenth offloaded, precision-aware": (SMALL, {}, 0.1, True),
    "nothing offloaded": (SMALL, {}, None, False),
    "MoE, a third offloaded": (SMALL_MOE, {"expert_tensor_parallel_size": 1}, 0.3, False),
}
_ON_TWO = {
    "experts on two ranks": (SMALL_MOE, _EXPERTS, 0.6, False),
    "experts and tensors on two ranks": (SMALL_MOE, {**_EXPERTS, **_TENSOR}, 0.4, True),
    "tensors on two ranks": (SMALL, _TENSOR, 0.5, False),
}


def _compare(tmp_path, cases, world):
    arguments = [
        [name, str(write(tmp_path / str(index), settings)), fields, fraction, aware]
        for index, (name, (settings, fields, fraction, aware)) in enumerate(cases.items())
    ]
    ended = launch(_WORKER, world, json.dumps(arguments), timeout=240)
    for name, folder, fields, fraction, aware in arguments:
        provider = provider_of(Path(folder), **fields)
        plan = plan_run(provider, *configs(fraction, aware=aware), gpus=world)
        for rank, (status, output) in zip(plan.ranks, ended, strict=True):
            assert status == 0, output
            (line,) = [line for line in output.splitlines() if line.startswith("HELD ")]
            real = json.loads(line.removeprefix("HELD "))[name]
            planned = dict.fromkeys(real, 0) | {item.name: item.bytes for item in rank.items if item.name in real}
            assert planned["clones"] == real["clones"], name
            for item in ("weights", "gradients"):  # each of a few buffers, in blocks of 512 bytes
                assert 0 <= planned[item] - real[item] < 4 * 512, (name, item)
            for item in ("FP32 shards", "FP32 working copies"):  # each of some dozens of tensors
                assert 0 <= planned[item] - real[item] < 64 * 512, (name, item)
                assert (planned[item] == 0) == (real[item] == 0), (name, item)


@pytest.mark.gpu
def test_one_gpu(tmp_path):
    _compare(tmp_path, _ANYWHERE, 1)


@pytest.mark.multigpu
def test_two_gpus(tmp_path):
    _compare(tmp_path, {**_ANYWHERE, **_ON_TWO}, 2)
