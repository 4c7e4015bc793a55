"""Which optional flows a config switches on, and that `megasetup check` says so."""

import re

import pytest
from config_files import write_config
from rich.console import Console

from megasetup.cli import check
from megasetup.cli.check_tables import show
from megasetup.cli.flows import optional_flows


def test_a_plain_config_switches_none_on():
    assert optional_flows({"megatron_cfg": {}}) == []
    off = {"draft": {"enabled": False}, "router_replay": None, "generation": {"backend": "vllm"}}
    assert optional_flows(off | {"megatron_cfg": {"use_fused_linear_logprobs": False}}) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"draft": {"enabled": True, "model_name": "org/draft"}},
            "policy.draft.enabled: a draft model is .* org/draft",
        ),
        ({"draft": {"enabled": True}}, "from fresh weights"),
        ({"router_replay": {"enabled": True}}, "policy.router_replay.enabled: training routes tokens"),
        (
            {"megatron_cfg": {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 2048}},
            "policy.megatron_cfg.use_fused_linear_logprobs: .* 2,048 tokens at a time, at temperature 1;",
        ),
        (
            {"megatron_cfg": {"use_fused_linear_logprobs": True}, "generation": {"temperature": 0.7}},
            "the usual number of tokens at a time, at temperature 0.7;",
        ),
        (
            {"generation": {"backend": "megatron", "colocated": {"enabled": True}}},
            "policy.generation.backend: Megatron generates on the GPUs that train",
        ),
    ],
)
def test_each_flow_is_named_with_its_key(config, said):
    (flow,) = optional_flows({"megatron_cfg": {}} | config)
    assert re.search(said, flow), flow


def test_check_lists_them(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASETUP_CHECKPOINT_DIR", str(tmp_path / "cache"))
    path = write_config(tmp_path, megatron_cfg__use_fused_linear_logprobs=True)
    found = check.examine(path, ())
    assert found.problems == []
    (flow,) = found.models[0].flows
    assert flow.startswith("policy.megatron_cfg.use_fused_linear_logprobs")
    assert found.to_dict()["models"][0]["flows"] == [flow]
    console = Console(record=True, width=240)
    show(found, console)
    printed = console.export_text()
    assert "policy: optional flows that are on" in printed
    assert flow in printed
