"""What the schema says of a key is true of Megatron's and Bridge's own classes, and the reference page agrees."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

import pytest
import yaml

pytest.importorskip("megatron.core")

from bridge_providers import provider

from megasetup.compat.bridge import import_bridge
from megasetup.config import architecture, checkpoint, moe, mtp, parallelism, performance, precision
from megasetup.config.reference import render
from megasetup.config.schema import MegatronConfig, PolicyConfig, TrainerConfig, ValueConfig, is_open
from megasetup.config.schema.describe import Described, in_words, keys_of, type_at, walk
from megasetup.config.schema.key import Count, DtypeName, Fraction, Key, Size, section

KEYS: dict[str, Described] = dict(walk(TrainerConfig, ""))


def field_defaults(cls: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}


@pytest.fixture(scope="module")
def classes() -> Any:
    return import_bridge("megatron.bridge.training.config")


def test_every_key_says_in_a_sentence_what_it_does_and_where_it_goes() -> None:
    assert [path for path, described in KEYS.items() if not re.fullmatch(r"\S.*[^.]\.", described.key.does)] == []
    assert [path for path, described in KEYS.items() if not described.key.goes or not described.key.default] == []


def test_every_provider_field_that_a_key_goes_to_is_there() -> None:
    known = set().union(*(vars(provider(kind)) for kind in ("dense", "moe", "vision", "omni")))
    gone = {
        path: field
        for path, described in KEYS.items()
        for field in re.findall(r"provider\.(\w+)", described.key.goes)
        if field not in known
    }
    assert gone == {}


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("ddp", "DistributedDataParallelConfig"),
        ("optimizer", "OptimizerConfig"),
        ("checkpoint", "CheckpointConfig"),
        ("train", "TrainingConfig"),
        ("dist", "DistributedInitConfig"),
    ],
)
def test_every_container_field_that_a_key_goes_to_is_there(classes: Any, part: str, name: str) -> None:
    known = field_defaults(getattr(classes, name))
    named = {field for key in KEYS.values() for field in re.findall(rf"\b{part}\.(\w+)", key.key.goes)}
    assert named
    assert named - set(known) == set()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("optimizer", "OptimizerConfig"),
        ("scheduler", "SchedulerConfig"),
        ("distributed_data_parallel_config", "DistributedDataParallelConfig"),
    ],
)
def test_sections_that_become_a_dataclass_list_only_its_fields(classes: Any, path: str, name: str) -> None:
    known = field_defaults(getattr(classes, name))
    described = KEYS[f"policy.megatron_cfg.{path}"].section
    assert is_open(described)
    assert set(keys_of(described)) - set(known) == set()
    stated = {key: described.key.default for key, described in keys_of(described).items()}
    for key, words in stated.items():
        value = yaml.safe_load(words)
        if isinstance(value, bool | int | float):
            assert known[key] == value, key


def test_peft_keys_are_fields_of_lora() -> None:
    known = field_defaults(import_bridge("megatron.bridge.peft.lora").LoRA)
    named = {key.removeprefix("LoRA.") for key in (d.key.goes for d in KEYS.values()) if key.startswith("LoRA.")}
    assert {"dim", "alpha", "target_modules"} <= named
    assert named - set(known) == set()


@pytest.mark.parametrize("module", [parallelism, moe, mtp, performance, architecture])
def test_every_key_that_an_applier_passes_through_is_listed(module: Any) -> None:
    assert set(module.FIELDS) - set(keys_of(MegatronConfig)) == set()


def test_every_setting_that_decides_a_field_is_listed() -> None:
    decided = {**precision.SETTINGS, **performance.SETTINGS}
    assert {path for path in decided.values() if path not in KEYS} == set()
    assert set(moe.NUM_SMS) <= set(keys_of(MegatronConfig))
    assert set(architecture.TOWER_FIELDS) <= set(keys_of(MegatronConfig))
    assert set(checkpoint.FIELDS) == set(keys_of(KEYS["policy.megatron_cfg.checkpoint"].section))


def test_choices_are_those_that_megatron_knows() -> None:
    from megatron.core.transformer.enums import AttnBackend

    config_type = type(provider("dense"))
    hints = {field.name: field.type for base in config_type.__mro__ for field in _own_fields(base)}
    assert in_words(type_at(MegatronConfig, ["attention_backend"])) == "flash, fused, unfused, local or auto"
    assert [member.name for member in AttnBackend] == ["flash", "fused", "unfused", "local", "auto"]
    for name in ("transformer_impl", "cuda_graph_impl", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"):
        ours = type_at(MegatronConfig, [name])
        theirs = hints[name]
        assert set(_literals(ours)) == set(_literals(theirs)), name


def _own_fields(cls: type) -> list[Any]:
    return [field for field in getattr(cls, "__dataclass_fields__", {}).values() if not isinstance(field.type, str)]


def _literals(kind: Any) -> list[str]:
    return [value for value in get_args(kind) if isinstance(value, str)]


def test_a_value_model_has_the_policys_keys_less_what_only_a_policy_has() -> None:
    only_policy = set(keys_of(PolicyConfig)) - set(keys_of(ValueConfig))
    assert only_policy == {"generation", "generation_batch_size", "draft", "router_replay", "refit_buffer_size_gb"}
    assert set(keys_of(ValueConfig)) < set(keys_of(PolicyConfig))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Size, "a whole number of at least 1"),
        (Count | None, "a whole number of at least 0 or null"),
        (Fraction, "a number from 0 to 1"),
        (DtypeName, "the name of a dtype (float32, bfloat16, float16)"),
        (bool | Literal["full"] | None, "true, false, full or null"),
        (str | list[str], "text or a list of text"),
        (list[int], "a list of whole numbers"),
        (dict[str, Any] | None, "a mapping or null"),
        (PolicyConfig, "a mapping"),
        (Any, "anything"),
    ],
)
def test_types_in_words(kind: Any, words: str) -> None:
    assert in_words(kind) == words


def test_types_are_found_at_their_path() -> None:
    assert type_at(PolicyConfig, ["megatron_cfg", "optimizer", "lr"]) == float | None
    assert type_at(PolicyConfig, ["generation", "stop_token_ids", 0]) is int
    assert type_at(PolicyConfig, ["hf_config_overrides", "rope_scaling", "factor"]) is Any
    assert type_at(PolicyConfig, ["nothing"]) is Any


def test_a_key_without_words_is_refused() -> None:
    @section
    class Silent(TypedDict, total=False):
        """For this test."""

        said: Annotated[int, Key("Does something.", "somewhere")]
        silent: int

    with pytest.raises(TypeError, match=r"Silent\.silent has no Key"):
        keys_of(Silent)


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == render(), "docs/config.md is out of date: run `make docs`"


def test_the_reference_page_has_every_key_and_no_dead_link() -> None:
    page = render()
    for path, described in KEYS.items():
        if path.startswith("policy."):
            assert f"| `{described.name}` |" in page, path
    headings = {line[3:].replace(".", "") for line in page.splitlines() if line.startswith("## ")}
    linked = set(re.findall(r"\]\(#([\w-]+)\)", page))
    assert linked - headings == set()
