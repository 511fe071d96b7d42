"""Typed questions: the answers of transformers' eager forward, in columns by their type."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prefillcli
from prefillcli import Choice, Predicate, Score, Scorer, UsageError
from prefillcli.asking.forms import QUESTION_END, orders_of, text_of, with_answers
from prefillcli.asking.question_file import read_questions
from prefillcli.prompts import templates
from prefillcli.prompts.questions import Question
from prefillcli.tools.verify import verify_job
from tests.adapters import save_adapter
from tests.jobs.jobs import TOLERANCE, Reference, read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.test_likelihood import encoded_pair, likelihood

TEXTS = ["I want my money back for this phone.", "The parcel came, thank you!", "It broke, and nobody answers."]
REFUND = Predicate("Does the customer ask for a refund?", name="refund", true="the money is wanted back")
TOPIC = Choice(
    "What is it about?", {"delivery": "the way of a parcel", "device": None, "delivery time": None}, name="topic"
)
ANGER = Score("How angry is the customer?", ["calm", "annoyed", "angry", "furious"], name="anger")


def shares(reference: Reference, text: str, question: Question, order: Any = None, heat: float = 1.0) -> list[float]:
    """The probability of each option among all, by transformers' eager forward over the whole prompt."""
    prompt = text + text_of(question, order) + QUESTION_END
    logprobs = []
    for label in with_answers(question, order).answers:
        said = [f" {label.said or label.name}"] if label.variants is None else label.variants
        logprobs.append([sum(likelihood(reference, *encoded_pair(reference, prompt, own))[0]) for own in said])
    masses = [sum(map(math.exp, own)) ** (1 / heat) for own in logprobs]
    return [mass / sum(masses) for mass in masses]


HEAT = {"noul": 2.5, "choice": 0.5, "score": 1.5}


@pytest.fixture
def tempered(model: Path, tmp_path: Path) -> Path:
    """The model with a temperature for each type of question."""
    folder = Path(shutil.copytree(model, tmp_path / "tempered"))
    (folder / "temperatures.json").write_text(json.dumps(HEAT | {"fitted_on": "a slice"}))
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def ask(question: Question, **more: Any) -> list[dict[str, Any]]:
    write_parquet("in.parquet", text=TEXTS)
    Path("q.json").write_text(json.dumps({"questions": [question.to_json()]}))
    assert score(Path("in.parquet"), questions="q.json", overwrite=True, **more)["exit_code"] == 0
    return read_output("out.parquet")


def test_a_predicate_is_the_probability_of_yes(model: Path, reference: Reference) -> None:
    for text, row in zip(TEXTS, ask(REFUND, model=model), strict=True):
        assert abs(row["refund"] - shares(reference, text, REFUND)[0]) < TOLERANCE


def test_a_models_temperatures_divide_answers_by_the_type_of_question(
    model: Path, tempered: Path, reference: Reference
) -> None:
    words = Choice("What?", ["a phone", "the parcel"], name="words")
    for question, heat in ((REFUND, 2.5), (TOPIC, 0.5), (words, 0.5), (ANGER, 1.5)):
        for text, row in zip(TEXTS, ask(question, model=tempered), strict=True):
            wanted = shares(reference, text, question, heat=heat)
            found = row.get(f"{question.name}.probabilities", {"": row[question.name]}).values()
            assert all(abs(a - b) < TOLERANCE for a, b in zip(found, wanted, strict=False))
    layout = read_report("out.run.json")["layout"]
    assert layout == {"type": None, "temperatures": HEAT, "curve": None}
    for norm in ("bytes", "tokens"):
        one, two = (ask(words, model=each, label_norm=norm) for each in (model, tempered))
        for both in zip(one, two, strict=True):
            raw, hot = (
                math.log(row["words.probabilities"]["a phone"] / row["words.probabilities"]["the parcel"])
                for row in both
            )
            assert abs(raw / 0.5 - hot) < 1e-4
    rows = ask(ANGER, model=tempered, layout="generic")
    assert [row["anger"] for row in rows] == [row["anger"] for row in ask(ANGER, model=model)]
    assert "layout" not in read_report("out.run.json")


