"""Files of questions, as people write them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.asking.question_file import AskedQuestion, read_questions
from prefillcli.errors import UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings, scorer_settings
from prefillcli.prompts.questions import Score

REFUND = {"name": "refund", "type": "predicate", "instructions": "Is it a refund?"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def questions(content: str | bytes, path: str = "q.yaml") -> tuple[AskedQuestion, ...]:
    """The questions of a file with this content."""
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    return read_questions(path).questions


def refused(content: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        questions(content)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(str.strip))
def test_what_json_dumps_writes_is_read_as_it_was(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    entry = {"name": "a", "type": "choice", "instructions": text, "choices": [f"a{text}", {"value": f"b{text}"}]}
    path = tmp_path_factory.mktemp("q") / "q.json"
    path.write_text(json.dumps({"questions": [entry]}))
    assert path.read_text().isascii()
    (found,) = read_questions(str(path)).questions
    assert found.question.instructions == text
    assert [option.value for option in found.question.options] == [f"a{text}", f"b{text}"]


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ud83d \ude00", r"\ude00\ud83d", r"a\uDC80"])
@pytest.mark.parametrize("place", ["name", "instructions", "choices"])
def test_half_a_surrogate_pair_is_refused(half: str, place: str) -> None:
    entry: dict[str, Any] = {"name": "a", "type": "choice", "instructions": "Which?", "choices": ["x", "y"]}
    entry[place] = ["x", "HALF"] if place == "choices" else "HALF"
    text = json.dumps({"questions": [entry]}).replace("HALF", half)
    assert "half a surrogate pair" in refused(text)
    with pytest.raises(UsageError, match="half a surrogate pair"):
        read_questions(f"{text}\n")


def test_a_surrogate_pair_in_a_recipe_and_a_flag_is_its_character() -> None:
    Path("job.json").write_text(json.dumps({"labels": ["😀", "b"], "chat_option": {"face": "😀"}}))
    flags = {"inputs": ["x.parquet"]}
    found = load_settings(ScoreSettings, flags, recipe="job.json", environment={})
    assert (found.answers.labels, found.prompts.chat_option) == (("😀", "b"), {"face": "😀"})
    given = flags | {"chat_option": ['face="\\ud83d\\ude00"']}
    assert load_settings(ScoreSettings, given, environment={}).prompts.chat_option == {"face": "😀"}
    for wrong in ('{"labels": ["\\ud83d", "b"]}', '{"chat_option": {"\\ude00": 1}}'):
        Path("job.json").write_text(wrong)
        with pytest.raises(UsageError, match="half a surrogate pair"):
            load_settings(ScoreSettings, flags, recipe="job.json", environment={})


@pytest.mark.parametrize(
    "options",
    [
        {"ask": "Is it \ud83d?"},
        {"ask": "Which?", "options": ["a", "\ude00"]},
        {"questions": [REFUND | {"instructions": "\ud83d"}]},
        {"questions": [REFUND | {"instructions": [{"type": "input_text", "text": "\ud83d"}]}]},
        {"chat_option": {"a": {"b": ["\ud83d"]}}},
    ],
)
def test_half_a_surrogate_pair_from_python_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="half a surrogate pair"):
        scorer_settings("m", options, owner="score()")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "cp1252"])
@pytest.mark.parametrize("accent", ["é", "e"])
def test_a_file_in_another_encoding_is_refused_with_a_command_that_converts_it(encoding: str, accent: str) -> None:
    content = f"questions:\n  caf{accent}: {{type: predicate, instructions: Is it caf{accent}}}\n"
    if encoding == "cp1252" and accent == "e":
        assert questions(content.encode(encoding))
        return
    said = refused(content.encode(encoding))
    assert said.startswith("--questions q.yaml: not UTF-8\n")
    command = said.partition("for example: ")[2]
    subprocess.run(command, shell=True, check=True)  # noqa: S602 - what the message says
    assert questions(Path("new.yaml").read_bytes())[0].question.instructions == f"Is it caf{accent}"

    Path("job.yaml").write_bytes("labels: [sí, no]\n".encode(encoding))
    with pytest.raises(UsageError, match=r"^--recipe job\.yaml: not UTF-8\n"):
        load_settings(ScoreSettings, {"inputs": ["x.parquet"]}, recipe="job.yaml", environment={})


def test_a_byte_order_mark_is_no_text() -> None:
    content = "questions:\n  refund: {type: predicate, instructions: Is it}\n"
    assert questions(content.encode("utf-8-sig"))[0].name == "refund"


def entry(**keys: Any) -> str:
    """A file with one question that has these keys."""
    return json.dumps({"questions": {"a": {"instructions": "Which?"} | keys}})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("questions:\n", "questions is empty\n"),
        ("questions: []", "questions is empty\n"),
        ("questions: {}", "questions is empty\n"),
        (entry(type="predicat"), "type \"predicat\": should be predicate, choice or score; did you mean 'predicate'?"),
        (entry(type="scores"), "type \"scores\": should be predicate, choice or score; did you mean 'score'?"),
        (entry(type="bool"), 'type "bool": should be predicate, choice or score'),
        (entry(type="score", levels=["a"]), "levels: 1 level, at least 2"),
        (entry(type="choice", choices=["a"]), "choices: 1 option, at least 2"),
        (entry(type="choice", choices=[]), "choices: 0 options, at least 2"),
        (entry(type="choice", choices="a,b"), 'choices: "a,b" is one text, and a list is needed: choices: [a, b]'),
        (entry(type="choice", choices=["a", 1.0]), "choices[1]: 1.0 is not text: put it in quotes"),
        (entry(type="choice", choices=[None, "b"]), "choices[0]: null is not text: put it in quotes"),
        ("questions: {a: {type: choice, instructions: x, choices: {null: y, b: z}}}", "choices[0]: null is not text"),
        (entry(type="score", levels=["a", True]), "levels[1]: true is not text: put it in quotes"),
        (entry(type="choice", choices=[{"value": 2.5}, "b"]), "choices[0]: 2.5 is not text: put it in quotes"),
        (entry(type="predicate", orders=2), "orders: a predicate is yes or no, and lists no options"),
        (entry(type="choice", choices=["a", "b"], orders="two"), 'orders "two": should be a valid integer'),
        (entry(type="score", levels=[3, 2, 1]), "levels 3, 2, 1: the lowest comes first, and no number twice"),
        (entry(type="score", levels=["1", "1.0"]), "levels 1, 1.0: the lowest comes first, and no number twice"),
        (entry(type="score", levels=["a", "b"], values=[1, 2, 3]), "values 1,2,3: 3 numbers for 2 labels: a, b"),
        (entry(type="choice", choices=["a", "b"], values=[1, 2]), "values: they are numbers for labels, or for the"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_the_value_that_is_wrong(content: str, said: str) -> None:
    found = refused(content)
    assert said in f"{found}\n"
    assert "noul" not in found


def test_orders_that_would_be_ignored_are_refused() -> None:
    Path("q.yaml").write_text(json.dumps({"questions": [REFUND]}))
    with pytest.raises(UsageError, match="--orders 2: no question lists its options"):
        read_questions("q.yaml", orders=2)
    kind = {"name": "kind", "type": "choice", "instructions": "Which?", "choices": ["a", "b"]}
    Path("q.yaml").write_text(json.dumps({"questions": [REFUND, kind]}))
    assert [len(each.orders) for each in read_questions("q.yaml", orders=2).questions] == [1, 2]


def test_whole_numbers_are_options_as_they_are_written() -> None:
    """In YAML 1 is a number; an option is a text, of which nothing can be lost."""
    listed = "{type: choice, instructions: x, choices: [1, 2, 03.1]}"
    mapped = "{type: choice, instructions: x, choices: {1: one, 2: null}}"
    objects = "{type: score, instructions: x, levels: [{label: 10}, {label: 20, description: y}]}"
    criteria = "{type: score, instructions: x, criteria: [1, 2]}"
    found = questions(f"questions: {{a: {mapped}, b: {objects}, c: {criteria}}}")
    assert [[own.text for own in each.question.options] for each in found] == [["1", "2"], ["10", "20"], ["1", "2"]]
    assert "choices[2]: 3.1 is not text" in refused(f"questions: {{a: {listed}}}")


@pytest.mark.parametrize(
    ("levels", "numbers"),
    [
        (["1", "2", "3", "4", "5"], (1, 2, 3, 4, 5)),
        ([0, 10, 100], (0, 10, 100)),
        (["-1", "0.5", "1e3"], (-1, 0.5, 1000)),
        (["calm", "annoyed", "angry"], (0, 1, 2)),
        (["1", "2", "many"], (0, 1, 2)),
        (["1", "nan"], (0, 1)),
        ({"1": "bad", "2": None, "5": "good"}, (1, 2, 5)),
    ],
)
def test_levels_that_are_numbers_stand_for_themselves_and_names_count_from_0(levels: Any, numbers: Any) -> None:
    (found,) = questions(entry(type="score", levels=levels))
    assert found.question.values == numbers


def test_the_numbers_of_levels_may_be_given() -> None:
    (found,) = questions(entry(type="score", levels=["low", "high"], values=[1, 10]))
    assert found.question.values == (1, 10)
    own = Score("How?", ["low", "high"], (1, 10), name="a")
    (found,) = questions(json.dumps({"questions": [own.to_json()]}))
    assert found.question.values == (1, 10)
