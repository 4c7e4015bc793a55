"""The meta model has the parameters of the real one: published totals, and a real build in two processes."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from planning.architectures import (
    QWEN2_5_1_5B,
    QWEN2_5_7B,
    QWEN3_235B,
    SMALL,
    SMALL_GPT_OSS,
    SMALL_MLA,
    SMALL_MOE,
    configs,
    provider_of,
    write,
)

from megasetup.compat.bridge import import_bridge
from megasetup.planning import ParallelSizes, PlanningError, plan_run, pretended_world
from megasetup.planning.shapes import build_chunks, left_out, padded_vocabulary, plain_provider

_WORKER = Path(__file__).with_name("shapes_worker.py")


@pytest.mark.parametrize(
    ("settings", "parameters", "tensor", "pipeline"),
    # As the models' cards say: 1.54 B and 7.61 B (and 235 B below); exactly, those of their safetensors indexes.
    [
        (QWEN2_5_1_5B, 1_543_714_304, 1, 1),
        (QWEN2_5_1_5B, 1_543_714_304, 2, 2),
        (QWEN2_5_7B, 7_615_616_512, 4, 1),
    ],
    ids=["1.5B", "1.5B tp2 pp2", "7B tp4"],
)
def test_parameters_of_real_models(tmp_path, settings, parameters, tensor, pipeline):
    provider = provider_of(
        write(tmp_path, settings),
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=tensor > 1,
    )
    plan = plan_run(provider, *configs(), gpus=tensor * pipeline)
    assert plan.parameters == parameters


def test_a_235b_moe_on_512_gpus_takes_seconds(tmp_path):
    provider = provider_of(
        write(tmp_path, QWEN3_235B),
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=16,
        num_layers_in_first_pipeline_stage=5,
        num_layers_in_last_pipeline_stage=5,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
    )
    start = time.process_time()
    plan = plan_run(provider, *configs(), gpus=512)
    assert time.process_time() - start < 20  # of one core; 4 s where this was written
    assert plan.parameters == 235_093_634_560
    assert len(plan.ranks) == 512
    assert len(plan.nodes) == 64
    assert [rank.place.stage for rank in plan.heaviest_of_stages()] == list(range(16))


_BUILT_BY_TWO = {
    "tensor 2, expert 2": (
        SMALL_MOE,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
    "expert tensor 2": (SMALL_MOE, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "dense, tensor 2": (SMALL, {"tensor_model_parallel_size": 2}),
    "pipeline 2": (SMALL_MOE, {"pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two real processes holds of each model."""
    root = tmp_path_factory.mktemp("built")
    cases = [[name, str(write(root / name, settings)), fields] for name, (settings, fields) in _BUILT_BY_TWO.items()]
    held = []
    for status, output in launch(_WORKER, 2, json.dumps(cases), timeout=240):
        assert status == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("HELD ")]
        held.append(json.loads(line.removeprefix("HELD ")))
    return held


@pytest.mark.parametrize("case", _BUILT_BY_TWO)
def test_shapes_are_those_of_a_model_built_by_two_processes(tmp_path, built, case):
    settings, fields = _BUILT_BY_TWO[case]
    provider = provider_of(write(tmp_path, settings), **fields)
    plain = plain_provider(provider)
    stages = plain.pipeline_model_parallel_size
    for rank in range(2):
        with pretended_world(ParallelSizes.of(plain, 2), rank):
            (chunk,) = build_chunks(plain, padded_vocabulary(provider), stage=rank if stages == 2 else 0, stages=stages)
        assert {
            name.removeprefix("module."): [
                list(parameter.shape),
                str(parameter.dtype),
                getattr(parameter, "allreduce", True),
                getattr(parameter, "tensor_model_parallel", False),
            ]
            for name, parameter in chunk.named_parameters()
        } == built[rank][case]


def test_the_last_stage_of_a_tied_model_holds_the_embedding_again(tmp_path):
    plain = plain_provider(provider_of(write(tmp_path, SMALL), pipeline_model_parallel_size=2))
    sizes = ParallelSizes.of(plain, 2)
    held = []
    for rank in range(2):
        with pretended_world(sizes, rank):
            (chunk,) = build_chunks(plain, 256, stage=rank, stages=2)
        held.append({name: tuple(parameter.shape) for name, parameter in chunk.named_parameters()})
    assert held[0]["module.embedding.word_embeddings.weight"] == (256, 64)
    assert held[1]["module.output_layer.weight"] == (256, 64)


