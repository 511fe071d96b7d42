"""Models in GGUF format that were trained for typed decisions, asked in their own layout: Jinja's own rendering of the
template, and transformers' own eager forward at its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.inspect import inspect_job
from tests.gguf_files import GgufReference, write_gguf
from tests.jobs import jobs
from tests.jobs.answers import confidence_of
from tests.jobs.jobs import Answer, Reference, read_output, read_report, write_jsonl, write_parquet
from tests.jobs.models import save_model

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% set letters = '" + LETTERS + "' %}"
    "State:\n{{ state if state is string else state | tojson }}\n\nQuestion: "
    "{{ instructions if instructions is string else instructions | tojson }}"
    "{% if type == 'score' %} Rate along the ordered levels below (lowest first).{% endif %}"
    "{{ '\\nOptions:\\n' }}"
    "{% for o in options %}[{{ letters[loop.index0] }}] {{ o.key }}: "
    "{% if o.description %}{{ o.description if o.description is string else o.description | tojson }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{{ '\\nAnswer:\\n' }}"
)
LISTING = (
    "{% for q in questions %}{{ q.id }}: {{ q.instructions }}"
    "{% for o in q.options %} {{ o.label }}={{ o.key }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{{ state }}{{ '\\n' }}{{ id }}{{ '\\n' }}"
)
HEAT = {"choice": 0.5, "choice.3_5": 2.0, "noul": 1.5, "score": 0.75}
QUESTIONS: dict[str, Any] = {
    "route": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"pay": "money", "it": None, "hr": "x"},
    },
    "urgency": {"type": "score", "instructions": {"ask": "How urgent?"}, "criteria": ["low", {"level": "high"}]},
    "angry": {"type": "noul", "instructions": "Is the customer angry?", "criteria": {"true": "shouts"}},
    "pair": {"type": "choice", "instructions": "One or two?", "criteria": {"one": None, "two": None}},
}
STATES: list[Any] = [
    "I was charged twice.",
    {"ticket": "Straße 7", "plan": ["pro", 1.5, True, None]},
    ["a", {"b": "c"}],
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def made(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model with a type, a template and temperatures."""

    def write(
        type_: str, template: str | None = TEMPLATE, heat: Mapping[str, float] = HEAT, model: Path = chat_model
    ) -> Path:
        settings = {"decision.type": type_, **{f"decision.temperature.{name}": each for name, each in heat.items()}}
        path = tmp_path_factory.mktemp("gguf") / "m.gguf"
        return write_gguf(path, model, kind=Kind.Q8_0, settings=settings, systemone=template)

    return write


class Asked:
    """A model as its authors ask it, by the template and the forward of others."""

    def __init__(self, file: Path, template: str = TEMPLATE) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - no HTML
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        self._template, self._model = environment.from_string(template), GgufReference(file)

    def answer(self, heat: float, count: int = 2, *, split: bool = False, **values: Any) -> list[Any]:
        """The probabilities of the first `count` codes, close to these. Control tokens may be `split` as text."""
        return [pytest.approx(float(each), abs=1e-5) for each in self.shares(heat, count, split=split, **values)]

    def shares(self, heat: float, count: int = 2, *, split: bool = False, **values: Any) -> np.ndarray:
        """The same as they are."""
        logprobs = self.logprobs(LETTERS[:count], split=split, **values) / heat
        shares = np.exp(logprobs - logprobs.max())
        return np.asarray(shares / shares.sum())

    def logprobs(self, codes: Sequence[str], *, split: bool = False, **values: Any) -> np.ndarray:
        """The log-probabilities of these codes."""
        text = self._template.render(images=[], **values)
        ids = self._model.tokenizer(text, add_special_tokens=False, split_special_tokens=split).input_ids
        found = self._model.answer(ids, [[code] for code in codes])
        self.mass = found.label_mass  # of all of them
        return np.array(found.logprobs)


def score(*paths: str | Path, **flags: Any) -> dict[str, Any]:
    """The summary of a job in float32, on machines that would take another dtype, too."""
    return jobs.score(*paths, **{"dtype": "float32", **flags})


