"""examples/train.py does what docs/training.md says: up to the config without a GPU, three steps with one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import Ended, bare_environment, launch

EXAMPLE = Path(__file__).parents[1] / "examples" / "train.py"
CONFIG = EXAMPLE.with_suffix(".yaml")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("megatron.core", "transformers"):
        pytest.importorskip(name)
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("needs megatron-bridge")
    folder = tmp_path_factory.mktemp("example")
    made = subprocess.run(
        [sys.executable, "-c", _MAKE, str(folder / "hf")],
        env=bare_environment() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return folder / "hf"


_MAKE = """
import sys
from pathlib import Path
from model.flow_models import make, write_tokenizer
make("dense").bfloat16().save_pretrained(sys.argv[1])
write_tokenizer(Path(sys.argv[1]))
"""


def run(model: Path, world: int, *more: str) -> list[Ended]:
    overrides = [f"policy.model_name={model}", "policy.max_total_sequence_length=64", *more]
    # As from a shell in the model's folder; the report is written there.
    environment = {"MEGASETUP_CHECKPOINT_DIR": str(model.parent / "converted"), "HF_HUB_OFFLINE": "1"}
    return launch(EXAMPLE, world, str(CONFIG), *overrides, timeout=200, environment=environment)


@pytest.mark.parametrize("world", [1, 2])
def test_dry_run_without_a_gpu(model: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = [f"policy.megatron_cfg.tensor_model_parallel_size={world}", "policy.megatron_cfg.transformer_impl=local"]
    for ended in run(model, world, *sizes, "--dry-run"):
        assert ended.status == 0, ended.output
        (said,) = [line for line in ended.output.splitlines() if line.startswith("dry run: ")]
        assert said == f"dry run: {model} is in {_converted(model)}, trains in torch.bfloat16"
    assert (_converted(model) / "iter_0000000" / "run_config.yaml").is_file()


def _converted(model: Path) -> Path:
    return model.parent / "converted" / f"model_{str(model).replace('/', '_')}"


@pytest.mark.gpu
def test_three_steps_on_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    (ended,) = run(model, 1)
    _check_training(ended, model.parent / "setup-report-0.json")


@pytest.mark.multigpu
def test_three_steps_on_two_gpus(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    first, second = run(model, 2)
    assert first.status == 0, first.output
    _check_training(second, model.parent / "setup-report-1.json")


def _check_training(ended: Ended, report_file: Path) -> None:
    assert ended.status == 0, ended.output
    losses = [float(line.split()[-1]) for line in ended.output.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    # Random weights and tokens: ln(2048), and a little less after each step on the same batch.
    assert losses[0] == pytest.approx(7.62, abs=0.3)
    assert losses[0] > losses[1] > losses[2] > 6
    report = json.loads(report_file.read_text())
    assert report["audit"]["ok"]
    assert [stage["name"] for stage in report["stages"]][-2:] == ["sync masters", "audit"]


def test_the_config_is_right_as_it_stands() -> None:
    """Every key of the example's file is known."""
    from megasetup.config.load import load_config
    from megasetup.config.validate import examine_file

    findings = examine_file(load_config(CONFIG, ()).config, strict=True)
    assert not findings.problems
    assert not findings.warnings
