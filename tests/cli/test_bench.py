"""The benchmarks run end to end on small shapes, check what they copied, and write what they measured."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from megasetup.cli import shapes
from megasetup.cli.app import app
from megasetup.cli.bench import expert_bias, host, pinning, ranks, sync
from megasetup.cli.bench.workload import PRECISION_AWARE, STANDARD, Buffers, Workload, check_memory, cut, flat_elements
from megasetup.cli.console import steps
from megasetup.cli.errors import CommandError
from megasetup.cli.output import check_writable

CPU = torch.device("cpu")


def test_sync_writes_json_and_a_png(megasetup, tmp_path):
    done = megasetup(
        *("bench", "sync", "--shapes", "tiny", "--device", "cpu", "--repeat", 3, "--baseline-repeat", 2),
        *("--threads", "2,1", "--json", "sync.json", "--plot", "sync.png"),
    )
    assert "per tensor" in done.stdout
    assert done.stdout.count("exact") == 6
    assert (tmp_path / "sync.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    data = json.loads((tmp_path / "sync.json").read_text())
    assert data["benchmark"] == "sync"
    assert data["environment"]["command"].startswith("megasetup bench sync --shapes tiny")
    assert data["environment"]["versions"]["torch"]
    tiny = shapes.named("tiny")
    assert [result["mode"] for result in data["results"]] == [STANDARD, PRECISION_AWARE]
    for result, levels in zip(data["results"], ([1, 2], [2, 3]), strict=True):
        assert (result["tensors"], result["parameters"]) == (len(tiny.tensors), tiny.parameters)
        assert result["levels"] == levels
        assert list(result["per_tensor"]["seconds_by_level"]) == [str(level) for level in levels]
        assert len(result["per_tensor"]["seconds"]) == 2
        assert [way["threads"] for way in result["plan"]] == [2, 1]
        assert result["verified"]
        assert result["audit"]["ok"]
        assert set(result["wrong"]) >= {"per-tensor", "plan, 2 threads", "plan, 1 threads"}
        for way in result["plan"]:
            assert len(way["seconds"]) == 3
            assert way["report"]["elements"] == tiny.parameters
            assert math.isclose(way["elements_per_second"] * way["median_seconds"], tiny.parameters)
            ratio = result["per_tensor"]["median_seconds"] / way["median_seconds"]
            assert math.isclose(way["times_faster_than_per_tensor"], ratio)
            assert way["share_of_bf16_limit"] is None  # there is no wire between CPU and CPU
    assert data["results"][0]["level_1_alone"]["bytes_per_second"] > 0
    assert data["results"][1]["level_1_alone"] is None


def test_levels_of_the_per_tensor_path_add_up_to_its_time():
    # Each level's own median, 2 and 2, would be 4 in all: less than the total of any run.
    runs = [{1: 1.0, 2: 4.0}, {1: 2.0, 2: 4.0}, {1: 5.0, 2: 2.0}]
    odd = sync._per_tensor_result(runs, [sum(run.values()) for run in runs], 10)
    assert odd["median_seconds"] == 6.0
    assert odd["median_run_seconds_by_level"] == {"1": 2.0, "2": 4.0}
    runs = [{1: 3.0, 2: 1.0}, {1: 1.0, 2: 5.0}]
    even = sync._per_tensor_result(runs, [sum(run.values()) for run in runs], 10)
    assert even["median_seconds"] == 5.0
    assert even["median_run_seconds_by_level"] == {"1": 2.0, "2": 3.0}


def test_sync_of_a_checkpoint_folder_uses_its_values(tmp_path):
    values = {"a": torch.randn(70, 3).bfloat16(), "b": torch.randn(100)}
    save_file(values, tmp_path / "model.safetensors")
    found = shapes.of_safetensors(tmp_path)
    options = sync.Options([found], tmp_path, [STANDARD], None, [], 1, 1, CPU)
    with steps(options.steps) as progress:
        (result,) = sync.measure(options, progress)["results"]
    assert result["verified"]
    assert result["parameters"] == 310

    buffers = Buffers(flat_elements(found), STANDARD, CPU)
    workload = Workload.build(found, buffers)
    sync.load_safetensors(tmp_path, workload)
    for (name, _), source in zip(found.tensors, workload.sources, strict=True):
        assert torch.equal(source, values[name].bfloat16())


def test_many_sets_are_compared_with_the_first():
    sets = [shapes.named("tiny"), shapes.named("tiny", 0.5)]
    options = sync.Options(sets, None, [PRECISION_AWARE], None, [], 1, 0, CPU)
    with steps(options.steps) as progress:
        first, second = sync.measure(options, progress)["results"]
    assert first["throughput_relative_to_first_shapes"] == 1.0
    ratio = second["plan"][0]["elements_per_second"] / first["plan"][0]["elements_per_second"]
    assert second["throughput_relative_to_first_shapes"] == ratio
    assert first["per_tensor"] is None


def test_chosen_levels_alone_are_written():
    options = sync.Options([shapes.named("tiny")], None, [STANDARD], [1], [], 1, 1, CPU)
    with steps(options.steps) as progress:
        (result,) = sync.measure(options, progress)["results"]
    assert result["levels"] == [1]
    assert [level["level"] for level in result["plan"][0]["report"]["levels"]] == [1]


def test_a_wrong_copy_is_named():
    tiny = shapes.named("tiny")
    buffers = Buffers(flat_elements(tiny), STANDARD, CPU)
    workload = Workload.build(tiny, buffers)
    for level in (1, 2):
        for target, source in zip(workload.target(level), workload.sources, strict=True):
            target.copy_(source)
    assert workload.wrong([1, 2]) == []
    workload.clones[5].view(-1)[7] += 1
    assert workload.wrong([1, 2]) == [f"{tiny.tensors[5][0]} (level 2)"]
    workload.poison([1])
    assert len(workload.wrong([1])) == len(tiny.tensors)
    assert workload.wrong([2]) == [f"{tiny.tensors[5][0]} (level 2)"]


def test_tensors_start_at_64_element_boundaries():
    found = shapes.Shapes("odd", (("a", (3,)), ("b", (64,)), ("c", (65,)), ("d", (1,))))
    flat = torch.empty(flat_elements(found))
    assert len(flat) == 64 + 64 + 128 + 64
    starts = [(view.data_ptr() - flat.data_ptr()) // 4 for view in cut(flat, found)]
    assert starts == [0, 64, 128, 256]


def test_too_little_memory_is_said_with_the_scale_that_fits():
    with pytest.raises(CommandError, match=r"host memory.*--scale 0\.\d+"):
        check_memory(10**12, STANDARD, CPU)


def test_ranks_are_timed_alone_and_together():
    found = ranks.measure(ranks.Options(shapes.named("tiny"), STANDARD, 1, 2, "cpu", 2))
    assert [answer["rank"] for answer in found["ranks"]] == [0, 1]
    assert all(answer["threads"] == 1 for answer in found["ranks"])
    assert all(len(answer["alone_seconds"]) == len(answer["together_seconds"]) == 2 for answer in found["ranks"])
    assert found["verified"]
    best = max(answer["alone_elements_per_second"] for answer in found["ranks"])
    assert math.isclose(found["sum_over_one_alone"], found["median_sum_elements_per_second"] / best)
    written = sum(answer["host_write_bandwidth"] for answer in found["ranks"])
    assert math.isclose(found["share_of_host_writes"], found["median_sum_elements_per_second"] * 4 / written)


def test_a_failing_rank_is_reported_with_its_reason():
    with pytest.raises(CommandError, match="threads is 0"):
        ranks.measure(ranks.Options(shapes.named("tiny"), STANDARD, 0, 1, "cpu", 2))


def test_expert_bias(megasetup, tmp_path):
    done = megasetup("bench", "expert-bias", "--routers", 5, "--experts", 8, "--repeat", 10, "--json", "bias.json")
    assert "exact" in done.stdout
    data = json.loads((tmp_path / "bias.json").read_text())
    assert (data["routers"], data["experts"], data["device"]) == (5, 8, "cpu")
    assert len(data["one_to_each"]["seconds"]) == len(data["recast_buffers"]["seconds"]) == 10
    ratio = data["one_to_each"]["median_seconds"] / data["recast_buffers"]["median_seconds"]
    assert math.isclose(data["times_faster"], ratio)
    assert data["verified"]


def test_host(megasetup, tmp_path):
    megasetup("bench", "host", "--elements", "1e6", "--threads", "1,2", "--repeat", 2, "--json", "host.json")
    data = json.loads((tmp_path / "host.json").read_text())
    asked = [(result["function"], result["threads"]) for result in data["results"]]
    assert asked == [(name, threads) for threads in (1, 2) for name in ("widen", "narrow", "compare")]
    for widened in data["results"][::3]:
        rate = widened["megasetup"]["elements_per_second"]
        assert math.isclose(widened["share_of_host_writes"], rate * 4 / widened["host_write_bandwidth"])
    assert data["verified"]
    assert data["pinning"] == []


def test_shards_are_counted_as_the_largest_rank_has_them():
    found = shapes.Shapes("odd", (("a", (3, 5)), ("b", (16,)), ("c", (1,))))
    assert pinning.shard_elements(found, 8) == [2, 2, 1]
    assert pinning.shard_elements(found, 1) == [15, 16, 1]


def test_host_of_more_than_memory_holds():
    with steps(1) as progress, pytest.raises(CommandError, match="--elements"):
        host.measure(10**13, [1], 1, progress)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sync", "--shapes", "huge"], "'huge' are unknown: choose from qwen2.5-7b"),
        (["sync", "--mode", "odd"], "choose from standard, precision-aware, both"),
        (["sync", "--threads", "two"], "give whole numbers"),
        (["sync", "--threads", "0"], "at least 1"),
        (["sync", "--levels", "1", "--mode", "precision-aware"], "precision-aware mode has levels 2,3"),
        (["sync", "--safetensors", "nowhere"], "holds no *.safetensors file"),
        (["sync", "--device", "tpu9"], "is no device"),
        (["sync", "--ranks", "2", "--mode", "both"], "--ranks takes one named shape set, one mode"),
        (["sync", "--plot", "sync.svg"], "give a name that ends in .png"),
        (["sync", "--json", "/proc/sync.json"], "--json /proc/sync.json cannot be written: No such file or directory"),
        (["sync", "--plot", "/proc/sync.png"], "--plot /proc/sync.png cannot be written: No such file or directory"),
        (["host", "--json", "/nowhere/at/host.json"], "there is no folder /nowhere/at; make it"),
        (["expert-bias", "--json", "/proc"], "--json /proc is a folder"),
        (["step", "--json", "/proc/step.json"], "--json /proc/step.json cannot be written"),
    ],
)
def test_what_cannot_be_followed_is_one_message(arguments, message):
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert message in done.stderr


def test_finding_a_file_writable_changes_nothing(tmp_path):
    there, absent = tmp_path / "there.json", tmp_path / "absent.json"
    there.write_text("{}")
    (tmp_path / "link.json").symlink_to(absent)
    for file in (there, absent, tmp_path / "link.json"):
        check_writable("--json", file)
    assert there.read_text() == "{}"
    assert not absent.exists()
    assert (tmp_path / "link.json").is_symlink()
    with pytest.raises(CommandError, match="give the path of a file"):
        check_writable("--json", tmp_path)


def test_a_gpu_that_is_not_there_is_one_message(megasetup):
    done = megasetup("bench", "sync", "--device", "cuda", status=1)
    assert "see `megasetup doctor`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_sync_on_a_gpu_is_exact_and_knows_the_wire():
    device = torch.device("cuda", 0)
    options = sync.Options([shapes.named("tiny")], None, [STANDARD, PRECISION_AWARE], None, [2], 2, 1, device)
    with steps(options.steps) as progress:
        data = sync.measure(options, progress)
    assert data["limits"]["bf16_limit_elements_per_second"] > 1e8
    for result in data["results"]:
        assert result["verified"], result["wrong"]
        assert result["plan"][0]["share_of_bf16_limit"] > 0


@pytest.mark.gpu
def test_pinning_is_timed_and_counted():
    counts = pinning.shard_elements(shapes.named("qwen2.5-7b", 0.1), 8)
    found = pinning.measure(counts, torch.device("cuda", 0))
    needed = sum(counts) * 4
    assert (found["tensors"], found["needed_bytes"]) == (len(counts), needed)
    assert len(found["torch"]["seconds"]) == len(found["arena"]["seconds"]) == 2
    assert needed <= found["arena"]["pinned_bytes"] < 1.01 * needed
    # torch rounds each tensor up to a power of two.
    rounded = sum(1 << (count * 4 - 1).bit_length() for count in counts)
    assert rounded <= found["torch"]["pinned_bytes"] < 1.05 * rounded


@pytest.mark.gpu
def test_expert_bias_on_a_gpu():
    assert expert_bias.measure(60, 256, 5, torch.device("cuda", 0))["verified"]


@pytest.mark.multigpu
def test_ranks_on_two_gpus():
    assert ranks.measure(ranks.Options(shapes.named("tiny"), STANDARD, None, 2, "cuda", 2))["verified"]
