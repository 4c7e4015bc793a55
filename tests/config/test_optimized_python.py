"""Every rule holds under `python -O` too, which removes assert statements."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import bridge_providers  # noqa: F401 (skips this file where Megatron-Bridge is missing)

FOLDER = Path(__file__).parent

RULES = (
    "errors",
    "parallelism",
    "moe_settings",
    "mtp",
    "precision",
    "performance",
    "architecture",
    "optimizer",
    "logprobs",
    "data_parallel",
    "checkpoint",
    "overrides",
    "container",
    "peft",
    "rope",
    "colocated",
    "draft_rules",
    "router_replay_rules",
    "reward",
    "runtime",
    "validate",
    "value_model",
)


def test_the_tests_of_all_rules_pass_under_python_o() -> None:
    files = [str(FOLDER / f"test_{rule}.py") for rule in RULES]
    # (pytest rewrites the asserts of test files, so they are checked; its warning that others are not is the point)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"]
    ran = subprocess.run(
        [sys.executable, "-O", "-m", "pytest", *options, *files],
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) > 300


def test_runtime_rejections_too() -> None:
    # Without any test framework: an assert in the package would let these pass.
    program = """
from megasetup.config.logprobs import validate_chunking_config
from megasetup.config.optimizer import validate_optimizer_config
from megasetup.config.parallelism import validate_parallelism_config
wrong = {"megatron_cfg": {"optimizer": {"optimizer_cpu_offload": True}, "transformer_impl": "inference_optimized",
         "tensor_model_parallel_size": 2}, "logprob_chunk_size": 1}
if __debug__:
    raise SystemExit("not optimized")
for check in (validate_optimizer_config, validate_chunking_config, validate_parallelism_config):
    try:
        check(wrong)
    except AssertionError as error:
        print(type(error).__name__)
"""
    command = [sys.executable, "-O", "-c", program]
    ran = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["ConfigAssertionError"] * 3
