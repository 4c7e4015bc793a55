"""YAML files that build on each other, overrides and interpolations, and what is said when one of them is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megasetup.config.errors import MISSING, ConfigError, ConfigKeyError, ConfigTypeError, Problem
from megasetup.config.load import Loaded, load_config


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_a_file_alone_comes_out_as_plain_containers(write: Any) -> None:
    path = write("a.yaml", "policy:\n  lr: 1e-5\n  eps: 1.0e-8\n  flag: true\n  none: null\n  list: [1, {b: text}]\n")
    config = load_config(path).config
    assert config == {"policy": {"lr": 1e-5, "eps": 1e-8, "flag": True, "none": None, "list": [1, {"b": "text"}]}}
    assert type(config["policy"]) is dict
    assert type(config["policy"]["list"]) is list
    assert type(config["policy"]["list"][1]) is dict


def test_an_empty_file_is_an_empty_config(write: Any) -> None:
    path = write("a.yaml", "# nothing\n")
    assert load_config(path) == Loaded({}, {"": str(path)})


def test_a_file_overrides_what_it_builds_on(write: Any) -> None:
    write("base/common.yaml", "policy: {lr: 1.0, nested: {a: 1, b: 2}, list: [1, 2, 3]}\nseed: 1\n")
    write("base/middle.yaml", "defaults: common.yaml\npolicy: {nested: {b: 3}}\n")
    write("other.yaml", "seed: 5\n")
    path = write("a.yaml", "defaults: [base/middle.yaml, other.yaml]\npolicy: {lr: 2.0, list: [4]}\n")
    assert load_config(path).config == {
        "policy": {"lr": 2.0, "nested": {"a": 1, "b": 3}, "list": [4]},
        "seed": 5,
    }


def test_a_section_can_replace_the_one_it_would_be_merged_with(write: Any) -> None:
    write("base.yaml", "policy: {nested: {a: 1, b: 2}, other: 1}\n")
    path = write("a.yaml", "defaults: base.yaml\npolicy: {nested: {_override_: true, c: 3}}\n")
    assert load_config(path).config == {"policy": {"nested": {"c": 3}, "other": 1}}


def test_origins_name_the_file_that_had_the_last_word(write: Any) -> None:
    base = write("base.yaml", "policy:\n  lr: 1.0\n  list:\n    - 1\n    - 2\nseed: 1\n")
    path = write("a.yaml", "defaults: base.yaml\npolicy:\n  lr: 2.0\n")
    loaded = load_config(path, ["seed=3"])
    assert loaded.origins["policy.lr"] == f"{path}:3"
    assert loaded.origins["policy.list[1]"] == f"{base}:5"
    assert loaded.origins["seed"] == "command line"
    assert loaded.located(Problem("policy.lr", 2.0, "must be less")).remedy == f"must be less ({path}:3)"
    assert loaded.located(Problem("policy.other", 2.0, "must be less")).remedy == "must be less"
    assert loaded.located(Problem("policy.a.b", MISSING, "must be given")).remedy == f"must be given ({path}:2)"


def test_keys_that_a_yaml_merge_brings_have_their_own_lines(write: Any) -> None:
    path = write("a.yaml", "x: &x\n  a: 1\n  b: 2\ny:\n  <<: *x\n  b: 3\n")
    loaded = load_config(path)
    assert loaded.config["y"] == {"a": 1, "b": 3}
    assert (loaded.origins["y.a"], loaded.origins["y.b"]) == (f"{path}:2", f"{path}:6")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("policy.lr=1e-5", 1e-5),
        ("policy.lr=3", 3),
        ("policy.lr=true", True),
        ("policy.lr=null", None),
        ("policy.lr=text", "text"),
        ("policy.lr='1'", "1"),
        ("policy.lr=a=b", "a=b"),
        ("policy.lr=[1, 2]", [1, 2]),
        ("policy.lr={a: 1}", {"a": 1}),
        ("policy.lr=${seed}", 7),
        ("++policy.lr=4", 4),
    ],
)
def test_an_override_sets_a_value_that_is_yaml(write: Any, override: str, value: Any) -> None:
    path = write("a.yaml", "policy: {lr: 1.0}\nseed: 7\n")
    assert load_config(path, [override]).config["policy"]["lr"] == value


def test_overrides_add_merge_and_remove_in_their_order(write: Any) -> None:
    path = write("a.yaml", "policy: {a: {x: 1, y: 2}, b: 1, c: [1, 2]}\n")
    overrides = ["policy.a={y: 3}", "+policy.new.deep=1", "~policy.b", "policy.c[1]=5", "policy.new.deep=2"]
    assert load_config(path, overrides).config == {"policy": {"a": {"x": 1, "y": 3}, "new": {"deep": 2}, "c": [1, 5]}}


def test_interpolations_see_overrides_and_the_environment(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASETUP_TEST_NAME", "model")
    policy = "policy: {precision: bfloat16, name: '${oc.env:MEGASETUP_TEST_NAME}', dtype: '${.precision}'}\n"
    config = load_config(
        write("a.yaml", policy + "n: '${mul:2,${m}}'\nm: 3\n"), ["policy.precision=float32", "m=5"]
    ).config
    assert config == {"policy": {"precision": "float32", "name": "model", "dtype": "float32"}, "n": 10, "m": 5}


def test_omegaconf_is_left_as_it_was(write: Any) -> None:
    path = write("a.yaml", "n: '${mul:2,3}'\nm: '${max:2,3}'\n")
    assert load_config(path).config == {"n": 6, "m": 3}
    assert not OmegaConf.has_resolver("mul")
    OmegaConf.register_new_resolver("mul", lambda a, b: f"{a} times {b}")
    try:
        assert load_config(path).config["n"] == "2 times 3"
        assert OmegaConf.has_resolver("mul")
    finally:
        OmegaConf.clear_resolver("mul")


def test_files_that_are_not_there(write: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml: no such file$"):
        load_config(tmp_path / "nowhere.yaml")
    path = write("a.yaml", "seed: 1\ndefaults: gone.yaml\n")
    with pytest.raises(FileNotFoundError) as error:
        load_config(path)
    assert str(error.value) == f"{tmp_path}/gone.yaml: no such file (named by {path}:2 (defaults))"


def test_a_circle_is_refused_with_its_chain(write: Any) -> None:
    a = write("a.yaml", "defaults: b.yaml\n")
    b = write("b.yaml", "defaults: c.yaml\n")
    c = write("c.yaml", "x: 1\ndefaults: b.yaml\n")
    with pytest.raises(ConfigError) as error:
        load_config(a)
    (problem,) = error.value.problems
    assert problem.path == f"{c}:2 (defaults)"
    assert problem.remedy.endswith(f"in a circle: {b} -> {c} -> {b}")


@pytest.mark.parametrize(
    ("text", "line", "remedy"),
    [
        ("a: [1\nb: 2\n", 2, "cannot be read as YAML: expected ',' or ']', but got ':'"),
        ("a: 1\nb: 2\na: 3\n", 3, "cannot be read as YAML: found duplicate key a"),
        ("# a list\n- 1\n", 2, "must be a mapping"),
        ("just text\n", 1, "must be a mapping"),
    ],
)
def test_files_that_hold_no_config(write: Any, text: str, line: int, remedy: str) -> None:
    path = write("a.yaml", text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert [(problem.path, problem.remedy) for problem in error.value.problems] == [(f"{path}:{line}", remedy)]


@pytest.mark.parametrize("defaults", ["3", "[base.yaml, 3]", "{a: 1}"])
def test_defaults_of_another_type(write: Any, defaults: str) -> None:
    write("base.yaml", "a: 1\n")
    path = write("a.yaml", f"defaults: {defaults}\n")
    with pytest.raises(ConfigTypeError, match="must be the path of a file or a list of paths") as error:
        load_config(path)
    assert error.value.problems[0].path == f"{path}:1 (defaults)"


def test_everything_that_does_not_resolve_is_reported_together(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGASETUP_TEST_NAME", raising=False)
    path = write(
        "a.yaml",
        "policy:\n  a: ${gone}\n  b: ${oc.env:MEGASETUP_TEST_NAME}\n  c: ???\n  d: ${nothing:1}\n  l: ['${gone.x}']\n",
    )
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert {problem.path: problem.remedy for problem in error.value.problems} == {
        "policy.a": f"cannot be resolved: Interpolation key 'gone' not found ({path}:2)",
        "policy.b": f"cannot be resolved: Environment variable 'MEGASETUP_TEST_NAME' not found ({path}:3)",
        "policy.c": f"must be given, in a file or as an override ({path}:4)",
        "policy.d": f"cannot be resolved: Unsupported interpolation type nothing ({path}:5)",
        "policy.l[0]": f"cannot be resolved: Interpolation key 'gone.x' not found ({path}:6)",
    }
    assert error.value.problems[0].found == "${gone}"


def test_an_interpolation_that_leads_back_to_itself(write: Any) -> None:
    with pytest.raises(ConfigError, match="Recursive interpolation detected"):
        load_config(write("a.yaml", "a: ${b}\nb: ${a}\n"))


def test_wrong_overrides_are_reported_together(write: Any) -> None:
    path = write("a.yaml", "policy: {lr: 1.0}\n")
    overrides = ["policy.lr", "~policy.lr=1", "~policy.gone", "+policy.lr=2", "policy.lr=[1", "=3"]
    with pytest.raises(ConfigKeyError) as error:
        load_config(path, overrides)
    assert [problem.path for problem in error.value.problems] == [f"override {override!r}" for override in overrides]
    remedies = [problem.remedy for problem in error.value.problems]
    assert remedies[2] == "there is no policy.gone to remove"
    assert remedies[3] == "policy.lr is there already: leave the + out to change it"
    assert remedies[4] == "expected ',' or ']', but got '<stream end>'"


@pytest.mark.parametrize("key", [".", "policy..lr", "policy.", ".lr", "policy[a]", "policy[", "a b"])
def test_an_override_of_no_key(write: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=r"is malformed: must be key\.path=value"):
        load_config(write("a.yaml", "policy: {lr: 1.0}\n"), [f"{key}=1"])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("policy.lr[0]=2", "policy.lr is no list"),
        ("policy[0]=2", "policy is no list"),
        ("policy.l[7]=2", "list index out of range"),
    ],
)
def test_an_override_of_an_item_that_is_not_there(write: Any, override: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="is not applicable") as error:
        load_config(write("a.yaml", "policy: {lr: 1.0, l: [1]}\n"), [override])
    assert remedy in error.value.problems[0].remedy


def test_every_key_in_an_overriding_section_is_the_command_lines(write: Any) -> None:
    path = write("a.yaml", "policy:\n  a: {x: 1, y: [1]}\n")
    origins = load_config(path, ["policy.a={y: [2], z: 3}"]).origins
    assert [key for key, place in origins.items() if place == "command line"] == [
        "policy.a",
        "policy.a.y",
        "policy.a.y[0]",
        "policy.a.z",
    ]
    assert origins["policy.a.x"] == f"{path}:2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"3\n", "a.yaml:1 is a single value: must be a mapping"),
        (b"- 1\n", "a.yaml:1 is a list: must be a mapping"),
        (b"\xff\xfe\x00", "a.yaml is no text file: must be YAML in UTF-8"),
        (b"a: &a\n  b: *a\n", "a.yaml is endless: an anchor must not lie within itself"),
        (b"a: *b\n", "a.yaml:1 is 'a: *b': cannot be read as YAML: found undefined alias 'b'"),
        (b"a:\n\tb: 1\n", "cannot be read as YAML: found character '\\t' that cannot start any token"),
        (b"a: 1\n---\nb: 1\n", "cannot be read as YAML: but found another document"),
        (b"x: 1\na:\n  b: '${'\n", "a.yaml:3 (a.b) is unreadable: no viable alternative at input '${'"),
        (b"a:\n  null: 1\n", "a.yaml:1 (a) is unreadable: Incompatible key type 'NoneType'"),
        (b"a: !!python/name:os.system x\n", "could not determine a constructor"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is a folder: give the file"):
        load_config(tmp_path)


def test_a_resolver_that_fails_says_why(write: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be resolved: can't multiply sequence by non-int of type 'str' \("):
        load_config(write("a.yaml", "a: '${mul:a,b}'\n"))