@pytest.mark.parametrize("api", ["openai", "systemone"])
def test_a_models_temperatures_divide_the_answers_to_requests(tempered: Path, reference: Reference, api: str) -> None:
    levels = [{"label": each.text} for each in ANGER.options]
    asked: Any = {"type": "score", "instructions": ANGER.instructions, "levels": levels}
    body = {"input": TEXTS[0], "questions": [asked]}
    if api == "systemone":
        asked = {"type": "score", "instructions": ANGER.instructions, "criteria": [each["label"] for each in levels]}
        body = {"state": TEXTS[0], "questions": {"q": asked}}
    write_jsonl("in.jsonl", [body])
    assert score("in.jsonl", "out.jsonl", model=tempered)["exit_code"] == 0
    answers = read_output("out.jsonl")[0]["response"]["body"]["answers"]
    (found,) = answers if api == "openai" else answers.values()
    wanted = sum(level * own for level, own in enumerate(shares(reference, TEXTS[0], ANGER, heat=1.5)))
    assert abs(found["score"] - wanted) < 10 * TOLERANCE


def test_an_adapter_has_temperatures_of_its_own(
    model: Path, tempered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = save_adapter(model, tmp_path / "adapter")
    without = [row["refund"] for row in ask(REFUND, model=tempered, adapter={"a": str(adapter)})]
    (adapter / "temperatures.json").write_text('{"noul": 4}')
    found = [row["refund"] for row in ask(REFUND, model=tempered, adapter={"a": str(adapter)})]
    for one, other in zip(without, found, strict=True):
        assert abs(math.log(one / (1 - one)) / 4 - math.log(other / (1 - other))) < 1e-4
    write_parquet("in.parquet", text=TEXTS, who=["a"] * 3)
    several = {"adapter": {"a": str(adapter)}, "adapter_column": "who"}
    assert score("in.parquet", "o.parquet", model=model, ask="Late?", **several)["exit_code"] == 2
    assert "temperatures.json is for its own rows" in capsys.readouterr().err


def test_a_choice_is_its_likeliest_option(model: Path, reference: Reference) -> None:
    for text, row in zip(TEXTS, ask(TOPIC, model=model), strict=True):
        wanted = shares(reference, text, TOPIC)
        assert list(row["topic.probabilities"]) == ["delivery", "device", "delivery time"]
        assert all(abs(a - b) < TOLERANCE for a, b in zip(row["topic.probabilities"].values(), wanted, strict=True))
        assert row["topic"] == max(zip(wanted, row["topic.probabilities"], strict=True))[1]
        assert abs(row["topic.confidence"] - (max(wanted) - 1 / 3) / (1 - 1 / 3)) < 2 * TOLERANCE


def test_a_score_is_the_expected_level(model: Path, reference: Reference) -> None:
    for text, row in zip(TEXTS, ask(ANGER, model=model), strict=True):
        wanted = shares(reference, text, ANGER)
        assert abs(row["anger"] - sum(level * own for level, own in enumerate(wanted))) < 10 * TOLERANCE
        likeliest = wanted.index(max(wanted))
        spread = sum(own * abs(level - likeliest) for level, own in enumerate(wanted))
        assert abs(row["anger.confidence"] - max(0, 1 - spread / 1)) < 10 * TOLERANCE  # (1.5 + .5 + .5 + 1.5) / 4


def test_levels_that_are_numbers_are_their_own_values(model: Path, reference: Reference) -> None:
    write_parquet("in.parquet", text=TEXTS)
    asked = Score("How good is it?", ["1", "2", "3", "5"], name="answer")
    flags = {"model": model, "ask": asked.instructions, "levels": "1,2,3,5"}
    assert score(Path("in.parquet"), **flags)["exit_code"] == 0
    for text, row in zip(TEXTS, read_output("out.parquet"), strict=True):
        wanted = shares(reference, text, asked)
        assert abs(row["answer"] - sum(a * b for a, b in zip((1, 2, 3, 5), wanted, strict=True))) < 10 * TOLERANCE
        assert list(row["answer.probabilities"]) == ["1", "2", "3", "5"]


def test_the_column_of_a_score_says_what_its_levels_stand_for(model: Path) -> None:
    write_parquet("in.parquet", text=TEXTS)
    anger, stars = ANGER.to_json(), {"name": "stars", "type": "score", "instructions": "x", "levels": [1, 2.5, 4]}
    stars["levels"] = ["1", "2.5", "4"]
    Path("q.json").write_text(json.dumps({"questions": [anger, stars, REFUND.to_json()]}))
    assert score(Path("in.parquet"), model=model, questions="q.json")["exit_code"] == 0
    with Scorer(model, questions="q.json") as scorer:
        tables = [pq.read_schema("out.parquet"), scorer(TEXTS).schema, scorer("in.parquet").schema]
    for schema in tables:
        told = {field.name: field.metadata[b"levels"] for field in schema if b"levels" in (field.metadata or {})}
        assert {name: json.loads(text) for name, text in told.items()} == {
            "anger": {"calm": 0, "annoyed": 1, "angry": 2, "furious": 3},
            "stars": {"1": 1, "2.5": 2.5, "4": 4},
        }


@pytest.mark.parametrize("question", [TOPIC, ANGER], ids=["choice", "score"])
def test_an_answer_in_several_orders_is_their_mean(model: Path, reference: Reference, question: Question) -> None:
    rows = ask(question, model=model, orders=3)
    orders = orders_of(question, 3)
    decided = 0
    for text, row in zip(TEXTS, rows, strict=True):
        each = [shares(reference, text, question, order) for order in orders]
        wanted = [sum(own) / len(orders) for own in zip(*each, strict=True)]
        found = row[f"{question.name}.probabilities"].values()
        assert all(abs(a - b) < TOLERANCE for a, b in zip(found, wanted, strict=True))
        said = {own.index(max(own)) for own in each}
        assert row[f"{question.name}.order_decided"] == (len(said) > 1)
        decided += len(said) > 1
    (told,) = read_report()["orders"]
    assert (told["question"], told["rows"], told["decided"]) == (question.name, len(TEXTS), decided)


def test_rotations_hold_every_option_at_every_place() -> None:
    question = Choice("?", [f"option {number}" for number in range(5)])
    assert sorted(zip(*orders_of(question, 5), strict=True)) == sorted(
        tuple((place + start) % 5 for start in range(5)) for place in range(5)
    )
    assert [list(own) for own in orders_of(question, 9)] == [list(own) for own in orders_of(question, 5)]
    assert [list(own) for own in orders_of(ANGER, 4)] == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert [list(own) for own in orders_of(REFUND, 4)] == [[0, 1]]


@pytest.mark.parametrize(
    ("flags", "question"),
    [
        ({}, Predicate("How is it?")),
        ({"options": "good,bad"}, Choice("How is it?", ["good", "bad"])),
        ({"levels": "bad,fair,good"}, Score("How is it?", ["bad", "fair", "good"])),
    ],
    ids=["predicate", "choice", "score"],
)
def test_a_question_on_the_command_line_is_that_of_a_file(
    model: Path, flags: dict[str, Any], question: Question
) -> None:
    write_parquet("in.parquet", text=TEXTS)
    assert score(Path("in.parquet"), model=model, ask="How is it?", **flags)["exit_code"] == 0
    asked = read_output("out.parquet")
    write_parquet("in.parquet", document=TEXTS)
    Path("q.json").write_text(json.dumps({"questions": [question.to_json() | {"name": "answer"}]}))
    assert score(Path("in.parquet"), model=model, questions="q.json", output="other.parquet")["exit_code"] == 0
    timed = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in timed} for row in asked] == [
        {k: v for k, v in row.items() if k not in timed} for row in read_output("other.parquet")
    ]


