"""Every name of the module that megasetup.nemo_rl stands in for, with its signature (data/nemo_rl_seed.json)."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

pytest.importorskip("megatron.core")

from megasetup import nemo_rl
from megasetup.config import performance

SEED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "nemo_rl_seed.json").read_text())
KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
}


def signature_of(function: Any) -> list[list[Any]]:
    return [
        [name, KINDS[parameter.kind], *([] if parameter.default is inspect.Parameter.empty else [parameter.default])]
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def names_of(kind: str) -> list[str]:
    return [name for name, entry in SEED.items() if entry["kind"] == kind]


def test_the_list_is_whole() -> None:
    assert {kind: len(names_of(kind)) for kind in ("class", "function", "data")} == {
        "class": 1,
        "function": 33,
        "data": 4,
    }


@pytest.mark.parametrize("name", names_of("function"))
def test_functions_have_the_signature(name: str) -> None:
    assert signature_of(getattr(nemo_rl, name)) == SEED[name]["parameters"]


@pytest.mark.parametrize("name", names_of("class"))
def test_classes_have_the_signature(name: str) -> None:
    from megatron.core.transformer.module import Float16Module

    found = getattr(nemo_rl, name)
    assert issubclass(found, Float16Module)
    assert signature_of(found) == SEED[name]["parameters"]
    for method, parameters in SEED[name]["methods"].items():
        assert signature_of(getattr(found, method))[1:] == parameters  # (without self)


@pytest.mark.parametrize("name", names_of("data"))
def test_data(name: str) -> None:
    expected = SEED[name]["value"]
    found = getattr(nemo_rl, name)
    if expected == "TypeVar":
        assert isinstance(found, TypeVar)
        assert found.__name__ == name
    elif name.endswith("_PATCHED"):
        assert isinstance(found, bool)
    else:
        assert found == expected


def test_the_contract_is_the_one_that_the_config_knows() -> None:
    assert nemo_rl._NEMOTRON_OMNI_EXPANDED_SEQUENCE_CONTRACT == performance._EXPANDED_SEQUENCE


def test_importing_it_loads_no_megatron_and_changes_nothing() -> None:
    code = """
import sys
from megasetup import nemo_rl
assert nemo_rl._HF_CONFIG_PATCHED is False
assert nemo_rl._BRIDGE_SIGNAL_HANDLER_PATCHED is False
assert not [name for name in sys.modules if name.startswith(("megatron", "transformers"))]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_patches_are_noted() -> None:
    nemo_rl._patch_hf_config_double_instantiation()
    nemo_rl._patch_bridge_signal_handler_for_worker_threads()
    assert nemo_rl._HF_CONFIG_PATCHED is True
    assert nemo_rl._BRIDGE_SIGNAL_HANDLER_PATCHED is True


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = nemo_rl.no_such_name


def test_the_draft_hook_refuses_a_second_draft() -> None:
    hook = nemo_rl._create_draft_pre_wrap_hook(
        {"draft": {"enabled": True}}, None, None, preload_policy_from_pretrained=True
    )
    with pytest.raises(ValueError, match=r"policy\.draft: the policy has a draft model already"):
        hook([SimpleNamespace(draft_model="the first")])


def test_code_of_models_is_trusted_unless_the_config_says_no(caplog: pytest.LogCaptureFixture) -> None:
    nemo_rl._say_that_code_is_trusted.cache_clear()
    config = {"model_name": "m", "megatron_cfg": {"train_iters": 1}}
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        for _ in range(2):
            trusting = nemo_rl._trusting(config)
            assert trusting["megatron_cfg"] == {"train_iters": 1, "trust_remote_code": True}
    assert config == {"model_name": "m", "megatron_cfg": {"train_iters": 1}}
    assert len(caplog.records) == 1
    for own in (True, False):
        kept = nemo_rl._trusting({"megatron_cfg": {"trust_remote_code": own}})
        assert kept["megatron_cfg"]["trust_remote_code"] is own
    assert len(caplog.records) == 1
