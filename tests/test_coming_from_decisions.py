"""docs/coming-from.md: typed decisions as other programs ask for them, and the same here."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from openai.types import Decision
from typer.testing import CliRunner
from typesafe_sdk import SystemOneResponse

from prefillcli.cli import app
from prefillcli.models.files import sample_model
from tests.test_coming_from import DECISIONS, JEV_TABLE, SECTIONS, TYPED_GGUF, blocks, run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models", "judge").symlink_to(sample_model())


def command(line: str) -> None:
    """Run a command of the page with the judge, whatever its name there."""
    line = line.replace("-m judge.gguf", "-m models/judge")
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.stderr


def test_a_request_has_the_answers_of_a_table() -> None:
    Path("requests.jsonl").write_text(blocks(DECISIONS, "json")[0])
    names = run(*SECTIONS[DECISIONS])
    command("prefill score requests.jsonl -m models/judge -o decisions.jsonl")
    lines = [json.loads(line)["response"]["body"] for line in Path("decisions.jsonl").read_text().splitlines()]
    decision = Decision.model_validate_json(json.dumps(lines[0]), strict=True)
    state = SystemOneResponse.model_validate_json(json.dumps(lines[1]))
    predicate, tone = decision.answers
    assert predicate.type == "predicate"
    assert tone.type == "choice"
    wanted = names["ours"][names["texts"].index("No dog saw the fox.")]
    assert (predicate.probability, tone.confidence) == pytest.approx(wanted, abs=1e-5)
    assert (state.nouls["fox"].noul, state.choices["tone"].confidence) == pytest.approx(wanted, abs=1e-5)


def test_the_questions_of_a_pack_are_asked_with_its_floors() -> None:
    rows = [{"id": str(number), "message": text} for number, text in enumerate(["Win $500!", "See you at ten."])]
    with Path("messages.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    (questions,), (_, ours) = blocks(JEV_TABLE, "yaml"), blocks(JEV_TABLE, "sh")
    Path("questions.yaml").write_text(questions)
    command(ours)
    with Path("labelled.csv").open(newline="") as file:
        labelled = list(csv.DictReader(file))
    assert [{name: row[name] for name in rows[0]} for row in labelled] == rows
    doubted = []
    for row in labelled:
        money = float(row["money"])
        least = {"category": max(json.loads(row["category.probabilities"]).values()), "money": max(money, 1 - money)}
        floors = {"category": 0.8, "money": 0.85}
        assert json.loads(row["review"]) == [name for name, floor in floors.items() if least[name] < floor]
        doubted += [row["id"]] if json.loads(row["review"]) else []
    with Path("look.csv").open(newline="", encoding="utf-8-sig") as file:
        assert [row["id"] for row in csv.DictReader(file)] == doubted


def test_a_request_file_of_typed_gguf_is_a_line() -> None:
    theirs, ours = blocks(TYPED_GGUF, "sh")
    asked, choices = re.search(r"--choice 'tone=(.*?):(.*?)'", theirs).groups()  # type: ignore[union-attr]
    criteria = dict.fromkeys(choices.split("|"))
    body = {"state": "No dog saw the fox.", "questions": {"tone": {"type": "choice", "instructions": asked,
            "criteria": criteria}}}  # fmt: skip
    Path("states.jsonl").write_text(json.dumps(body) + "\n")
    Path("tickets.csv").write_text("text\nNo dog saw the fox.\n")
    for line in ours.splitlines():
        command(line)
    (answer,) = Path("answers.jsonl").read_text().splitlines()
    found = SystemOneResponse.model_validate(json.loads(answer)["response"]["body"]).choices["tone"]
    with Path("answers.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["answer"], json.loads(row["answer.probabilities"])) == (found.choice, found.probabilities)