def test_options_that_are_all_boolean_give_a_boolean_column(model: Path) -> None:
    write_parquet("in.parquet", text=TEXTS)
    question = {"name": "sure", "type": "choice", "instructions": "Is it sure?", "choices": [True, False]}
    Path("q.json").write_text(json.dumps({"questions": [question]}))
    assert score(Path("in.parquet"), model=model, questions="q.json")["exit_code"] == 0
    table = pq.read_table("out.parquet")
    assert table["sure"].type == pa.bool_()
    assert table["sure"].to_pylist() == [own["true"] > 0.5 for own in table["sure.probabilities"].to_pylist()]


def test_questions_from_python_are_those_of_a_file(model: Path) -> None:
    with Scorer(model, questions=[REFUND, TOPIC, ANGER]) as scorer:
        scored = scorer.score([{"text": text} for text in TEXTS])
    for question in (REFUND, TOPIC, ANGER):
        rows = ask(question, model=model)
        for found, row in zip(scored[f"{question.name}.label_mass"].to_pylist(), rows, strict=True):
            assert abs(found - row[f"{question.name}.label_mass"]) < TOLERANCE
    assert prefillcli.Predicate is Predicate


NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=3, unique=True)


def answers_of(model: Path, chosen: list[int], names: list[str]) -> dict[int, list[Any]]:
    every = [REFUND, TOPIC, ANGER]
    asked = [every[at].to_json() | {"name": names[at]} for at in chosen]
    with Scorer(model, questions=asked, deterministic=True) as scorer:
        table = scorer.score([{"text": text} for text in TEXTS])
    return {at: [table[names[at]].to_pylist(), table[f"{names[at]}.label_mass"].to_pylist()] for at in chosen}


