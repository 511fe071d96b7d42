"""Several questions about each row: the answers of transformers' eager forward, the document computed once."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli import Scorer
from prefillcli.core.further import Further, FurtherQuestions, RowSelection, WantedRow
from prefillcli.core.request import Request
from prefillcli.engines.base import Answer
from prefillcli.errors import UsageError
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.records import ErrorCode, Prompt, RowError, ScoredRow, Window
from prefillcli.scoring import loop
from prefillcli.scoring.loop import Finished, FollowUpWork
from prefillcli.tools.verify import verify_job
from tests.jobs.answers import assert_answer, assert_unasked
from tests.jobs.jobs import TOLERANCE, Reference, read_output, read_report, score, write_parquet
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_likelihood import encoded_pair, likelihood

TEXTS = [f"The brown fox number {at} saw {'a quick ' * (at % 5)}dog." for at in range(30)]
FILE = """
document: "{{ text }}"
questions:
  - name: fox
    text: "\\nIs it a fox? Answer:"
    labels: [Yes, No]
  - name: tone
    text: "\\nThe dog was"
    labels: [very quick, not quick at all, brown]
    when: "fox > 0.5"
  - name: genre
    template: "{{ kind }}: {{ text }}\\nAnswer:"
    labels: "Yes= Yes|yes,No"
"""
#: The texts that the file puts behind each document, and the spellings of labels.
ASKED = {
    "fox": ("{text}\nIs it a fox? Answer:", {"Yes": [" Yes"], "No": [" No"]}),
    "tone": ("{text}\nThe dog was", {name: [f" {name}"] for name in ("very quick", "not quick at all", "brown")}),
    "genre": ("{kind}: {text}\nAnswer:", {"Yes": [" Yes", "yes"], "No": [" No"]}),
}


class Eager:
    """A model under transformers' own eager forward."""

    def __init__(self, path: Path) -> None:
        self._reference = Reference(path)
        self.ids = self._reference.ids

    @cache  # noqa: B019 - one lives as long as the tests
    def logprob(self, prompt: str, label: str) -> float:
        return sum(likelihood(self._reference, *encoded_pair(self._reference, prompt, label))[0])

    def answer(self, prompt: str, labels: dict[str, list[str]]) -> dict[str, float]:
        """The log-probability of each label."""
        return {
            name: math.log(sum(math.exp(self.logprob(prompt, own)) for own in spellings))
            for name, spellings in labels.items()
        }


@pytest.fixture(scope="module")
def eager(model: Path) -> Eager:
    return Eager(model)


def make_input(**more: Any) -> Path:
    Path("q.yaml").write_text(FILE)
    kinds = ["fable" if at % 3 else "news" for at in range(len(TEXTS))]
    return write_parquet("in.parquet", **{"text": TEXTS, "kind": kinds, "id": range(len(TEXTS))} | more)


def assert_answered(rows: list[dict[str, Any]], eager: Eager) -> None:
    """All rows of `make_input` have the reference's answers, those by condition where it holds."""
    assert len(rows) == len(TEXTS)
    held = 0
    for at, row in enumerate(rows):
        assert row.get("error") is None, row["error_detail"]
        assert "score" not in row
        for name, (prompt, labels) in ASKED.items():
            if name == "tone" and row["fox"] <= 0.5:
                assert_unasked(row, name)
                continue
            held += name == "tone"
            wanted = eager.answer(prompt.format(text=TEXTS[at], kind="fable" if at % 3 else "news"), labels)
            assert_answer(row, name, {label: math.exp(logprob) for label, logprob in wanted.items()})
    assert 0 < held < len(rows), "the condition must choose some rows, and leave others out"


@pytest.mark.parametrize("flags", [{}, {"engine": "hf"}, {"pack_tokens": 64}])
def test_each_question_gets_the_answer_of_the_eager_forward(model: Path, eager: Eager, flags: dict[str, Any]) -> None:
    assert score(make_input(), model=model, questions="q.yaml", **flags)["exit_code"] == 0
    assert_answered(read_output("out.parquet"), eager)


def unique_tokens(sequences: list[list[int]]) -> int:
    """The nodes of the trie of these sequences."""
    return len({tuple(each[:end]) for each in sequences for end in range(1, len(each) + 1)})


def test_a_document_is_computed_once_for_all_its_questions(model: Path, eager: Eager) -> None:
    source = make_input()
    Path("q.yaml").write_text(FILE.replace('    when: "fox > 0.5"\n', ""))
    assert score(source, model=model, questions="q.yaml")["exit_code"] == 0
    asked = []
    for at, text in enumerate(TEXTS):
        for prompt, labels in ASKED.values():
            whole = prompt.format(text=text, kind="fable" if at % 3 else "news")
            asked += [eager.ids(whole)] + [eager.ids(whole + own)[:-1] for each in labels.values() for own in each]
    tokens = read_report()["tokens"]
    assert tokens["unique"] == unique_tokens(asked)
    assert tokens["computed"] <= 1.01 * tokens["unique"]  # a shared beginning of very few tokens may be computed twice
    assert tokens["prompt"] == sum(row["prompt_tokens"] for row in read_output("out.parquet"))


