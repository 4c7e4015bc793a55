"""`megasetup check`: all problems at once, what will happen, and what differs from the defaults."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from config_files import write_checkpoint, write_config
from rich.console import Console

from megasetup.cli import check as command
from megasetup.cli.check_tables import show
from megasetup.cli.differences import Difference, differences, plain


@pytest.fixture(autouse=True)
def _checkpoint_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASETUP_CHECKPOINT_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("NRL_MEGATRON_CHECKPOINT_DIR", raising=False)


def _examine(path, *overrides, **options) -> command.Check:
    return command.examine(path, overrides, **options)


def _printed(check) -> str:
    console = Console(record=True, width=132)
    show(check, console)
    return console.export_text()


def test_a_good_file_on_the_command_line(tmp_path, megasetup):
    path = write_config(tmp_path)
    done = megasetup("check", path, "policy.megatron_cfg.optimizer.lr=3e-05")
    assert done.stderr == ""
    assert "Nothing is wrong." in done.stdout
    assert f"Convert {tmp_path / 'model'} from Hugging Face to {tmp_path / 'cache'}" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["lr"]]
    assert line.split() == ["lr", "none", "3e-05"]


def test_problems_on_the_command_line_are_status_1(tmp_path, megasetup):
    path = write_config(tmp_path, precision="half", megatron_cfg__train_iters=-1)
    found = json.loads(megasetup("check", path, "--json", status=1).stdout)
    assert not found["ok"]
    told = "\n".join(found["problems"])
    assert "policy.precision" in told
    assert "policy.megatron_cfg.train_iters" in told
    assert f"{path}:" in told


def test_settings_that_differ(tmp_path):
    path = write_config(tmp_path, megatron_cfg__tensor_model_parallel_size=2, megatron_cfg__sequence_parallel=True)
    check = _examine(path)
    assert check.problems == []
    (model,) = check.models
    changed = {part: {row.field: (row.default, row.value) for row in rows} for part, rows in model.settings.items()}
    assert changed["model"]["tensor_model_parallel_size"] == (1, 2)
    assert changed["model"]["sequence_parallel"] == (False, True)
    assert changed["model"]["calculate_per_token_loss"] == (False, True)
    assert "hidden_size" not in changed["model"]  # the architecture is the provider's own
    assert changed["optimizer"]["optimizer_cpu_offload"] == (False, True)
    assert changed["optimizer"]["params_dtype"] == ("float32", "bfloat16")
    assert "adam_beta1" not in changed["optimizer"]
    assert changed["ddp"]["grad_reduce_in_fp32"] == (False, True)
    assert changed["checkpoint"]["load_rng"] == (True, False)
    assert changed["checkpoint"]["pretrained_checkpoint"][1].startswith(str(tmp_path / "cache"))
    assert model.facts["optimizer on the CPU"] is True
    assert model.facts["checked for GPUs"] == 2
    printed = _printed(check)
    for line in ("policy: what will happen", "settings of the optimizer that differ", "tensor_model_parallel_size"):
        assert line in printed
    assert json.loads(json.dumps(check.to_dict()))["models"][0]["settings"]["ddp"]["grad_reduce_in_fp32"] == {
        "default": False,
        "value": True,
    }


def test_every_problem_at_once_with_its_place(tmp_path):
    path = write_config(
        tmp_path,
        megatron_cfg__context_parallel_size=2,
        megatron_cfg__optimizer__optimizer_offload_fraction=0.0,
        megatron_cfg__activation_checkpointing="sometimes",
        train_global_batch_size="eight",
    )
    check = _examine(path)
    for key in (
        "policy.sequence_packing",
        "policy.megatron_cfg.optimizer.optimizer_offload_fraction",
        "policy.megatron_cfg.activation_checkpointing",
        "policy.train_global_batch_size",
    ):
        assert sum(problem.startswith(key) for problem in check.problems) == 1, (key, check.problems)
    assert any(f"({path}:" in problem for problem in check.problems)
    printed = _printed(check)
    assert f"{len(check.problems)} problems" in printed
    assert "Nothing is wrong" not in printed


def test_an_unknown_key_warns_and_is_a_problem_when_strict(tmp_path):
    path = write_config(tmp_path, megatron_cfg__use_gloo_proces_groups=True)
    lenient, strict = _examine(path), _examine(path, strict=True)
    assert lenient.ok
    (warning,) = lenient.warnings
    assert "policy.megatron_cfg.use_gloo_proces_groups" in warning
    assert "did you mean" in warning
    assert "use_gloo_process_groups" in warning
    assert strict.problems == [warning]
    assert strict.warnings == []


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(None, ""), (8, ""), (3, "3 GPUs cannot be split"), (32, "batch")],
    # 8 samples cannot be shared among 16 replicas
)
def test_the_number_of_gpus(tmp_path, gpus, said):
    check = _examine(write_config(tmp_path, megatron_cfg__tensor_model_parallel_size=2), gpus=gpus)
    if not said:
        assert check.problems == []
        assert check.models[0].facts["data parallel size"] == (gpus or 2) // 2
    else:
        (problem,) = check.problems
        assert said in problem


def _converted(tmp_path: Path) -> Path:
    from megasetup.checkpoint.paths import cache_folder_name, get_checkpoint_dir

    return write_checkpoint(Path(get_checkpoint_dir()) / cache_folder_name(str(tmp_path / "model")), tmp_path / "model")


def test_a_converted_checkpoint_is_loaded_and_not_made_again(tmp_path):
    path = write_config(tmp_path)
    root = _converted(tmp_path)
    check = _examine(path)
    assert check.problems == []
    steps = check.models[0].steps
    assert steps[0] == f"Nothing is converted: the converted checkpoint {root} is there."
    assert steps[1] == f"Load the weights from {root}."
    changed = {row.field: row.value for row in check.models[0].settings["checkpoint"]}
    assert changed["pretrained_checkpoint"] == str(root)
    again = _examine(path, "++policy.megatron_cfg.force_reconvert_from_hf=true")
    assert "again, because force_reconvert_from_hf is set" in again.models[0].steps[0]


def test_a_given_checkpoint_must_be_there(tmp_path):
    path = write_config(
        tmp_path, pretrained_checkpoint={"format": "megatron_bridge", "path": str(tmp_path / "nowhere")}
    )
    (problem,) = _examine(path).problems
    assert "nowhere" in problem
    assert "pretrained_checkpoint" in problem


def test_the_architecture_of_a_given_checkpoint_is_its_own(tmp_path):
    path = write_config(tmp_path)
    root = write_checkpoint(tmp_path / "given", tmp_path / "model")
    given = f"{{format: megatron_bridge, path: {root}}}"
    check = _examine(path, f"++policy.pretrained_checkpoint={given}")
    assert check.problems == []
    assert check.models[0].steps[0] == f"Nothing is converted: megatron_bridge checkpoint {root / 'iter_0000000'}."


def test_what_would_be_resumed(tmp_path):
    path = write_config(tmp_path)
    weights = tmp_path / "weights"
    fresh = _examine(path, weights_path=weights)
    assert fresh.problems == []
    assert fresh.models[0].steps[-1] == f"Save training checkpoints in {weights}, which holds none yet."
    (weights / "iter_0000020").mkdir(parents=True)
    (weights / "latest_checkpointed_iteration.txt").write_text("20")
    resumed = _examine(path, weights_path=weights, optimizer_path=weights)
    assert resumed.problems == []
    assert resumed.models[0].steps[-1] == (
        f"Resume weights and optimizer state from {weights / 'iter_0000020'}; the FP32 copies stay as they were saved."
    )
    only_weights = _examine(path, weights_path=weights).models[0].steps
    assert only_weights[-2] == f"Resume the weights from {weights / 'iter_0000020'}."
    assert "Refresh every FP32 copy" in only_weights[-1]


def test_a_value_model_is_checked_beside_the_policy(tmp_path):
    path = write_config(tmp_path)
    content = yaml.safe_load(path.read_text())
    content["value"] = {**content["policy"], "precision": "float61"}
    path.write_text(yaml.safe_dump(content))
    check = _examine(path)
    assert [model.name for model in check.models] == ["policy", "value"]
    assert [problem.split(" ")[0] for problem in check.problems] == ["value.precision"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("policy: [", "cannot be read as YAML"), ("cluster: {}", "policy"), (None, "no such file")],
)
def test_a_file_that_cannot_be_used(tmp_path, text, said):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    check = _examine(path)
    assert len(check.problems) == 1
    assert said in check.problems[0]
    assert not check.ok


def test_what_needs_transformer_engine_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_has_transformer_engine", lambda: False)
    check = _examine(write_config(tmp_path, moe=True, megatron_cfg__moe_permute_fusion=True))
    assert check.problems == []
    (remark,) = check.remarks
    assert "policy.megatron_cfg.moe_permute_fusion" in remark
    assert "Transformer Engine is not installed" in remark


def test_no_gpu_and_no_process_group_is_touched(tmp_path):
    _examine(write_config(tmp_path))
    assert not torch.cuda.is_initialized()
    assert not torch.distributed.is_initialized()


def test_differences_by_hand():
    from functools import partial

    from megatron.core.optimizer import OptimizerConfig

    one, two = OptimizerConfig(lr=1.0), OptimizerConfig(lr=2.0, params_dtype=torch.bfloat16)
    assert differences(two, one) == [
        Difference("lr", 1.0, 2.0),
        Difference("params_dtype", "float32", "bfloat16"),
    ]
    assert differences(one, one) == []
    assert plain(partial(torch.nn.init.normal_, std=0.02)) == "normal_(std=0.02)"
    assert plain({"a": (torch.float16, None)}) == {"a": ["float16", None]}