@cache
def usual_answers(model: Path) -> dict[int, list[Any]]:
    return answers_of(model, [0, 1, 2], ["x", "y", "z"])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations([0, 1, 2]), few=st.integers(1, 3), names=NAMES)
def test_an_answer_depends_on_no_name_and_no_other_question(
    model: Path, order: list[int], few: int, names: list[str]
) -> None:
    usual = usual_answers(model)
    for at, found in answers_of(model, order[:few], names).items():
        assert found == usual[at]  # the same bits


@pytest.mark.parametrize("empty_text", ["skip", "error"])
def test_a_row_without_a_document_is_left_out_or_an_error_row(model: Path, empty_text: str) -> None:
    write_parquet("in.parquet", text=["A fox.", None, "", " \n", "A dog."])
    done = score(Path("in.parquet"), model=model, ask="Is it an animal?", empty_text=empty_text)
    assert done["exit_code"] == (0 if empty_text == "skip" else 3)
    rows = read_output("out.parquet")
    errors = ["null_prompt", "empty_prompt", "empty_prompt"] if empty_text == "error" else ["skipped_empty"] * 3
    assert [row["error"] for row in rows] == [None, *errors, None]
    assert [row["answer"] for row in rows[1:4]] == [None] * 3


@pytest.mark.parametrize("on_long", ["truncate-left", "truncate-middle", "truncate-right"])
def test_a_long_document_is_cut_and_its_question_is_not(model: Path, on_long: str) -> None:
    write_parquet("in.parquet", text=["fox " * 400, "dog"], right=[True, False])
    flags: dict[str, Any] = {"ask": "Is it a fox?", "max_length": 64, "on_long": on_long}
    flags |= {"truth": "right", "show_text": True}
    assert score(Path("in.parquet"), model=model, **flags)["exit_code"] == 0
    row, _ = read_output("out.parquet")
    assert row["truncated"]
    assert row["prompt_tokens"] <= 64
    evaluation = read_report()["evaluations"]["answer"]
    shown = [*evaluation["surest_wrong"], *evaluation["near_threshold"]]
    assert shown[0]["text"].endswith(text_of(Predicate("Is it a fox?")) + QUESTION_END)


RENDERED = [
    ("Is it the {{ product }}?", ["Is it the phone?", "Is it the parcel?", "Is it the it's {{ x }}?"]),
    ("{% if n > 1 %}More{% else %}One{% endif %}?", ["One?", "More?", "More?"]),
]


