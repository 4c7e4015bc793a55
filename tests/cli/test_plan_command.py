"""`megasetup plan` from a file to a verdict."""

import json
import os
from importlib import metadata

import pytest
import torch
from config_files import DENSE_PARAMETERS, write_checkpoint, write_config
from rich.console import Console
from typer.testing import CliRunner

from megasetup.cli import machine
from megasetup.cli import plan as command
from megasetup.cli.app import app
from megasetup.cli.errors import CommandError
from megasetup.planning import Limits, Rates, plan_policy


def _run(path, *overrides, **options):
    console = Console(record=True, width=132)
    plain = {
        "gpus": 1,
        "nodes": None,
        "gpu_memory": None,
        "host_memory": None,
        "measure": False,
        "json_file": path.parent / "plan.json",
    }
    fits = command.run(console, path, overrides, **{**plain, **options})
    return fits, json.loads((path.parent / "plan.json").read_text()), console.export_text()


def test_a_plan_on_the_command_line(tmp_path, megasetup):
    path = write_config(tmp_path)
    done = megasetup(
        "plan", path, "--gpus", 4, "policy.megatron_cfg.tensor_model_parallel_size=2", "--json", tmp_path / "out.json"
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["parameters"] == DENSE_PARAMETERS
    assert found["sizes"]["tensor"] == 2
    assert found["overrides"] == ["policy.megatron_cfg.tensor_model_parallel_size=2"]
    assert found["fits"] is True
    assert found["environment"]["versions"]["torch"] == metadata.version("torch")
    assert f"{DENSE_PARAMETERS:,}" in done.stdout
    assert "tensor 2, pipeline 1, context 1, data 2" in done.stdout
    assert "Not counted: activations" in " ".join(done.stdout.split())
    assert done.stderr == ""  # what other packages say stays out of it


@pytest.mark.parametrize(
    ("file", "said"), [("/proc/plan.json", "No such file or directory"), ("out/plan.json", "there is no folder")]
)
def test_json_that_cannot_be_written_is_said_before_planning(tmp_path, monkeypatch, file, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run", lambda *_, **__: pytest.fail("planned"))
    done = CliRunner().invoke(app, ["plan", "config.yaml", "--gpus", "8", "--json", file])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: --json {file} cannot be written: {said}")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_status_1(tmp_path, megasetup):
    path = write_config(tmp_path)
    done = megasetup("plan", path, "--gpus", 1, "--gpu-memory", 0.05, status=1)
    assert "NO: 0.1 GB of 50.0 MB, 51.4 MB too much" in done.stdout
    assert done.stderr == ""


def test_figures_of_one_rank(tmp_path):
    fits, found, printed = _run(write_config(tmp_path))
    items = {(item["name"], item["where"]): item["bytes"] for item in found["heaviest_rank"]["items"]}
    assert fits
    assert items["clones", "host, pinned"] == 4 * DENSE_PARAMETERS
    assert items["moments", "host"] == 8 * DENSE_PARAMETERS
    assert found["heaviest_rank"]["host_bytes"] == 16 * DENSE_PARAMETERS + (64 << 20)
    assert found["nodes"] == [found["heaviest_node"]]
    assert "standard, 100% offloaded" in printed
    assert "staging of the sync" in printed


def test_stages_and_experts(tmp_path):
    path = write_config(
        tmp_path,
        moe=True,
        megatron_cfg__pipeline_model_parallel_size=2,
        megatron_cfg__expert_model_parallel_size=2,
        megatron_cfg__moe_permute_fusion=True,
        megatron_cfg__fp8_cfg={"enabled": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": False},
    )
    _, found, printed = _run(path, gpus=8, nodes=2)
    assert [rank["stage"] for rank in found["heaviest_rank_of_each_stage"]] == [0, 1]
    assert [node["ranks"] for node in found["nodes"]] == [4, 4]
    assert "expert 2, tensor 1, data 2" in printed
    assert "Pipeline stages, each by its heaviest rank" in printed


def test_the_architecture_may_come_from_a_megatron_checkpoint(tmp_path):
    path = write_config(tmp_path)
    root = write_checkpoint(tmp_path / "given", tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    given = f"{{format: megatron_bridge, path: {root}}}"
    _, found, _ = _run(path, f"++policy.pretrained_checkpoint={given}")
    assert found["parameters"] == DENSE_PARAMETERS


def test_megatron_s_own_hybrid_optimizer_pins_more(tmp_path):
    path = write_config(tmp_path)
    ours = _run(path)[1]["heaviest_rank"]["pinned_bytes"]
    theirs = _run(path, "policy.megatron_cfg.fast_hybrid_optimizer=false")[1]["heaviest_rank"]["pinned_bytes"]
    # Its blocks are powers of two: the two fused gate-and-up weights alone take 16,384 elements for 12,288, twice.
    assert theirs - ours >= 2 * 2 * (16_384 - 12_288) * 4


def test_a_file_that_is_a_policy_itself(tmp_path):
    import yaml

    path = write_config(tmp_path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text())["policy"]))
    _, found, _ = _run(path, "train_micro_batch_size=2")
    assert found["parameters"] == DENSE_PARAMETERS


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, Limits()),
        ({"gpu_memory": 80}, Limits(80_000_000_000, Limits().host)),
        ({"gpu_memory": 80, "host_memory": 512.5}, Limits(80_000_000_000, 512_500_000_000)),
    ],
)
def test_limits_without_a_gpu(tmp_path, monkeypatch, options, limits):
    monkeypatch.setattr(machine, "gpus", list)
    _, found, _ = _run(write_config(tmp_path), **options)
    assert (found["limits"]["gpu"], found["limits"]["host"]) == (limits.gpu, limits.host)
    for name in options:
        assert f"--{name.replace('_', '-')}" in found["limits"]["source"]