def test_the_vocabulary_is_padded_for_the_tensor_parallel_size(tmp_path, capsys):
    padded = {"should_pad_vocab": True, "make_vocab_size_divisible_by": 128}
    folder = write(tmp_path, SMALL)
    assert padded_vocabulary(provider_of(folder, **padded)) == 256
    assert padded_vocabulary(provider_of(folder, **padded, tensor_model_parallel_size=4)) == 512
    assert padded_vocabulary(provider_of(folder, should_pad_vocab=False)) == 250
    # The rows that pad it are held, and are none of the model's parameters: 250 rows of 64 and two layers.
    layer = 64 * (64 + 2 * 32) + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    plan = plan_run(provider_of(folder, **padded), *configs(), gpus=1)
    assert plan.parameters == 250 * 64 + 2 * layer + 64
    assert plan.heaviest.parameters == 256 * 64 + 2 * layer + 64
    assert capsys.readouterr().out == ""


def test_settings_of_speed_change_nothing_and_the_provider_stays_as_it_is(tmp_path):
    folder = write(tmp_path, SMALL_MOE)
    changed = {
        "moe_permute_fusion": True,
        "fp8": "hybrid",
        "moe_token_dispatcher_type": "flex",
        "cuda_graph_impl": "local",
    }
    provider = provider_of(folder, **changed)
    plan = plan_run(provider, *configs(), gpus=1)
    assert plan.ranks == plan_run(provider_of(folder), *configs(), gpus=1).ranks
    assert {name: getattr(provider, name) for name in changed} == changed


def test_multimodal_rotary_embeddings_are_planned_without_a_gpu(tmp_path):
    folder = write(tmp_path, SMALL)
    provider = provider_of(folder, position_embedding_type="mrope", mrope_section=[2, 3, 3])
    assert plan_run(provider, *configs(), gpus=1).ranks == plan_run(provider_of(folder), *configs(), gpus=1).ranks


def _published(settings) -> int:
    """Parameters of the model in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = dict(settings)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.pop("model_type"), **kind))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("settings", [SMALL, SMALL_MOE, SMALL_MLA, SMALL_GPT_OSS], ids=lambda case: case["model_type"])
def test_parameters_are_those_of_transformers(tmp_path, settings):
    provider = provider_of(write(tmp_path, settings))
    assert plan_run(provider, *configs(), gpus=1).parameters == _published(settings)


def test_a_layer_that_predicts_further_tokens_is_on_the_last_stage(tmp_path):
    folder = write(tmp_path, {**SMALL_MLA, "num_hidden_layers": 4})
    fields = {"pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    without = plan_run(provider_of(folder, **fields, mtp_num_layers=None), *configs(), gpus=2)
    with_it = plan_run(provider_of(folder, **fields, mtp_num_layers=1), *configs(), gpus=2)
    assert with_it.ranks[0].parameters == without.ranks[0].parameters
    # One more layer, two norms and a projection of twice the width, a norm at its end, and the embedding again.
    extra = with_it.ranks[1].parameters - without.ranks[1].parameters
    last = plan_run(provider_of(folder, **fields, num_layers=6, moe_layer_freq=[0, 1, 1, 1, 1, 1]), *configs(), gpus=2)
    layer = last.ranks[1].parameters - without.ranks[1].parameters
    assert extra == layer + 3 * 64 + 2 * 64 * 64 + 256 * 64


def test_another_kind_of_provider_is_refused_by_name():
    with pytest.raises(PlanningError, match=r"builtins\.object"):
        plain_provider(object())


def test_megatron_s_own_refusal_is_passed_on(tmp_path):
    provider = provider_of(write(tmp_path, SMALL), tensor_model_parallel_size=3)
    with pytest.raises(PlanningError, match=r"Megatron refuses.*tensor_model_parallel_size"):
        plain_provider(provider)


def test_a_provider_that_builds_more_than_the_decoder_says_so(tmp_path):
    assert left_out(provider_of(write(tmp_path, SMALL))) == []
    vision = import_bridge("megatron.bridge.models.qwen_vl.qwen25_vl_provider").Qwen25VLModelProvider
    (note,) = left_out(vision(num_layers=2, hidden_size=64, num_attention_heads=4))
    assert "Qwen25VLModelProvider" in note
    assert "not counted" in note