@pytest.mark.parametrize(("ask", "said"), RENDERED)
@pytest.mark.parametrize("orders", [1, 2])
def test_columns_of_the_row_in_a_question_are_rendered(
    model: Path, reference: Reference, ask: str, said: list[str], orders: int
) -> None:
    write_parquet("in.parquet", text=TEXTS, product=["phone", "parcel", "it's {{ x }}"], n=[1, 2, 3])
    options = "{{ n }},b" if orders == 2 else ""  # only what is asked is rendered
    flags: dict[str, Any] = {"options": options, "orders": orders} if options else {}
    assert score(Path("in.parquet"), model=model, ask=ask, **flags)["exit_code"] == 0
    for text, each, row in zip(TEXTS, said, read_output("out.parquet"), strict=True):
        if orders == 1:
            assert abs(row["answer"] - shares(reference, text, Predicate(each, name="answer"))[0]) < TOLERANCE
            continue
        question = Choice(each, ["{{ n }}", "b"], name="answer")
        found = [shares(reference, text, question, order) for order in orders_of(question, orders)]
        assert abs(row["answer.probabilities"]["b"] - sum(own[1] for own in found) / 2) < TOLERANCE


def test_a_rendered_question_stands_beside_others_in_a_file_and_in_a_scorer(model: Path, reference: Reference) -> None:
    rows = {"body": TEXTS, "product": ["phone", "parcel", None], "text": ["x", "", "y"]}
    write_parquet("in.parquet", **rows)
    asked = Predicate("Is it the {{ product or 'shop' }}?", name="asked")
    Path("q.json").write_text(
        json.dumps({"document": "{{ body }}", "questions": [own.to_json() for own in (asked, REFUND, TOPIC)]})
    )
    assert score(Path("in.parquet"), model=model, questions="q.json", keep_columns="product")["exit_code"] == 0
    with Scorer(model, questions="q.json") as scorer:
        tables = [scorer(pa.table(rows)).to_pylist() for _ in range(2)]
    for found in (read_output("out.parquet"), *tables):
        for text, name, row in zip(TEXTS, ["phone", "parcel", "shop"], found, strict=True):
            own = Predicate(f"Is it the {name}?", name="asked")
            assert abs(row["asked"] - shares(reference, text, own)[0]) < TOLERANCE
            assert abs(row["refund"] - shares(reference, text, REFUND)[0]) < TOLERANCE


def test_a_rendered_question_leaves_empty_documents_and_wrong_columns_to_be_told(model: Path) -> None:
    write_parquet("in.parquet", text=["", None, " ", TEXTS[0]], product=["a", "b", "c", "d"], n=[1, 0, 1, 0])
    score(Path("in.parquet"), model=model, ask="Is it the {{ product }}?", max_error_rate=1, empty_text="error")
    assert [row["error"] for row in read_output("out.parquet")] == [
        "empty_prompt",
        "null_prompt",
        "empty_prompt",
        None,
    ]
    score(Path("in.parquet"), model=model, ask="Is it {{ 1 // n }}?", max_error_rate=1, overwrite=True)
    assert read_output("out.parquet")[3]["error"] == "template_error"
    for ask, told in (
        ("Is it the {{ produkt }}?", "no column 'produkt'"),
        ("Is it {{ a?", "question 'answer': instru"),
    ):
        summary = score(Path("in.parquet"), model=model, ask=ask, overwrite=True)
        assert summary["exit_code"] == 2
        assert told in summary["error"]
        assert "file" not in summary["error"]


def test_a_long_document_is_cut_and_its_rendered_question_is_not(model: Path, reference: Reference) -> None:
    long, product = " ".join(["fox"] * 500), "the red phone"
    write_parquet("in.parquet", text=[long], product=[product])
    flags = {"ask": "Is it {{ product }}?", "max_length": 60, "on_long": "truncate-right"}
    assert score(Path("in.parquet"), model=model, **flags)["exit_code"] == 0
    (row,) = read_output("out.parquet")
    assert row["truncated"]
    question = Predicate(f"Is it {product}?", name="answer")
    cuts = [shares(reference, " ".join(["fox"] * count), question)[0] for count in range(1, 60)]
    assert min(abs(row["answer"] - cut) for cut in cuts) < TOLERANCE


