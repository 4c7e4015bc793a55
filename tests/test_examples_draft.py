"""examples/draft.py trains a policy and its draft; its config is right as it stands."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
from launch import bare_environment, launch

EXAMPLE = Path(__file__).parents[1] / "examples" / "draft.py"
CONFIG = EXAMPLE.with_name("train.yaml")
_MAKE = """
import sys
from pathlib import Path
from model.flow_models import make, write_tokenizer
make("dense").bfloat16().save_pretrained(sys.argv[1])
write_tokenizer(Path(sys.argv[1]))
"""


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_three_steps_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron.core", "modelopt", "transformers", "safetensors"):
        pytest.importorskip(name)
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("needs megatron-bridge")
    from safetensors.torch import load_file

    model = tmp_path / "hf"
    subprocess.run([sys.executable, "-c", _MAKE, str(model)], env=bare_environment(), check=True)
    monkeypatch.chdir(tmp_path)
    overrides = [
        f"policy.model_name={model}",
        "policy.max_total_sequence_length=64",
        "policy.megatron_cfg.train_iters=3",
    ]
    environment = {"MEGASETUP_CHECKPOINT_DIR": str(tmp_path / "converted"), "HF_HUB_OFFLINE": "1"}
    (ended,) = launch(EXAMPLE, 1, str(CONFIG), *overrides, timeout=200, environment=environment)
    assert ended.status == 0, ended.output
    steps = [line for line in ended.output.splitlines() if line.startswith("step ")]
    losses = [float(line.split()[-1]) for line in steps]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(math.log(2048), abs=0.5)
    assert losses[0] > losses[2]
    tensors = load_file(tmp_path / "draft.safetensors")
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (256, 512)
    assert tensors["fc.weight"].shape == (256, 512)  # (two layers, so two auxiliary ones)
    assert tensors["lm_head.weight"].shape == (2048, 256)


def test_the_config_is_right_as_it_stands() -> None:
    from megasetup.cli.flows import optional_flows
    from megasetup.config.load import load_config
    from megasetup.config.validate import examine_file

    config = load_config(CONFIG, ("+policy.draft={enabled: true, loss_weight: 0.5}",)).config
    findings = examine_file(config, strict=True)
    assert not findings.problems
    assert not findings.warnings
    (said,) = optional_flows(config["policy"])
    assert said.startswith("policy.draft.enabled: a draft model is trained beside the policy")