def options(**described: Any) -> list[dict[str, Any]]:
    return [{"key": key, "description": each} for key, each in described.items()]


def test_requests_are_asked_in_the_layout_of_the_model(made: Callable[..., Path]) -> None:
    file = made("openjev")
    asked = Asked(file)
    write_jsonl("in.jsonl", [{"state": state, "questions": QUESTIONS} for state in STATES])
    assert score("in.jsonl", "out.jsonl", model=file)["exit_code"] == 0
    for state, row in zip(STATES, read_output("out.jsonl"), strict=True):
        found = row["response"]["body"]["answers"]
        listed = options(pay="money", it=None, hr="x")
        own = asked.answer(2.0, 3, state=state, type="choice", instructions="Which team?", options=listed)
        assert list(found["route"]["probabilities"].values()) == own
        listed = options(**{"0": "low", "1": {"level": "high"}})
        own = asked.answer(0.75, state=state, type="score", instructions={"ask": "How urgent?"}, options=listed)
        assert found["urgency"]["score"] == own[1]
        listed = options(true="shouts", false=None)
        own = asked.answer(1.5, state=state, type="noul", instructions="Is the customer angry?", options=listed)
        assert found["angry"]["noul"] == own[0]
        listed = options(one=None, two=None)
        own = asked.answer(0.5, state=state, type="choice", instructions="One or two?", options=listed)
        assert found["pair"]["probabilities"]["one"] == own[0]
    use = read_report("out.run.json")["layout"]
    assert use == {"type": "openjev", "temperatures": HEAT, "curve": None}


def test_codes_are_tokens_whatever_the_prompt_ends_in(made: Callable[..., Path]) -> None:
    """White space at its end stays with the prompt, and no code is joined with what is before it."""
    for end in ("Answer: (", "Answer: ", "Answer:\n"):
        template = TEMPLATE.replace("\\nAnswer:\\n", end.replace("\n", "\\n"))
        file = made("openjev", template)
        write_parquet("in.parquet", text=["one text"])
        assert score("in.parquet", model=file, ask="Is it late?", overwrite=True)["exit_code"] == 0
        listed = options(true=None, false=None)
        given = {"state": "one text", "type": "noul", "instructions": "Is it late?", "options": listed}
        (row,) = read_output("out.parquet")
        assert row["answer"] == Asked(file, template).answer(1.5, **given)[0]


