"""Optimizer state without names is for layers of the kind that it was saved from; a setup: test_flow_on_cpu.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("megatron.core")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)

from megasetup.model.bridge import check_order_of_state


def saved(folder: Path, transformer_impl: str | None, **settings: Any) -> str:
    config = {
        "model": {} if transformer_impl is None else {"transformer_impl": transformer_impl},
        "checkpoint": {"ckpt_format": "torch_dist", "dist_ckpt_optim_fully_reshardable": False},
        "optimizer": {"use_distributed_optimizer": True},
    }
    for section in (config["checkpoint"], config["optimizer"]):
        section |= {name: value for name, value in settings.items() if name in section}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(config))
    return str(folder)


@pytest.mark.parametrize(
    ("layers", "own"),
    [("local", "transformer_engine"), ("transformer_engine", "local"), ("local", "inference_optimized")],
)
def test_of_the_other_layers_it_is_refused(layers: str, own: str, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=f"of '{layers}' layers, and the model has '{own}'.*weights alone"):
        check_order_of_state(saved(tmp_path, layers), own)


@pytest.mark.parametrize(
    ("layers", "settings"),
    [
        ("local", {}),
        (None, {}),
        ("transformer_engine", {"dist_ckpt_optim_fully_reshardable": True}),
        ("transformer_engine", {"ckpt_format": "fsdp_dtensor"}),
        ("transformer_engine", {"use_distributed_optimizer": False}),
    ],
)
def test_of_the_same_layers_or_with_names_it_is_not(layers: str | None, settings: Any, tmp_path: Path) -> None:
    check_order_of_state(saved(tmp_path, layers, **settings), "local")


def test_without_a_config_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    check_order_of_state(str(tmp_path), "local")
