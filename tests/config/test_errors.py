"""How a problem reads, and how several become one error that callers of every kind catch."""

from __future__ import annotations

import pickle

import pytest

from megasetup.config.errors import (
    MISSING,
    ConfigAssertionError,
    ConfigAttributeError,
    ConfigError,
    ConfigKeyError,
    ConfigNotImplementedError,
    ConfigTypeError,
    Problem,
    Problems,
    Words,
    config_error,
)

KINDS = {
    ConfigError: ValueError,
    ConfigAssertionError: AssertionError,
    ConfigKeyError: KeyError,
    ConfigTypeError: TypeError,
    ConfigAttributeError: AttributeError,
    ConfigNotImplementedError: NotImplementedError,
}


@pytest.mark.parametrize(("kind", "builtin"), KINDS.items())
def test_an_error_is_a_value_error_and_of_its_builtin_class(kind: type[ConfigError], builtin: type[Exception]) -> None:
    error = config_error("policy.a.b", 3, "must be 4", kind)
    assert isinstance(error, ValueError)
    assert isinstance(error, builtin)
    assert str(error) == "policy.a.b is 3: must be 4"
    assert error.problems == (Problem("policy.a.b", 3, "must be 4"),)


def test_an_absent_key_reads_as_missing() -> None:
    assert str(config_error("policy.a", MISSING, "is needed")) == "policy.a is missing: is needed"


def test_a_string_is_quoted_so_that_it_is_not_taken_for_something_else() -> None:
    assert str(config_error("policy.a", "True", "must be true")) == "policy.a is 'True': must be true"


def test_nothing_is_raised_where_nothing_was_found() -> None:
    problems = Problems()
    problems.raise_any()
    assert not problems
    assert list(problems) == []


def test_one_problem_keeps_its_class() -> None:
    problems = Problems()
    problems.add("a", 1, "must be 2", ConfigTypeError)
    with pytest.raises(ConfigTypeError) as raised:
        problems.raise_any()
    assert type(raised.value) is ConfigTypeError


def test_several_problems_are_one_error_of_all_their_classes() -> None:
    problems = Problems()
    for number, kind in enumerate(KINDS):
        problems.add(f"key{number}", number, "must be another", kind)
    with pytest.raises(ConfigError) as raised:
        problems.raise_any()
    for builtin in KINDS.values():
        assert isinstance(raised.value, builtin)
    assert [problem.path for problem in raised.value.problems] == [f"key{number}" for number in range(len(KINDS))]
    assert str(raised.value).splitlines() == [
        "6 problems in the config:",
        *(f"  key{number} is {number}: must be another" for number in range(6)),
    ]


def test_an_error_of_several_problems_is_not_of_classes_that_none_of_them_has() -> None:
    problems = Problems()
    problems.add("a", 1, "must be 2")
    problems.add("b", MISSING, "is needed", ConfigKeyError)
    with pytest.raises(KeyError) as raised:
        problems.raise_any()
    assert not isinstance(raised.value, AssertionError | TypeError | AttributeError | NotImplementedError)


def test_the_same_problem_found_twice_is_listed_once() -> None:
    problems = Problems()
    for _ in range(2):
        problems.add("a", [1], "must be 2")
    with pytest.raises(ConfigError, match=r"^a is \[1\]: must be 2$"):
        problems.raise_any()


def test_collect_keeps_config_errors_and_lets_others_pass() -> None:
    problems = Problems()
    with problems.collect():
        raise config_error("a", 1, "must be 2")
    assert [problem.path for problem in problems] == ["a"]
    with pytest.raises(OSError, match="disk"), problems.collect():
        raise OSError("disk")
    assert len(list(problems)) == 1


def test_errors_survive_being_sent_to_another_process() -> None:
    problems = Problems()
    problems.add("a", 1, "must be 2", ConfigAssertionError)
    problems.add("b", MISSING, "is needed", ConfigKeyError)
    with pytest.raises(ConfigError) as raised:
        problems.raise_any()
    received = pickle.loads(pickle.dumps(raised.value))
    assert type(received) is type(raised.value)
    assert received.problems == raised.value.problems
    assert received.problems[1].found is MISSING
    single = pickle.loads(pickle.dumps(config_error("a", 1, "must be 2", ConfigTypeError)))
    assert type(single) is ConfigTypeError


def test_words_in_the_place_of_a_value_have_no_quotes() -> None:
    error = config_error("a.yaml", Words("a list"), "must be a mapping")
    assert str(error) == "a.yaml is a list: must be a mapping"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.problems[0].found == "a list"


def test_what_is_known_to_be_wrong_is_no_news() -> None:
    problems = Problems()
    problems.add("policy.a", "x", "must be a mapping")
    problems.add("policy.list", "y", "must be a list")
    known = problems.paths()
    assert known == {"policy.a", "policy.list"}
    found = [Problem(path, 1, "must be 2") for path in ("policy.a", "policy.a.b", "policy.list[1]", "policy.ab")]
    problems.add_news(ConfigKeyError(*found), known)
    assert [problem.path for problem in problems] == ["policy.a", "policy.list", "policy.ab"]
    with pytest.raises(ConfigKeyError):
        problems.raise_any()


@pytest.mark.parametrize("count", [1, 2])
def test_a_cause_is_shown_with_the_problems(count: int) -> None:
    problems, cause = Problems(), OSError("gone")
    for number in range(count):
        problems.add(f"policy.{number}", 1, "must be 2")
    with pytest.raises(ConfigError) as raised:
        problems.raise_any(cause)
    assert raised.value.__cause__ is cause