def test_questions_of_a_file_are_asked_in_it_too(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = made("openjev")
    asked = Asked(file)
    Path("q.yaml").write_text(
        json.dumps(
            {
                "questions": [
                    {"name": "late", "type": "predicate", "instructions": "Is it late?"},
                    {"name": "kind", "type": "choice", "instructions": "Which?", "choices": [A, {"value": "b"}]},
                    {"name": "how", "type": "score", "instructions": "How much?", "levels": [{"label": "low"}, HIGH]},
                ]
            }
        )
    )
    write_parquet("in.parquet", text=["one text", "another text"])
    done = score("in.parquet", model=file, questions="q.yaml")
    assert done["exit_code"] == 0
    # This model has not learnt the layout, and what people are told to do about that is of use.
    check = "check that the model's files have the type and the template that it was trained with"
    assert f"\n{check}\n" in capsys.readouterr().err
    assert check in done["verdict"]["reasons"]
    for text, row in zip(["one text", "another text"], read_output("out.parquet"), strict=True):
        listed = options(true=None, false=None)
        own = asked.answer(1.5, state=text, type="noul", instructions="Is it late?", options=listed)
        assert row["late"] == own[0]
        own = asked.answer(0.5, state=text, type="choice", instructions="Which?", options=options(a="an a", b=None))
        assert row["kind.probabilities"]["a"] == own[0]
        listed = options(**{"0": "low", "1": "high: x"})
        own = asked.answer(0.75, state=text, type="score", instructions="How much?", options=listed)
        assert row["how"] == own[1]


A, HIGH = {"value": "a", "description": "an a"}, {"label": "high", "description": "x"}


def test_other_orders_of_the_options_have_the_codes_in_theirs(made: Callable[..., Path]) -> None:
    file = made("openjev")
    asked = Asked(file)
    write_jsonl("in.jsonl", [{"state": "a text", "questions": {"pair": QUESTIONS["pair"]}}])
    assert score("in.jsonl", "out.jsonl", model=file, format="systemone", orders=2)["exit_code"] == 0
    given = {"state": "a text", "type": "choice", "instructions": "One or two?"}
    one, other = (asked.answer(0.5, options=options(**own), **given) for own in ORDERS)
    (row,) = read_output("out.jsonl")
    mean = (one[0].expected + other[1].expected) / 2
    assert row["response"]["body"]["answers"]["pair"]["probabilities"]["one"] == pytest.approx(mean, abs=1e-5)


ORDERS = ({"one": None, "two": None}, {"two": None, "one": None})


def test_inspect_names_the_layout_and_shows_its_answer(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = made("openjev")
    write_parquet("in.parquet", text=["one text"])
    given = {"inputs": ["in.parquet"], "ask": "Is it late?", "model": str(file), "row": "0", "html": "row.html"}
    given |= {"dtype": "float32"}
    done = inspect_job(load_settings(InspectSettings, given, environment={}))
    assert done["exit_code"] == 0
    listed = options(true=None, false=None)
    own = Asked(file).answer(1.5, state="one text", type="noul", instructions="Is it late?", options=listed)
    assert done["score"] == own[0]
    assert "openjev, the model" in Path("row.html").read_text()


def test_a_layout_may_list_all_questions_of_a_row(made: Callable[..., Path]) -> None:
    file = made("nimble", LISTING)
    asked = Asked(file, LISTING)
    write_jsonl("in.jsonl", [{"state": "a text", "questions": {"x": QUESTIONS["pair"], "y": QUESTIONS["angry"]}}])
    assert score("in.jsonl", "out.jsonl", model=file)["exit_code"] == 0
    coded = [[{"label": code, "key": key} for code, key in zip("AB", keys, strict=True)] for keys in CODED]
    listed = [
        {"id": name, "instructions": QUESTIONS[own]["instructions"], "options": each}
        for name, own, each in zip("xy", ("pair", "angry"), coded, strict=True)
    ]
    (row,) = read_output("out.jsonl")
    assert (
        row["response"]["body"]["answers"]["y"]["noul"]
        == asked.answer(1.5, state="a text", id="y", questions=listed)[1]
    )
    found = row["response"]["body"]["answers"]["x"]["probabilities"]["one"]
    assert found == asked.answer(0.5, state="a text", id="x", questions=listed)[0]


CODED = (("one", "two"), ("false", "true"))


EVIDENCE = (
    "{{ '# Evidence\\n' }}{{ state if state is string else state | tojson }}{{ '\\n' }}"
    "{{ instructions if instructions is string else instructions | tojson }}{{ '\\n' }}"
    "{% if type == 'noul' %}0 = certainly no ... 8 = certainly yes{% else %}"
    "{% for o in options %}{{ o.label }}. {{ o.key }} {{ '' if o.description is none else o.description | tojson }}"
    "{{ '\\n' }}{% endfor %}{% endif %}"
)
BANDS = {"choice.small": 0.5, "score.small": 0.75, "noul.small": 1.5, "choice": 3.0, "score": 3.0, "noul": 3.0}


def test_lev_reads_choices_in_two_orders_and_predicates_from_ratings(made: Callable[..., Path]) -> None:
    file = made("lev", EVIDENCE, BANDS)
    asked = Asked(file, EVIDENCE)
    state = {"b": 1.0, "a": {"z": [{"y": 1, "x": 2}], "c": None}}
    ordered = {"a": {"c": None, "z": [{"x": 2, "y": 1}]}, "b": 1}  # what the model was trained on
    questions = QUESTIONS | {"deep": {"type": "noul", "instructions": {"z": 1, "a": 2}}}
    write_jsonl("in.jsonl", [{"state": state, "questions": questions}])
    assert score("in.jsonl", "out.jsonl", model=file)["exit_code"] == 0
    (row,) = read_output("out.jsonl")
    found = row["response"]["body"]["answers"]
    given = {"state": ordered, "type": "choice", "instructions": "Which team?"}
    listed = [("pay", "money"), ("it", None), ("hr", "x")]
    orders = [
        asked.shares(
            0.5,
            3,
            **given,
            options=[
                {"label": code, "key": key, "description": told} for code, (key, told) in zip("ABC", each, strict=True)
            ],
        )
        for each in (listed, listed[::-1])
    ]
    mean = (orders[0] + orders[1][::-1]) / 2
    assert list(found["route"]["probabilities"].values()) == pytest.approx(mean, abs=1e-5)
    listed = [
        {"label": "A", "key": "0", "description": "low"},
        {"label": "B", "key": "1", "description": {"level": "high"}},
    ]
    own = asked.shares(0.75, state=ordered, type="score", instructions={"ask": "How urgent?"}, options=listed)
    assert found["urgency"]["score"] == pytest.approx(own[1], abs=1e-5)
    for name, instructions in (("angry", "Is the customer angry?"), ("deep", {"a": 2, "z": 1})):
        own = asked.shares(1.5, 9, state=ordered, type="noul", instructions=instructions)
        assert found[name]["noul"] == pytest.approx(own @ np.arange(9) / 8, abs=1e-5)
        assert 0.2 < found[name]["noul"] < 0.8


def test_questions_of_a_file_are_asked_like_that_too(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = made("lev", EVIDENCE, BANDS)
    asked = Asked(file, EVIDENCE)
    write_parquet("in.parquet", text=["one text", "another text"])
    questions = [
        {"name": "kind", "type": "choice", "instructions": "Which?", "choices": ["a", "b", "c"]},
        {"name": "late", "type": "predicate", "instructions": "Is it late?"},
    ]
    Path("q.yaml").write_text(json.dumps({"questions": questions}))
    assert score("in.parquet", model=file, questions="q.yaml")["exit_code"] == 0
    for text, row in zip(["one text", "another text"], read_output("out.parquet"), strict=True):
        orders = [
            asked.shares(
                0.5,
                3,
                state=text,
                type="choice",
                instructions="Which?",
                options=[
                    {"label": code, "key": key, "description": None} for code, key in zip("ABC", keys, strict=True)
                ],
            )
            for keys in ("abc", "cba")
        ]
        assert list(row["kind.probabilities"].values()) == pytest.approx((orders[0] + orders[1][::-1]) / 2, abs=1e-5)
        own = asked.shares(1.5, 9, state=text, type="noul", instructions="Is it late?")
        assert row["late"] == pytest.approx(own @ np.arange(9) / 8, abs=1e-5)
        # All nine codes, whatever they say of the answer.
        assert row["late.label_mass"] == pytest.approx(asked.mass, abs=1e-5)
    capsys.readouterr()
    questions[0]["orders"] = 2
    Path("q.yaml").write_text(json.dumps({"questions": questions}))
    assert score("in.parquet", "other.parquet", model=file, questions="q.yaml")["exit_code"] == 2
    assert "'kind': orders: the model's own layout asks a choice in two orders" in capsys.readouterr().err
    assert score("in.parquet", "other.parquet", model=file, ask="Is it late?", orders=1)["exit_code"] == 2
    assert "--orders 1: the model's own layout asks a choice in two orders" in capsys.readouterr().err


def test_pplx_decider_has_no_answers_but_its_codes(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its head is zero for all other tokens, whose share says nothing of the prompt."""
    file = made("pplx-decider")
    write_parquet("in.parquet", text=["one text"])
    assert score("in.parquet", model=file, ask="Is it late?")["exit_code"] == 0
    assert "hardly ever" not in capsys.readouterr().err
    listed = options(false=None, true=None)
    own = Asked(file).answer(1.5, state="one text", type="noul", instructions="Is it late?", options=listed)
    (row,) = read_output("out.parquet")
    assert row["answer"] == own[1]
    assert row["answer.label_mass"] == pytest.approx(1)


SPELT = (
    "{% if state is not none %}{{ state if state is string else state | tojson(indent=2) }}{% endif %}"
    "{{ '\\nQUESTION:\\n' }}{{ instructions }}"
    "{% if type == 'choice' %}"
    "{% for o in options %}{{ '\\n' }}{{ o.label }} {{ o.key | replace('_', ' ') }}{% endfor %}"
    "{% else %}{% for o in options %}{{ '\\n' }}{{ o.key }} {{ o.description }}{% endfor %}{% endif %}{{ '\\n' }}"
)


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tokens of several spellings."""
    words = "YES\nNO\n A\n B\n c\n Q\n00\n01\n02\n 00\n 01\n"
    return save_model(tmp_path_factory.mktemp("models") / "worded", seed=1, words=words)


def test_lfm2_d1_reads_the_likeliest_spelling_of_each_answer(made: Callable[..., Path], worded: Path) -> None:
    file = made("lfm2-d1", SPELT, {}, worded)
    asked = Asked(file, SPELT)
    state, criteria = {"a": [1, {"b": None}]}, {"Q": None, "c": "x", "A": None}
    many = {f"option_{at}": None for at in range(27)}
    questions = QUESTIONS | {
        "own": {"type": "choice", "instructions": "Which letter?", "criteria": criteria},
        "many": {"type": "choice", "instructions": "Which?", "criteria": many},
    }
    write_jsonl("in.jsonl", [{"state": each, "questions": questions} for each in (state, None)])
    assert score("in.jsonl", "out.jsonl", model=file)["exit_code"] == 0
    row, stateless = read_output("out.jsonl")
    found = row["response"]["body"]["answers"]

    def wanted(groups: Sequence[Sequence[str]], codes: Sequence[str], name: str, **described: Any) -> list[Any]:
        own = questions[name]
        listed = [
            {"label": code, "key": key, "description": told}
            for code, (key, told) in zip(codes, described.items(), strict=True)
        ]
        given = {"state": state, "type": own["type"], "instructions": own["instructions"], "options": listed}
        every = iter(asked.logprobs([each for group in groups for each in group], **given))
        best = np.array([max(next(every) for _ in group) for group in groups])
        return [pytest.approx(float(each), abs=1e-5) for each in np.exp(best) / np.exp(best).sum()]

    words = [["yes", "Yes", "YES"], ["no", "No", "NO"]]
    own = wanted(words, ["true", "false"], "angry", **{"true": "shouts", "false": None})
    assert found["angry"]["noul"] == own[0]
    own = wanted([["0"], ["1"]], "01", "urgency", **{"0": "low", "1": {"level": "high"}})
    assert found["urgency"]["score"] == own[1]
    own = wanted([["A", " A"], ["B", " B"], ["C"]], "ABC", "route", pay="money", it=None, hr="x")
    assert list(found["route"]["probabilities"].values()) == own
    own = wanted([["Q", " Q"], ["c", " c"], ["A", " A"]], "QcA", "own", **criteria)
    assert list(found["own"]["probabilities"].values()) == own
    state = None  # which it may be asked about
    own = wanted(words, ["true", "false"], "angry", **{"true": "shouts", "false": None})
    assert stateless["response"]["body"]["answers"]["angry"]["noul"] == own[0]
    assert own[0] != found["angry"]["noul"]
    state = {"a": [1, {"b": None}]}
    # Of the two digits the tokenizer has three; other options have the next codes that it has, from A on.
    codes = ["00", "01", "02", *LETTERS[:24]]
    groups = [["00", " 00"], ["01", " 01"], ["02"], ["A", " A"], ["B", " B"], *([each] for each in LETTERS[2:24])]
    groups[codes.index("Q")] = ["Q", " Q"]
    assert list(found["many"]["probabilities"].values()) == wanted(groups, codes, "many", **many)


def test_inspect_shows_what_ratings_come_to(made: Callable[..., Path]) -> None:
    file = made("lev", EVIDENCE, BANDS)
    write_parquet("in.parquet", text=["one text"])
    given = {"inputs": ["in.parquet"], "ask": "Is it late?", "model": str(file), "row": "0", "html": "row.html"}
    given |= {"dtype": "float32"}
    done = inspect_job(load_settings(InspectSettings, given, environment={}))
    own = Asked(file, EVIDENCE).shares(1.5, 9, state="one text", type="noul", instructions="Is it late?")
    assert done["score"] == pytest.approx(own @ np.arange(9) / 8, abs=1e-5)


@pytest.mark.parametrize(("type_", "template", "count"), [("openjev", TEMPLATE, 53), ("nimble", LISTING, 255)])
def test_more_options_than_codes_are_an_error_of_the_request(
    made: Callable[..., Path], type_: str, template: str, count: int
) -> None:
    many = {"type": "choice", "instructions": "Which?", "criteria": {f"option {at}": None for at in range(count)}}
    asked = [{"angry": QUESTIONS["angry"], "q": many}, QUESTIONS]  # nimble's prompt about the first lists the second
    write_jsonl("in.jsonl", [{"state": "a", "questions": each} for each in asked])
    done = score("in.jsonl", "out.jsonl", model=made(type_, template), max_error_rate=0.9)
    assert done["exit_code"] == 0
    first, second = read_output("out.jsonl")
    assert f"'q' has {count} options" in json.dumps(first)
    assert second["response"]["body"]["answers"]["angry"]["noul"] is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "answers typed questions alone"),
        ({"labels": "a,b"}, "answers typed questions alone"),
        ({"questions": "q.yaml", "answer_prefix": "So:"}, "--answer-prefix: the model answers in a layout of its own"),
        ({"questions": "own.yaml"}, "question 'own' has a template of its own"),
        ({"questions": "row.yaml"}, "question 'other' differs from row to row"),
    ],
)
def test_what_a_layout_does_not_allow_is_refused_before_the_model_is_opened(
    made: Callable[..., Path],
    flags: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("prefillcli.scoring.opening.open_models")
    Path("q.yaml").write_text("questions: [{name: late, type: predicate, instructions: 'Is it late?'}]")
    Path("own.yaml").write_text("questions: [{name: own, template: '{{ text }} Late?', labels: [Yes, No]}]")
    Path("row.yaml").write_text("questions: [{name: other, type: predicate, instructions: 'Is it {{ text }}?'}]")
    write_parquet("in.parquet", text=["a"], prompt=["b"])
    assert score("in.parquet", model=made("openjev"), **flags)["exit_code"] == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("type_", "template", "heat", "said"),
    [
        ("laya", TEMPLATE, HEAT, "of the type laya (by llama.decision.type)"),
        ("kev", TEMPLATE, HEAT, "has no token '<|box_end|>'"),
        ("a-type-of-tomorrow", TEMPLATE, HEAT, "of the type a-type-of-tomorrow"),
        ("openjev", None, HEAT, "without its template"),
        ("openjev", "{% if %}", HEAT, "the template of the model's layout, line 1"),
        ("openjev", TEMPLATE, {"noul": 0.0}, "decision.temperature.noul is 0.0"),
    ],
)
def test_a_model_whose_layout_cannot_be_read_is_refused(
    made: Callable[..., Path],
    type_: str,
    template: str | None,
    heat: dict[str, float],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_parquet("in.parquet", text=["a"])
    assert score("in.parquet", model=made(type_, template, heat), ask="Is it late?")["exit_code"] == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def decider(chat_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with a `decider_config.json`."""

    def write(**config: Any) -> Path:
        folder = Path(shutil.copytree(chat_model, tmp_path / "decider"))
        (folder / "decider_config.json").write_text(json.dumps(config))
        return folder

    return write


def test_a_decider_model_reads_context_and_question_apart(decider: Callable[..., Path]) -> None:
    """The package itself is asked by `tests/real/test_decider.py`."""
    folder = decider(temperature=2.0)
    write_parquet("in.parquet", text=["one text", "and a list \ue0fe of words"])
    done = score("in.parquet", model=folder, ask="Is it late?", max_error_rate=0.6)
    assert done["exit_code"] == 0
    reference = Reference(folder)
    asked = "\n\nQuestion: Is it late?\nOptions:\n(A) no\n(B) yes\nAnswer: ("
    ids = [*reference.ids("Context:\none text", special=False), *reference.ids(asked, special=False)]
    first, second = read_output("out.parquet")
    own = reference.answer(ids, [["B"], ["A"]], temperature=2.0)
    assert first["answer"] == pytest.approx(own.score, abs=1e-5)
    assert "U+E0FE" in second["error_detail"]


class Levels:
    """A decider model with `isolated_levels`, as its authors ask it for a score: whether each level fits."""

    def __init__(self, folder: Path) -> None:
        self._reference = Reference(folder)

    def answers(self, state: str, asked: str, levels: list[str]) -> list[Answer]:
        """To each level, Yes first."""
        context = self._reference.ids(f"Context:\n{state}", special=False)
        found = []
        for level in levels:
            fits = f"{asked}\nProposed answer: {level}\nDoes the proposed answer fit?"
            text = f"\n\nQuestion: {fits}\nOptions:\n(A) no\n(B) yes\nAnswer: ("
            ids = [*context, *self._reference.ids(text, special=False)]
            found.append(self._reference.answer(ids, [["B"], ["A"]], temperature=0.5))
        return found

    def shares(self, state: str, asked: str, levels: list[str]) -> list[float]:
        yes = [each.score for each in self.answers(state, asked, levels)]
        return [each / sum(yes) for each in yes]


LEVELS = ["calm", "annoyed", "furious"]
APART = {
    "questions": [
        {"name": "anger", "type": "score", "instructions": "How angry?", "levels": LEVELS},
        {"name": "late", "type": "predicate", "instructions": "Is it late?", "when": "anger < 1"},
        {"name": "two", "type": "score", "instructions": "Which?", "levels": ["1", "2"], "when": "anger >= 0"},
    ]
}


def test_levels_that_are_asked_one_by_one_share_what_fits(
    decider: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = decider(isolated_levels=True, temperature_by_type={"score": 0.5})
    asked = Levels(folder)
    texts = [f"text {number} of the fox" for number in range(5)]
    write_parquet("in.parquet", text=texts, right=["annoyed"] * 5)
    Path("q.yaml").write_text(json.dumps(APART))
    assert score("in.parquet", model=folder, questions="q.yaml", truth={"anger": "right"})["exit_code"] == 0
    for text, row in zip(texts, read_output("out.parquet"), strict=True):
        answers = asked.answers(text, "How angry?", LEVELS)
        yes = [each.score for each in answers]
        own = [each / sum(yes) for each in yes]
        assert list(row["anger.probabilities"].values()) == pytest.approx(own, abs=1e-5)
        assert row["anger"] == pytest.approx(own[1] + 2 * own[2], abs=1e-5)
        assert row["anger.confidence"] == pytest.approx(confidence_of(own, scale=True), abs=1e-4)
        assert row["anger.label_mass"] == pytest.approx(sum(each.label_mass for each in answers) / 3, abs=1e-5)
        assert row["two"] == pytest.approx(1 + asked.shares(text, "Which?", ["1", "2"])[1], abs=1e-5)
        assert (row["late"] is None) == (row["anger"] >= 1)
        assert "anger.order_decided" not in row
    assert read_report()["evaluations"]
    flags = {"inputs": ["in.parquet"], "questions": "q.yaml", "model": str(folder), "row": "0"}
    done = inspect_job(load_settings(InspectSettings, flags, environment={}))
    assert done["score"] == pytest.approx(asked.answers(texts[0], "How angry?", LEVELS)[0].score, abs=1e-5)
    shares = asked.shares(texts[0], "How angry?", LEVELS)
    assert f"{max(shares):.4g}" in capsys.readouterr().err


@pytest.mark.parametrize("api", ["openai", "systemone"])
def test_requests_have_levels_one_by_one_too(decider: Callable[..., Path], api: str) -> None:
    folder = decider(isolated_levels=True, temperature=0.5)
    asked: Any = {"type": "score", "instructions": "How angry?", "levels": [{"label": each} for each in LEVELS]}
    body: Any = {"input": "a fox", "questions": [asked]}
    if api == "systemone":
        asked = {"type": "score", "instructions": "How angry?", "criteria": LEVELS}
        body = {"state": "a fox", "questions": {"q": asked}}
    write_jsonl("in.jsonl", [body])
    assert score("in.jsonl", "out.jsonl", model=folder)["exit_code"] == 0
    answers = read_output("out.jsonl")[0]["response"]["body"]["answers"]
    (found,) = answers if api == "openai" else answers.values()
    own = Levels(folder).shares("a fox", "How angry?", LEVELS)
    told = found["probabilities"]
    told = [each["probability"] for each in told] if api == "openai" else list(told.values())
    assert told == pytest.approx(own, abs=1e-5)
    assert found["score"] == pytest.approx(own[1] + 2 * own[2], abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"evidence": True}, "--evidence: a score of this model has several prompts"),
        ({"rationale": 5}, "--rationale: a score of this model has a prompt for each level"),
        ({"exit": True, "max_flips": 0.1}, "a score of this model has several prompts, whose flips"),
    ],
)
def test_what_needs_one_prompt_is_refused_with_levels_one_by_one(
    decider: Callable[..., Path], flags: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet("in.parquet", text=["a"])
    model = decider(isolated_levels=True)
    assert score("in.parquet", model=model, ask="How late?", levels="little,much", **flags)["exit_code"] == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layout": "of tomorrow"}, 'layout is "of tomorrow", which is not read'),
        ({"layout": "plain", "chat_template": True}, 'layout is "plain", which is not read'),
        ({"temperature": 0}, "temperature is 0, and must be a number above 0"),
        ({"temperature_by_type": {"bool": 1}}, "temperature_by_type is"),
        ({"temperature_by_options": {"a": 1}}, "temperature_by_options is"),
    ],
)
def test_a_decider_model_that_cannot_be_read_is_refused(
    decider: Callable[..., Path], config: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet("in.parquet", text=["a"])
    assert score("in.parquet", model=decider(**config), ask="How late?", levels="little,much")["exit_code"] == 2
    assert said in capsys.readouterr().err


def test_generic_asks_it_like_any_other_model(made: Callable[..., Path], chat_model: Path) -> None:
    write_parquet("in.parquet", text=["one", "two"])
    plain = write_gguf(Path("plain.gguf").absolute(), chat_model, kind=Kind.Q8_0)
    found = []
    for name, flags in (("a", {"model": made("kev"), "layout": "generic"}), ("b", {"model": plain})):
        assert score("in.parquet", f"{name}.parquet", ask="Is it late?", **flags)["exit_code"] == 0
        found.append([row["answer"] for row in read_output(f"{name}.parquet")])
    assert found[0] == found[1]


def test_control_tokens_in_the_data_stay_text(made: Callable[..., Path]) -> None:
    file = made("openjev")
    asked = Asked(file)
    control = asked._model.tokenizer.all_special_tokens[0]
    write_jsonl("in.jsonl", [{"state": f"a {control} b", "questions": {"q": QUESTIONS["angry"]}}])
    assert score("in.jsonl", "out.jsonl", model=file)["exit_code"] == 0
    (row,) = read_output("out.jsonl")
    given = {"type": "noul", "instructions": "Is the customer angry?", "options": options(true="shouts", false=None)}
    found = row["response"]["body"]["answers"]["q"]["noul"]
    assert found == asked.answer(1.5, state=f"a {control} b", split=True, **given)[0]
    assert found != asked.answer(1.5, state=f"a {control} b", **given)[0]
