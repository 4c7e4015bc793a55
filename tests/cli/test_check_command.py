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
from megasetup.cli.configs import load
from megasetup.cli.differences import Difference, differences, plain
from megasetup.config.errors import MISSING, Problem


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


@pytest.mark.parametrize("text", ["", "cluster: {num_nodes: 1}\n"], ids=["empty", "another section"])
def test_a_file_without_a_policy_is_named(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert _examine(path).problems == [f"policy is missing: must be given: a mapping ({path})"]


def test_a_key_that_a_policy_s_own_file_lacks_is_of_the_file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("megatron_cfg: {}\n")
    loaded = load(path, ())
    assert loaded.origins["policy.megatron_cfg"] == f"{path}:1"
    problem = loaded.located(Problem("policy.precision", MISSING, "must be given"))
    assert str(problem) == f"policy.precision is missing: must be given ({path})"


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
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(moe_utils, "fused_permute", None)
    check = _examine(write_config(tmp_path, moe=True, megatron_cfg__moe_permute_fusion=True))
    assert check.problems == []
    (remark,) = check.remarks
    assert "policy.megatron_cfg.moe_permute_fusion could not be checked" in remark
    assert "Transformer Engine" in remark
    assert _examine(write_config(tmp_path, moe=True)).remarks == []


def test_json_is_all_that_is_printed(tmp_path, megasetup):
    path = write_config(tmp_path, moe=True, megatron_cfg__moe_flex_dispatcher_backend="hybridep")
    done = megasetup("check", path, "policy.megatron_cfg.moe_token_dispatcher_type=flex", "--json")
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["ok"]
    assert [warning.split(",")[0] for warning in found["warnings"]] == [
        "HybridEP needs NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
        "HybridEP needs USE_MNNVL",
    ]
    assert "when the run starts" in found["remarks"][0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.megatron_cfg.tensor_model_parallel_size=3", "(command line)"),
        ("policy.megatron_cfg.tensor_model_parallel_size=0", "must be a whole number of at least 1"),
        ("policy.megatron_cfg.pipeline_model_parallel_size=3", "must divide the model's 2 layers"),
        ("policy.megatron_cfg.expert_model_parallel_size=2", "must be 1: the model has no experts"),
        ("policy.megatron_cfg.model_overrides={hidden_size: wide}", "Megatron says of"),
        ("policy.megatron_cfg.model_overrides={provide: 1}", "has no such field"),
        ("policy.megatron_cfg.model_overrides={activation_func: silu}", "is a function there"),
        ("policy.megatron_cfg.cuda_graph_modules=nope", "policy.megatron_cfg.cuda_graph_modules is 'nope'"),
        ("policy.megatron_cfg.train_iters=0", "policy.megatron_cfg.train_iters is 0: Megatron-Bridge says"),
        ("policy.megatron_cfg.peft={enabled: true, dim: 8, alpha: 4, rank: 1}", "peft.rank is 1: LoRA has no such"),
        ("policy.megatron_cfg.optimizer.lr=.inf", "must be a number"),
        ("policy.model_name=/nowhere/model", "policy.model_name is '/nowhere/model': must be"),
        ("policy.hf_config_overrides={num_hidden_layers: abc}", "with policy.hf_config_overrides"),
        ("policy.hf_config_overrides={vocab_size: -5}", "vocab_size must be positive"),
        ("policy.generation={}", "policy.generation.colocated is missing"),
        ("policy=null", "policy is None: must be a mapping"),
        ("~policy", "policy is missing"),
    ],
)
def test_whatever_is_wrong_is_one_problem_and_no_traceback(tmp_path, override, said):
    (problem,) = _examine(write_config(tmp_path), override).problems
    assert said in problem


def test_a_checkpoint_that_bridge_cannot_load_is_a_problem_with_the_usual_cause(tmp_path):
    path = write_config(tmp_path)
    root = write_checkpoint(tmp_path / "given", tmp_path / "model")
    (root / "iter_0000000" / "run_config.yaml").write_text("model: {_target_: megatron.bridge.nowhere.Provider}\n")
    (problem,) = _examine(path, f"++policy.pretrained_checkpoint={{format: megatron_bridge, path: {root}}}").problems
    assert "an older Megatron-Bridge: delete" in problem


def test_a_tracker_that_names_no_iteration_is_a_problem(tmp_path):
    path = write_config(tmp_path)
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "latest_checkpointed_iteration.txt").write_text("last")
    (problem,) = _examine(path, weights_path=weights).problems
    assert "holds 'last': it must hold the number of an iteration" in problem


def test_problems_of_a_value_model_are_said_under_its_name(tmp_path):
    path = write_config(tmp_path)
    content = yaml.safe_load(path.read_text())
    content["value"] = {**content["policy"], "megatron_cfg": {**content["policy"]["megatron_cfg"], "nope": 1}}
    content["value"]["megatron_cfg"]["tensor_model_parallel_size"] = 3
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    check = _examine(path)
    (problem,) = check.problems
    assert problem.startswith("value.megatron_cfg.tensor_model_parallel_size is 3: Megatron says of ")
    assert f"({path}:" in problem
    (warning,) = check.warnings
    assert warning.startswith("value.megatron_cfg.nope is 1: not a known key")


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
