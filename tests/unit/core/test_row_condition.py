"""Conditions on rows: what they say of values, what they refuse, and what they cannot reach."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.core.condition import RowCondition
from prefillcli.errors import UsageError

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("score", pa.float64()),
        ("logprob_very good", pa.float64()),
        ("label_mass", pa.float64()),
        ("prediction", pa.string()),
        ("exit_layer", pa.int64()),
        ("truncated", pa.bool_()),
        ("day", pa.date32()),
        ("tags", pa.list_(pa.string())),
        ("anything", pa.string()),
    ]
)
ROW = {
    "id": "user-1",
    "score": 0.5,
    "logprob_very good": -0.5,
    "label_mass": 0.9,
    "prediction": "Yes",
    "exit_layer": None,
    "truncated": False,
    "day": "2026-01-31",
    "tags": ["a", "b"],
    "anything": {"nested": [1, None]},
}


def checked(text: str) -> RowCondition:
    condition = RowCondition(text)
    condition.check(SCHEMA, untyped={"anything"}, labels={"prediction": ("Yes", "No", "Maybe")})
    return condition


@pytest.mark.parametrize(
    ("text", "values", "wanted"),
    [
        ("score > 0.4 and score < 0.6", {}, True),
        ("score > 0.4 and score < 0.6", {"score": 0.6}, False),
        ("0.4 < score < 0.6", {}, True),
        ("0.4 < score < 0.6", {"score": 0.7}, False),
        ('prediction == "Yes"', {}, True),
        ('prediction != "Yes"', {}, False),
        ("prediction in ['No', 'Maybe']", {}, False),
        ("prediction not in ['No', 'Maybe']", {}, True),
        ("label_mass < 0.5 or truncated", {}, False),
        ("label_mass < 0.5 or truncated", {"truncated": True}, True),
        ("not (label_mass < 0.5 or truncated)", {}, True),
        ("'user' in id", {}, True),
        ("'a' in tags and tags|length == 2", {}, True),
        ("prediction|lower == 'yes' and prediction|upper == 'YES' and id|trim == 'user-1'", {}, True),
        ("(score - 1)|abs * 2 == 1 and -score < 0 and 7 // 2 + 7 % 2 == 4 and score / 2 == 0.25", {}, True),
        ("columns['logprob_very good'] > -1", {}, True),
        ("day > '2026-01-01' and day < '2026-02-01'", {}, True),
        ("exit_layer is none and score is not none", {}, True),
        ("truncated is false", {}, True),
        (" or ".join(["truncated"] * 190 + ["score > 0"]), {}, True),
        ("score|round > 0", {"score": float("nan")}, False),
        ("score|round > 0", {"score": float("inf")}, False),
        (f"score < {'9' * 4_000}", {}, True),
        ("anything == 3", {"anything": 3}, True),
        ("anything", {"anything": True}, True),
        ("anything", {"anything": "true"}, False),
    ],
)
def test_a_condition_says_of_a_row_what_it_reads_like(text: str, values: dict[str, Any], wanted: bool) -> None:
    condition = checked(text)
    assert condition.columns <= ROW.keys()
    assert condition(ROW | values) is wanted
    assert pickle.loads(pickle.dumps(condition))(ROW | values) is wanted  # noqa: S301 - our own


@pytest.mark.parametrize("sign", ["==", "!=", "<", "<=", ">", ">="])
def test_a_comparison_with_null_is_false(sign: str) -> None:
    condition = checked(f"score {sign} 0.5")
    assert condition(ROW | {"score": None}) is False
    assert checked(f"not (score {sign} 0.5)")(ROW | {"score": None}) is True
    assert checked(f"score + 1 {sign} 0.5")(ROW | {"score": None}) is False
    assert checked(f"score / (score - score) {sign} 0.5")(ROW) is False  # there is no such number


def test_null_counts_as_false_and_unlike_values_are_never_alike() -> None:
    assert checked("truncated or score > 0.4")(ROW | {"truncated": None}) is True
    assert checked("truncated and score > 0.4")(ROW | {"truncated": None}) is False
    assert checked("anything > 3")(ROW | {"anything": "4"}) is False
    assert checked("anything|length > 3")(ROW | {"anything": 4}) is False
    assert checked("anything + 1 > 3 or score > 0.4")(ROW | {"anything": "4"}) is True


@given(st.floats(allow_nan=False) | st.none(), st.floats(allow_nan=False), st.integers(-3, 3))
def test_comparisons_are_those_of_numbers(score: float | None, other: float, whole: int) -> None:
    signs: dict[str, Callable[[Any, Any], bool]] = {
        "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne
    }  # fmt: skip
    for sign, compare in signs.items():
        for right in (other, whole):
            wanted = score is not None and compare(score, right)
            condition = RowCondition(f"score {sign} label_mass")
            assert condition({"score": score, "label_mass": right}) is wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("score >", "unexpected"),
        ("score = 1", "unexpected '='"),
        ("", "unexpected"),
        ("(" * 5000, "write a condition on columns"),
        (" and ".join(["truncated"] * 400), "nested too deeply"),
        ("not " * 400 + "truncated", "nested too deeply"),
        ("{{ score }}", "write a condition on columns"),
        ("scor > 1", "did you mean 'score'?"),
        ("prediction == 'yes'", "the prediction is never 'yes'; did you mean 'Yes'?"),
        ("score > 1 or not 'Noo' == prediction", "did you mean 'No'?"),
        ("prediction not in ['Yes', 'Perhaps']", "the prediction is never 'Perhaps'"),
        ("stars > 1", "--keep-columns"),
        ("seconds > 1", "differs from run to run"),
        ("shared_tokens > 1", "differs from run to run"),
        ("audit_score > 1", "not known when a row is chosen"),
        ("rationale_tokens > 1", "not known when a row is chosen"),
        ("evidence is none", "not known when a row is chosen"),
        ("score", "it gives a number, not true or false"),
        ("prediction", "it gives a text"),
        ("score and truncated", "it gives a number, not true or false"),
        ("truncated or score", "it gives a number"),
        ("not score", "it gives a number"),
        ("score > 'a'", "a number is compared with a text"),
        ("truncated or score > 'a'", "a number is compared with a text"),
        ("prediction == 1", "a text is compared with a number"),
        ("prediction in ['No', 3]", "a text is compared with a number"),
        ("day > 20260101", "a text is compared with a number"),
        ("score == none", "write 'is none'"),
        ("prediction + 'a' == 'b'", "+ is for a number, not for a text"),
        ("score|lower == 'a'", "lower is for a text, not for a number"),
        ("prediction|attr('upper') == 'a'", "No filter named 'attr'"),
        ("score is defined", "No test named 'defined'"),
        ("score is divisibleby 3", "No test named 'divisibleby'"),
        ("1e999 > score", "a number is too large"),
        ("score in [0.5, -1e400]", "a number is too large"),
        ("score < " + "9" * 100_000, "a number is too large"),
        ("0" * 5_000 + " < score", "a number is too large"),
    ],
)
def test_a_wrong_condition_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked(text)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("--rationale-when")
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    "text",
    [
        "().__class__.__mro__",
        "''.join(['a'])",
        "prediction.lower() == 'yes'",
        "prediction['__class__']",
        "columns.__class__",
        "range(10) == 3",
        "cycler.__init__.__globals__",
        "self._TemplateReference__context",
        "[x for x in tags]",
        "prediction[0] == 'a'",
        "tags[0:1] == 'a'",
        "{'a': 1} == 1",
        "score if truncated else 1",
        "10 ** 10 > 1",
        "tags|map('upper')|first == 'A'",
        "prediction|format == 'a'",
        "lambda: 1",
    ],
)
def test_nothing_but_the_values_of_a_row_is_reached(text: str) -> None:
    with pytest.raises(UsageError):
        checked(text)


WORDS = [
    *("score", "prediction", "tags", "anything", "truncated", "columns['id']", "0.5", "3", "'a'", "none", "true"),
    *("__class__", "__globals__", "self", "range", "dict", "namespace", "lipsum", "environment", "context"),
    *("(", ")", "[", "]", ".", "|", ",", "~", "**", "*", "+", "-", "/", "%", "==", "<", ">", "in", "and", "or", "not"),
    *("is", "if", "else", "attr", "lower", "length", "abs", "map", "format", "{", "}", ":", "{{", "}}", "{%", "%}"),
]


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join))
def test_whatever_is_written_gives_true_or_false_or_is_refused(text: str) -> None:
    touched = []

    class Watched:
        def __getattribute__(self, name: str) -> Any:
            if name not in ("__class__", "__hash__", "__eq__", "__bool__"):
                touched.append(name)
            return object.__getattribute__(self, name)

    try:
        condition = RowCondition(text)
        assert condition(ROW | dict.fromkeys(condition.columns - ROW.keys(), Watched())) in (True, False)
        condition.check(SCHEMA, untyped={"anything"})
    except UsageError:
        pass
    assert not touched