def test_the_text_of_a_control_token_in_a_document_stays_text(model: Path) -> None:
    write_parquet("in.parquet", text=["Some </s> text", "Some other text"])
    assert score(Path("in.parquet"), model=model, ask="Is it text?")["exit_code"] == 0
    assert [row["error"] for row in read_output("out.parquet")] == [None, None]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"type": "yesno", "instructions": "x"}, 'type "yesno": should be predicate, choice or score$'),
        ({"type": "choice", "instructions": "x", "choices": ["a"]}, "choices: 1 option, at least 2"),
        ({"type": "choice", "instructions": "x", "choices": ["a", "b", "a"]}, "the option 'a' is given twice"),
        (
            {"type": "choice", "instructions": "x", "choices": [str(at) for at in range(256)]},
            "256 options, at most 255",
        ),
        ({"type": "score", "instructions": "x", "levels": ["a", {"description": "b"}]}, "label is missing"),
        ({"type": "score", "instructions": "x", "levels": ["a"]}, "1 level, at least 2"),
        ({"type": "predicate", "instructions": " "}, "instructions: is empty"),
        ({"type": "predicate"}, "instructions is missing"),
        (
            {"type": "predicate", "instructions": "x", "labels": ["a", "b"]},
            "labels: a question with a type has choices",
        ),
        ({"type": "predicate", "instructions": "x", "choices": ["a", "b"]}, "choices: not supported"),
        ({"type": "predicate", "instructions": "x", "swap": ["a", "b"]}, "swap exchanges two columns"),
        ({"type": "predicate", "template": "{{ text }}", "orders": 2}, "orders: its prompt is its own"),
        ({"instructions": "x", "labels": ["a", "b"], "template": "y"}, "belongs to a question with a type"),
        ({"type": "predicate", "instructions": "x", "name": "score"}, "every output has a column score"),
    ],
)
def test_a_wrong_question_is_refused_with_its_place(model: Path, question: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Scorer(model, questions=[{"name": "q", **question}])


def test_a_map_of_questions_is_taken_as_system_one_has_it(model: Path) -> None:
    write_parquet("in.parquet", text=TEXTS)
    content = {
        "refund": {"type": "noul", "instructions": REFUND.instructions, "criteria": {"true": REFUND.true}},
        "topic": {"type": "choice", "instructions": TOPIC.instructions, "criteria": dict(TOPIC.choices)},
        "anger": {"type": "score", "instructions": ANGER.instructions, "criteria": [own.text for own in ANGER.levels]},
    }
    Path("q.yaml").write_text(json.dumps({"questions": content}))
    assert score(Path("in.parquet"), model=model, questions="q.yaml")["exit_code"] == 0
    found = read_output("out.parquet")
    for question in (REFUND, TOPIC, ANGER):
        for one, row in zip(ask(question, model=model), found, strict=True):
            assert abs(one[f"{question.name}.label_mass"] - row[f"{question.name}.label_mass"]) < TOLERANCE


def test_a_job_names_the_column_to_ask_about_where_none_is_usual(model: Path) -> None:
    write_parquet("in.parquet", subject=TEXTS, body=TEXTS)
    assert "has no column prompt or text or document; it has subject, body" in str(
        score(Path("in.parquet"), model=model, ask="Is it?")["error"]
    )
    assert score(Path("in.parquet"), model=model, ask="Is it?", prompt_column="body")["exit_code"] == 0
    one = read_output("out.parquet")
    flags = {"template": "{{ subject }}", "output": "other.parquet"}
    assert score(Path("in.parquet"), model=model, ask="Is it?", **flags)["exit_code"] == 0
    assert [row["answer"] for row in one] == [row["answer"] for row in read_output("other.parquet")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv"])
def test_answers_are_worth_the_same_in_every_format(model: Path, ending: str) -> None:
    write_parquet(
        "in.parquet", text=TEXTS * 4, late=["Yes", "No", "Yes"] * 4, kind=["device", "delivery", "device"] * 4
    )
    Path("q.json").write_text(json.dumps({"questions": [own.to_json() for own in (REFUND, TOPIC, ANGER)]}))
    flags: dict[str, Any] = {"model": model, "questions": "q.json", "truth": "refund=late,topic=kind"}
    found = []
    for output in ("one.parquet", f"other.{ending}"):
        assert score(Path("in.parquet"), output, **flags)["exit_code"] == 0
        report = read_report(f"{Path(output).stem}.run.json")
        found.append([report["evaluations"], report["correlations"], report.get("orders"), report["rows"]])
        assert verify_job(output, quiet=True)["status"] == "complete"
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (
            {"type": "yesno", "instructions": "x"},
            "question 'late': type \"yesno\": should be predicate, choice or score$",
        ),
        ({"type": "predicate", "instruction": "x"}, "question 'late': unknown key 'instruction'; did you mean"),
        (5, "question number 1: should be a mapping"),
    ],
)
def test_a_wrong_question_of_a_map_is_refused_with_its_place(question: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps({"questions": {"late": question}}))
    with pytest.raises(UsageError, match=said):
        read_questions(str(file))