def test_limits_of_a_machine_with_gpus(monkeypatch):
    memory = [150_000_000_000, 80_000_000_000]
    gpus = [machine.Gpu(index, "a GPU", size, None, None, None) for index, size in enumerate(memory)]
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    limits = command._limits(None, None)
    assert limits.gpu == 80_000_000_000
    assert limits.host == command.host.memory().total
    assert "this machine" in limits.source


def test_measured_rates_are_this_machine_s(monkeypatch):
    monkeypatch.setattr(command, "_WIDEN_ELEMENTS", 1_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rates = command.measured_rates()
    assert 1e7 < rates.host < 1e12
    assert rates.wire == Rates().wire
    assert "measured here" in rates.source
    assert "no GPU here" in rates.source


@pytest.mark.gpu
def test_measured_rates_on_a_gpu():
    rates = command.measured_rates()
    assert 1e9 < rates.wire < 1e12
    assert 1e11 < rates.device < 1e14
    assert rates.wire != Rates().wire


@pytest.mark.parametrize(
    ("changes", "overrides", "options", "said"),
    [
        ({}, (), {"gpus": 3, "nodes": 2}, "3 GPUs cannot be spread evenly over 2 nodes"),
        ({"megatron_cfg__tensor_model_parallel_size": 2}, (), {"gpus": 3}, "3 GPUs cannot be split"),
        ({"precision": "bfloat61"}, (), {}, "policy.precision"),
        ({}, ("policy.model_name=/nowhere/at/all",), {}, "/nowhere/at/all"),
        ({}, ("nonsense",), {}, "nonsense"),
        (
            {"megatron_cfg__optimizer__optimizer_offload_fraction": 2.0, "megatron_cfg__context_parallel_size": 2},
            (),
            {},
            r"(?s)sequence_packing.*optimizer_offload_fraction|optimizer_offload_fraction.*sequence_packing",
        ),
        (
            {
                "megatron_cfg__optimizer__optimizer_cpu_offload": False,
                "megatron_cfg__optimizer__use_distributed_optimizer": False,
            },
            (),
            {},
            "use_distributed_optimizer is off",
        ),
    ],
    ids=["nodes", "sizes", "precision", "no model", "override", "several problems", "no distributed optimizer"],
)
def test_what_is_wrong_is_said(tmp_path, changes, overrides, options, said):
    path = write_config(tmp_path, **changes)
    with pytest.raises(CommandError, match=said):
        _run(path, *overrides, **options)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CommandError, match="no such file"):
        _run(tmp_path / "absent.yaml")


def test_a_file_without_a_policy(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("cluster: {num_nodes: 1}\n")
    with pytest.raises(CommandError, match="policy"):
        _run(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"megatron_cfg__peft": {"enabled": True, "dim": 8, "alpha": 16}}, "LoRA is on"),
        (
            {"megatron_cfg__fp8_cfg": {"enabled": True, "fp8": "e4m3", "fp8_recipe": "tensorwise", "fp8_param": True}},
            "FP8 parameters are counted as 16-bit",
        ),
        ({}, ""),
    ],
)
def test_what_is_not_planned_is_noted(tmp_path, changes, said):
    import yaml

    policy = yaml.safe_load(write_config(tmp_path, **changes).read_text())["policy"]
    notes = plan_policy(policy, gpus=1).notes
    assert any(said in note for note in notes) if said else notes == ()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.megatron_cfg.optimizer.lr=fast", "must be a number or null (command line)"),
        ("policy.megatron_cfg.optimizer.rate=1", "OptimizerConfig has no such field: remove it (command line)"),
        ("policy.megatron_cfg.tensor_model_parallel_size=3", "Megatron says of "),
        ("policy.megatron_cfg.pipeline_model_parallel_size=3", "must divide the model's 2 layers"),
        ("policy.megatron_cfg.model_overrides={hidden_size: wide}", "policy.megatron_cfg is refused"),
        ("policy.hf_config_overrides={vocab_size: -5}", "Megatron cannot build stage 0 of the model"),
        ("policy.model_name=''", "policy.model_name is '': must be a Hugging Face id or a folder that is there"),
        ("~policy.model_name", "policy.model_name is missing: must be given: text ("),
        ("policy.megatron_cfg=null", "policy.megatron_cfg is None: must be a mapping (command line)"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, override, said):
    with pytest.raises(CommandError) as error:
        _run(write_config(tmp_path), override)
    assert said in str(error.value)


def test_nothing_is_measured_for_a_config_that_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measured_rates", lambda: pytest.fail("measured"))
    with pytest.raises(CommandError, match=r"policy\.precision"):
        _run(write_config(tmp_path, precision="half"), measure=True)


def test_what_sends_tokens_and_fuses_changes_nothing(tmp_path, monkeypatch):
    for name in ("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "USE_MNNVL"):
        monkeypatch.delenv(name, raising=False)
    plain = _run(write_config(tmp_path, moe=True))[1]
    settings = {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_permute_fusion": True,
        "apply_rope_fusion": True,
    }
    fused = _run(write_config(tmp_path, moe=True, **{f"megatron_cfg__{key}": held for key, held in settings.items()}))[
        1
    ]
    assert fused["heaviest_rank"] == plain["heaviest_rank"]
    assert "USE_MNNVL" not in os.environ