APART = """
document: "{{ text }}"
questions:
  - name: fox
    text: "\\nIs it a fox? Answer:"
    labels: [Yes, No]
  - name: kind
    template: "{{ kind }}: {{ text }} {{ text }}\\nAnswer:"
    labels: [very quick, not quick at all, brown]
    when: "fox > 0.5"
  - name: calm
    template: "{{ text }} {{ kind }}.\\nAnswer:"
    labels: [Yes, No]
    when: "kind == 'brown'"
"""
APART_ASKED = {
    "fox": (ASKED["fox"][0], {"Yes": [" Yes"], "No": [" No"]}),
    "kind": ("{kind}: {text} {text}\nAnswer:", ASKED["tone"][1]),
}


@pytest.mark.parametrize("flags", [{}, {"workers": 2}, {"pack_tokens": 64}, {"engine": "hf"}])
def test_a_question_that_shares_nothing_is_asked_where_its_condition_holds(
    model: Path, eager: Eager, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts are read in a second pass, those of the chosen rows alone; a condition on its answers waits for no
    third one."""
    cut_small_windows(monkeypatch)
    source = make_input()
    Path("q.yaml").write_text(APART)
    assert score(source, model=model, questions="q.yaml", **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    read = []
    for at, row in enumerate(rows):
        own = {"text": TEXTS[at], "kind": "fable" if at % 3 else "news"}
        for name, (prompt, labels) in APART_ASKED.items():
            if name == "kind" and row["fox"] <= 0.5:
                assert_unasked(row, "kind")
                assert_unasked(row, "calm")
                continue
            wanted = {label: math.exp(each) for label, each in eager.answer(prompt.format(**own), labels).items()}
            assert_answer(row, name, wanted)
            read += [eager.ids(prompt.format(**own) + each)[:-1] for (each,) in labels.values()]
        assert (row["calm"] is not None) == (row["kind"] == "brown")
        read.append(eager.ids(f"{own['text']} {own['kind']}.\nAnswer:"))
    assert 0 < sum(row["kind"] is not None for row in rows) < len(rows)
    tokens = read_report()["tokens"]
    assert tokens["prompt"] == sum(row["prompt_tokens"] for row in rows)
    if not flags:
        assert tokens["follow_up"] > 0
        assert tokens["computed"] <= 1.02 * unique_tokens(read)


def test_a_row_whose_second_question_has_no_answer_is_an_error_row() -> None:
    class Asker(Further):
        def requests(self, window: Window, row: WantedRow, limits: Limits) -> list[Request]:
            return [Request(row.request.prompt, take=lambda answer: None, required=True) for _ in range(3)]

    labels = LabelSet.of([[5], [7]])
    rows = [
        WantedRow(
            Request(Prompt(row, np.array([row], np.int32), labels)), ScoredRow(row, np.zeros(2), 0, 1, 1, 0.0), 0
        )
        for row in (3, 4)
    ]
    schema = OutputSchema(questions=(AnswerColumns(labels=("a", "b")),))
    further, limits = FurtherQuestions(RowSelection(schema), [Asker()]), Limits(100, 100)
    window = Window(0, np.array([3, 4]), [], {}, pa.table({}))
    work = FollowUpWork(window, rows, further, limits)
    error = RowError(ErrorCode.EXCEEDS_MEMORY, "why")
    assert work.fail(1, error) == Finished(errors={3: error})
    assert work.fail(2, error) == Finished()
    answers = [Answer(prompt, np.zeros(2), computed_tokens=1, shared_tokens=0, seconds=0.0) for prompt in (0, 3, 4, 5)]
    assert [row.row for answer in answers for row in work.take(work.plan.packs[0], [answer]).rows] == [4]


def test_a_question_behind_a_longer_document_is_asked_with_the_others(model: Path) -> None:
    source = make_input(text=[text * 6 for text in TEXTS])
    assert score(source, model=model, questions="q.yaml")["exit_code"] == 0
    assert read_report()["tokens"]["follow_up"] == 0


def test_an_error_of_one_question_is_one_of_its_row(model: Path) -> None:
    long = ["fox " * 300 if at == 4 else text for at, text in enumerate(TEXTS)]
    make_input(text=long)
    Path("q.yaml").write_text(FILE.replace("{{ kind }}: {{ text }}", "{{ kind }}{{ text * 8 if id == 4 else text }}"))
    done = score("in.parquet", model=model, questions="q.yaml", max_error_rate=0.1)
    assert done["exit_code"] == 0
    rows = read_output("out.parquet")
    assert [row["row"] for row in rows if row["error"]] == [4]
    assert rows[4]["error"] == "prompt_too_long"
    assert rows[4]["error_detail"].startswith("question genre: ")
    for name in ASKED:
        assert_unasked(rows[4], name)


ONE = "- {name: fox, text: '?', labels: [Yes, No]}"
ASKS = (
    f"document: d\nquestions:\n{ONE}\n"
    "- {name: last, text: b, labels: %s}\n- {name: a, text: b, labels: [Yes, No], when: %s}"
)


@pytest.mark.parametrize(
    ("text", "flags", "code"),
    [
        ("{{ 'fox ' * 3000 }}", {"workers": 2}, ErrorCode.PROMPT_TOO_LONG),
        ("{{ 'fox ' * 3000 }}", {"engine": "hf"}, ErrorCode.PROMPT_TOO_LONG),
        ("{{ text.missing.name }}", {}, ErrorCode.TEMPLATE_ERROR),
        ("{{ 'fox ' * 400 }}", {"memory": "50670000", "chunk_tokens": 16}, ErrorCode.EXCEEDS_MEMORY),
    ],
)
def test_a_question_that_is_not_asked_makes_no_row_an_error(
    text: str, flags: dict[str, Any], code: ErrorCode, model: Path, eager: Eager
) -> None:
    source = make_input()
    # The second conditional question waits for the first: it is always asked with the others.
    Path("q.yaml").write_text(
        f"""
document: "{{{{ text }}}}"
questions:
  - {{name: fox, text: "\\nIs it a fox? Answer:", labels: [Yes, No]}}
  - {{name: tone, text: "{text} the dog was", labels: [quick, brown], when: fox > 0.5}}
  - {{name: last, text: "{text} so", labels: [quick, brown], when: tone > 0.5}}
  - {{name: kind, text: " is", labels: [quick, brown]}}
"""
    )
    assert score(source, model=model, questions="q.yaml", max_error_rate=1, **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    prompt, labels = ASKED["fox"]
    logprobs = [eager.answer(prompt.format(text=each), labels) for each in TEXTS]
    scores = [1 / (1 + math.exp(each["No"] - each["Yes"])) for each in logprobs]
    chosen = {at for at, each in enumerate(scores) if each > 0.5}
    assert 0 < len(chosen) < len(TEXTS)
    assert {row["row"] for row in rows if row["error"]} == chosen
    for at, row in enumerate(rows):
        if at in chosen:
            assert (row["error"], row["fox"], row["kind"]) == (code, None, None)
            assert row["error_detail"].startswith("question tone: ")
        else:
            assert row["fox"] == pytest.approx(scores[at], abs=TOLERANCE)
            assert row["kind"] is not None
            assert row["tone"] is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "it must be a mapping with the keys document, questions"),
        ("document: [", "not valid YAML"),
        (
            "questions:\n  a: {type: predicate, instructions: Is it?}",
            "line 2: between { and }, put a text with",
        ),
        (f"document: d\nquestion:\n{ONE}", "the key 'questions' is missing"),
        (f"document: d\nquestions:\n{ONE}\ndocumnt: x", "unknown key 'documnt'; did you mean 'document'?"),
        ("document: d\nquestions: []", "questions is empty"),
        ("document: d\nquestions: [{name: a, text: b}]", "question 'a': the key 'labels' is missing"),
        ("document: d\nquestions: [{text: b, labels: [Yes, No]}]", "question number 1: the key 'name' is missing"),
        ("document: d\nquestions: [{name: a, text: b, labls: [Yes, No], labels: 'Yes,No'}]", "did you mean 'labels'?"),
        ("document: d\nquestions: [{name: a, text: b, labels: [Yes]}]", "at least two labels"),
        ("document: d\nquestions: [{name: a, text: b, labels: [Yes, Yes]}]", "label 'Yes' is given twice"),
        (
            "document: d\nquestions: [{name: a b, text: b, labels: [Yes, No]}]",
            "question 'a b': a name consists of letters",
        ),
        (f"document: d\nquestions:\n{ONE}\n{ONE}", "question 'fox': the name is given twice"),
        ("questions: [{name: a, text: b, labels: [Yes, No]}]", "the file has no document"),
        ("document: d\nquestions: [{name: a, labels: [Yes, No]}]", "neither type nor text nor template"),
        ("document: d\nquestions: [{name: a, text: b, template: c, labels: [Yes, No]}]", "both text and template"),
        ("document: d\nquestions: [{name: a, template: '{{ b }}', labels: [Yes, No]}]", "document is not used"),
        (ASKS % ("[Yes, No]", "fx > 0.5"), "no earlier question gives fx; did you mean 'fox'?"),
        (ASKS % ("[Yes, No]", "fox.score > 0.5"), "no earlier question gives fox.score"),
        (ASKS % ("[Yes, No]", "fox.confidence > 0.5"), "no earlier question gives fox.confidence"),
        (ASKS % ("[a, b, c]", "last.probabilities > 0.5"), "no earlier question gives last.probabilities"),
        (ASKS % ("[a, b, c]", "label_mass > 0.5"), "no earlier question gives label_mass"),
        (
            "document: d\nquestions: [{name: a, text: b, labels: [Yes, No], when: a > 0.5}]",
            "no earlier question gives a",
        ),
        (
            ASKS % ("[Yes, No]", "fox == 'Yes'"),
            "question 'a': when \"fox == 'Yes'\": a number is compared with a text",
        ),
        (ASKS % ("[a, b, c]", "last > 0.5"), "question 'a': when 'last > 0.5': a text is compared with a number"),
        (
            ASKS % ("[a, b, c]", "last == 'A'"),
            "the prediction is never 'A'; did you mean 'a'?\nthe labels are a, b, c",
        ),
        ("document: '{{ d'\nquestions: [{name: a, text: b, labels: [Yes, No]}]", "question 'a': "),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(
    model: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    make_input()
    Path("q.yaml").write_text(text)
    assert score("in.parquet", model=model, questions="q.yaml")["exit_code"] == 2
    error = capsys.readouterr().err
    assert "--questions" in error
    assert said in error
    assert error.count("\n") <= 3


def test_a_column_that_the_input_lacks_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_input()
    Path("q.yaml").write_text(FILE.replace("{{ kind }}", "{{ kimd }}"))
    assert score("in.parquet", model=model, questions="q.yaml")["exit_code"] == 2
    assert "kimd" in capsys.readouterr().err


def test_a_scorer_asks_all_questions(model: Path, eager: Eager) -> None:
    source = make_input()
    rows = pq.read_table(source)
    with Scorer(model, questions="q.yaml") as scorer:
        assert scorer.score(rows.slice(0, 0)).column_names == scorer.score(rows).column_names
        found = scorer.score(rows.to_pylist())
        of_file = scorer.score(source, keep_columns=["kind"]).to_pylist()
        with pytest.raises(UsageError, match="kind"):
            scorer.score(rows.drop_columns("kind"))
        Path("q.yaml").write_text(FILE.replace("Is it a fox?", "Is it the fox?"))
        assert scorer.score(rows.slice(0, 2))["fox"].to_pylist() == pytest.approx(
            found["fox"].to_pylist()[:2], abs=TOLERANCE
        )
        with pytest.raises(UsageError, match="not as it was"):
            scorer.score(source)
    assert found.column_names[:3] == ["text", "kind", "id"]
    assert_answered(found.to_pylist(), eager)
    assert_answered(of_file, eager)


@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl"])
def test_error_rows_alone_are_asked_again(
    model: Path, eager: Eager, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, fitting = make_input(), loop._fitting

    def fit(requests: Any, most: int) -> Any:
        kept, errors, failed = fitting([each for each in requests if each.prompt.row not in (2, 11)], most)
        lost = {each.prompt.row for each in requests} & {2, 11}
        return kept, errors | {row: RowError(ErrorCode.EXCEEDS_MEMORY, "for now") for row in lost}, failed

    flags = {"questions": "q.yaml", "max_error_rate": 0.1}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_fitting", fit)
        assert score(source, output, model=model, **flags)["rows"]["errors"] == 2
    before = read_output(output)
    done = score(source, output, model=model, retry_errors=True, **flags)
    assert (done["exit_code"], done["rows"]["errors"], done["since"]["rows"]) == (0, 0, len(TEXTS) - 2)
    after = read_output(output)
    kept = [(own, old) for own, old in zip(after, before, strict=True) if old["error"] is None]
    assert [own for own, _ in kept] == [old for _, old in kept]
    assert_answered(after, eager)
    assert verify_job(output, [str(source)], quiet=True)["exit_code"] == 0


@pytest.mark.parametrize("name", ["score", "prediction", "fox", "fox.score", "tone.probabilities"])
def test_a_kept_column_cannot_have_the_name_of_an_answer(
    model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = make_input()
    pq.write_table(pq.read_table(source).append_column(name, pa.array([1] * len(TEXTS))), source)
    assert score(source, model=model, questions="q.yaml", keep_columns=name)["exit_code"] == 2
    assert f"the output has a column {name} already" in capsys.readouterr().err