def test_a_file_of_questions_may_be_given_as_its_text(model: Path) -> None:
    write_parquet("in.parquet", text=TEXTS)
    text = json.dumps({"questions": [Predicate("How is it?", name="answer").to_json()]})
    assert "\n" not in text
    assert score(Path("in.parquet"), model=model, questions=text)["exit_code"] == 0
    asked = read_output("out.parquet")
    assert score(Path("in.parquet"), model=model, ask="How is it?", output="other.parquet")["exit_code"] == 0
    assert [row["answer"] for row in asked] == [row["answer"] for row in read_output("other.parquet")]


def test_a_typed_answer_has_its_audit_its_evidence_and_its_text(
    model: Path, draft: Path, reference: Reference
) -> None:
    texts = [f"{text} {'It came by post. ' * 8}\n\n{TEXTS[at - 1]}" for at, text in enumerate(TEXTS)]
    source = write_parquet("in.parquet", text=texts)
    Path("q.json").write_text(json.dumps({"questions": [REFUND.to_json(), TOPIC.to_json()]}))
    flags = {"questions": "q.json", "template": "{{ text }}", "model": model, "overwrite": True}
    assert score(source, evidence=True, rationale=4, **flags)["exit_code"] == 0
    for row, text in zip(read_output("out.parquet"), texts, strict=True):
        for question in (REFUND, TOPIC):
            whole = shares(reference, text, question)[0]
            changes = {each["section"]: each["change"] for each in row[f"{question.name}.evidence"]}
            first, second = text.split("\n\n")
            for section, rest in (("text, paragraph 1", second), ("text, paragraph 2", first.rstrip())):
                without = shares(reference, rest, question)[0]
                assert changes[section] == pytest.approx(whole - without, abs=5 * TOLERANCE)
            assert row[f"{question.name}.rationale_tokens"] == 4
    short = {"draft": draft, "keep": 0.5, "compress_above": 0, "audit": len(texts)}
    assert score(source, **flags, **short)["exit_code"] == 0
    for row, text in zip(read_output("out.parquet"), texts, strict=True):
        assert row["kept_tokens"] < row["prompt_tokens"]
        for question in (REFUND, TOPIC):
            wanted = shares(reference, text, question)
            assert row[f"{question.name}.audit_score"] == pytest.approx(wanted[0], abs=TOLERANCE)
            assert row[f"{question.name}.audit_prediction"] == question.names[wanted.index(max(wanted))]
    audits = {name: each["rows"] for name, each in read_report()["audits"].items()}
    assert audits == {"refund": len(texts), "topic": len(texts)}


def test_all_questions_share_one_process_for_chats_which_stays(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Counted(templates._Worker):
        def __init__(self, *given: Any) -> None:
            started.append(given)
            super().__init__(*given)

    monkeypatch.setattr(templates, "_Worker", Counted)
    rows = [{"text": text} for text in TEXTS]
    with Scorer(chat_model, questions=[REFUND, TOPIC, ANGER]) as scorer:
        loaded = len(started)
        first = scorer.score(rows)
        assert len(started) == loaded + 1
        assert scorer.score(rows).select(["refund", "topic", "anger"]) == first.select(["refund", "topic", "anger"])
        assert len(started) == loaded + 1
