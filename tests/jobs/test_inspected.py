"""`prefill inspect` shows of a row what `prefill score` did with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.tools import inspect
from prefillcli.tools.inspection import Inspection
from tests.jobs import test_exits
from tests.jobs.jobs import read_output, score, write_parquet
from tests.jobs.test_evidence_jobs import parts, text_of
from tests.jobs.test_exits import LABELS, LAYERS, data, deep_model, exited, several  # noqa: F401 - fixtures
from tests.jobs.test_questions import ASKED, TEXTS, Eager, make_input

LATE = {"name": "late", "type": "predicate", "instructions": "Is it late?"}
KIND = {"name": "kind", "type": "choice", "instructions": "Which?", "choices": ["a fox", "a dog"]}


def inspected(monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[dict[str, Any], list[Inspection]]:
    """The last line on stdout, and what was shown."""
    shown: list[Inspection] = []
    monkeypatch.setattr(inspect, "print_inspection", lambda what, *_, **__: shown.append(what))
    return inspect.inspect_job(load_settings(InspectSettings, given, environment={})), shown


def test_a_row_leaves_where_the_job_let_it_leave(
    exited: Path,  # noqa: F811
    data: Path,  # noqa: F811
    deep_model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = read_output(exited / "out.jsonl")
    profile = exited / "out.exit.json"
    exits = [each["layer"] + 1 for each in json.loads(profile.read_text())["questions"][0]["exits"]]
    left = [row for row in rows if row["exit_layer"] is not None][::40]
    assert len(left) >= 3
    given = {"labels": LABELS, "dtype": "float32", "inputs": [str(data)], "exit_profile": str(profile)}
    for row in left:
        line, (shown,) = inspected(monkeypatch, **given, model=str(deep_model), row=str(row["row"]))
        assert line["status"] == "complete"
        assert shown.margins is not None
        assert shown.margins.left == row["exit_layer"]
        guesses = {each.layers: each.guess for each in shown.margins.layers if each.guess is not None}
        assert list(guesses) == exits
        assert guesses[row["exit_layer"]].prediction == row["prediction"]
        assert shown.margins.layers[-1].layers == LAYERS


def test_each_question_of_a_row_leaves_where_the_job_let_it_leave(
    several: Path,  # noqa: F811
    data: Path,  # noqa: F811
    deep_model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {"inputs": [str(data)], "exit_profile": str(several / "out.exit.json"), "dtype": "float32"}
    given["questions"] = str(test_exits.write_questions()["questions"])
    for name in test_exits.ASKED:
        row = next(row for row in read_output(several / "out.jsonl")[100:] if row[f"{name}.exit_layer"] is not None)
        line, (shown,) = inspected(monkeypatch, **given, question=name, model=str(deep_model), row=str(row["row"]))
        assert line["status"] == "complete"
        assert shown.margins is not None
        assert shown.margins.left == row[f"{name}.exit_layer"]


def test_exits_of_another_model_or_other_labels_are_refused(
    exited: Path,  # noqa: F811
    data: Path,  # noqa: F811
    deep_model: Path,  # noqa: F811
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"inputs": [str(data)], "row": "0", "exit_profile": str(exited / "out.exit.json"), "labels": LABELS}
    given |= {"dtype": "float32"}
    line, shown = inspected(monkeypatch, **given | {"labels": "t=t,n=n"}, model=str(deep_model))
    assert (line["exit_code"], shown) == (2, [])
    assert "different labels" in line["error"]
    line, _ = inspected(monkeypatch, **given, model=str(model))
    assert line["exit_code"] == 2
    assert "different model" in line["error"]
    line, _ = inspected(monkeypatch, **given | {"exit_profile": str(data)}, model=str(deep_model))
    assert "it is not an exit profile" in line["error"]


def test_a_row_is_explained_as_score_explains_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_parquet("in.parquet", prompt=[text_of(parts(row)) for row in range(6)])
    flags = {"model": str(model), "rationale": 8, "evidence": True, "temperature": 1.5}
    assert score(source, **flags)["exit_code"] == 0
    line, (shown,) = inspected(monkeypatch, inputs=[str(source)], row="4", html="row.html", **flags)
    assert line["exit_code"] == 0
    row = read_output("out.parquet")[4]
    assert shown.scored is not None
    written, evidence = shown.scored.rationale, shown.scored.evidence
    assert written is not None
    assert (written.text, written.tokens) == (row["rationale"], row["rationale_tokens"])
    assert (written.finish_reason, written.source) == (row["finish_reason"], row["rationale_source"])
    assert written.gap == pytest.approx(row["rationale_gap"], abs=1e-4)
    assert shown.further[-1].parts[0].text.startswith(f"{row['prediction']} because ")
    assert evidence is not None
    assert len(evidence) == len(row["evidence"]) > 0
    wanted = {each["section"]: each["change"] for each in row["evidence"]}
    assert dict(evidence) == pytest.approx(wanted, abs=1e-5)
    page = Path("row.html").read_text()
    assert "paragraph 2" in page
    assert "It is not the reason for the score" in page


@pytest.mark.parametrize("question", [None, "fox", "tone", "genre"])
def test_the_prompt_of_a_question_is_shown(model: Path, question: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    source, eager = make_input(), Eager(model)
    given = {"model": str(model), "questions": "q.yaml", "inputs": [str(source)], "row": "3"}
    asked = {} if question is None else {"question": question}
    line, (shown,) = inspected(monkeypatch, **given, **asked)
    assert line["exit_code"] == 0
    template, spellings = ASKED[question or "fox"]
    prompt = template.format(text=TEXTS[3], kind="news")
    answers = {label: math.exp(logprob) for label, logprob in eager.answer(prompt, spellings).items()}
    assert shown.full is not None
    assert shown.labels == list(answers)
    found = {label: math.exp(logprob) for label, logprob in shown.full.logprobs.items()}
    assert found == pytest.approx(answers, abs=1e-5)
    assert shown.full.score == pytest.approx(next(iter(answers.values())) / sum(answers.values()), abs=1e-5)
    line, nothing = inspected(monkeypatch, **given, question="fix")
    assert (line["exit_code"], nothing) == (2, [])
    assert "no question 'fix'; did you mean 'fox'?\nthere are fox, tone, genre" in line["error"]


def test_of_several_questions_one_is_explained_as_score_explains_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("q.json").write_text(json.dumps({"questions": [LATE, KIND]}))
    source = write_parquet("in.parquet", text=[text_of(parts(row)) for row in range(6)])
    flags = {"model": str(model), "questions": "q.json", "template": "{{ text }}", "rationale": 8, "evidence": True}
    assert score(source, **flags)["exit_code"] == 0
    row = read_output("out.parquet")[4]
    for name in ("late", "kind"):
        line, (shown,) = inspected(monkeypatch, inputs=[str(source)], row="4", question=name, **flags)
        assert line["exit_code"] == 0
        assert shown.scored is not None
        assert shown.scored.rationale is not None
        assert shown.scored.evidence is not None
        assert shown.scored.rationale.text == row[f"{name}.rationale"]
        wanted = {each["section"]: each["change"] for each in row[f"{name}.evidence"]}
        assert len(wanted) > 1
        assert dict(shown.scored.evidence) == pytest.approx(wanted, abs=1e-5)
