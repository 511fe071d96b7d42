"""A stranger's way with the installed command and its sample model: `make test-install`.

It leads from a CSV file to a night of which a person looks at the doubtful answers.
"""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from prefillcli import Choice, Predicate, Score
from prefillcli.models.files import sample_model
from prefillcli.prompts.questions import Question
from tests.install.conftest import ROOT, Place
from tests.jobs.jobs import TOLERANCE, Reference
from tests.jobs.test_decision_requests import require_form, shares_of
from tests.jobs.test_typed_questions import shares

pytestmark = pytest.mark.slow

REFUND = Predicate("Does the customer ask for a refund?", name="refund")
DEPARTMENT = Choice("Which department should answer?", ["payments", "devices", "accounts"], name="department")
URGENCY = Score("How urgent is it?", ["low", "normal", "high"], name="urgency")
SIXTY = 60  # tickets of the day
EMPTY = (7, 31, 52)  # of them, without a text
COMPARED = 12  # rows whose probabilities are compared with transformers'


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def words_of(page: Path) -> str:
    """What a reader sees of a page."""
    seen = re.sub(r"<(style|script|title)[^>]*>.*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", seen)).split())


@pytest.fixture(scope="module")
def tickets(place: Place) -> list[dict[str, str]]:
    """The sample tickets, as tickets.csv in the installed environments' folder."""
    shutil.copy(ROOT / "samples" / "tickets.csv", place.folder)
    return read(place.folder / "tickets.csv")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(sample_model(typed=True))


def summary(place: Place, *words: str) -> dict[str, Any]:
    """The last line that a command prints on stdout."""
    found: dict[str, Any] = json.loads(place.run("prefill", *words).stdout.splitlines()[-1])
    return found


def wanted(reference: Reference, rows: Sequence[dict[str, str]], question: Question) -> Iterator[list[float]]:
    """The probabilities of a question's options for the first rows, by transformers' eager forward."""
    return (shares(reference, row["text"], question) for row in rows[:COMPARED])


def test_one_question_is_asked_of_a_csv_file(
    place: Place, tickets: list[dict[str, str]], reference: Reference
) -> None:
    words = ["tickets.csv", "--ask", REFUND.instructions, "--id-column", "id", "-o", "one.csv"]
    assert summary(place, "score", *words)["rows"]["scored"] == len(tickets)
    rows = read(place.folder / "one.csv")
    assert [row["id"] for row in rows] == [row["id"] for row in tickets]
    for row, (yes, _) in zip(rows, wanted(reference, tickets, REFUND), strict=False):
        assert float(row["answer"]) == pytest.approx(yes, abs=TOLERANCE)


def test_questions_of_all_types_are_asked_at_once(
    place: Place, tickets: list[dict[str, str]], reference: Reference
) -> None:
    asked: list[Question] = [REFUND, DEPARTMENT, URGENCY]
    (place.folder / "questions.json").write_text(json.dumps({"questions": [each.to_json() for each in asked]}))
    words = ["tickets.csv", "--questions", "questions.json", "--id-column", "id", "--keep-columns", "*"]
    truth = ["--truth", "refund=is_refund,department=team,urgency=level"]
    done = summary(place, "score", *words, *truth, "-o", "all.csv")
    assert {name: each["rows"] for name, each in done["evaluations"].items()} == dict.fromkeys(
        ("refund", "department", "urgency"), len(tickets)
    )
    rows = read(place.folder / "all.csv")
    assert [{name: row[name] for name in tickets[0]} for row in rows] == tickets
    for row, yes, options, levels in zip(rows, *(wanted(reference, tickets, each) for each in asked), strict=False):
        assert float(row["refund"]) == pytest.approx(yes[0], abs=TOLERANCE)
        assert [*json.loads(row["department.probabilities"]).values()] == pytest.approx(options, abs=TOLERANCE)
        assert options[["payments", "devices", "accounts"].index(row["department"])] == max(options)
        assert float(row["urgency"]) == pytest.approx(levels[1] + 2 * levels[2], abs=2 * TOLERANCE)


def test_requests_come_back_in_the_form_of_their_api(
    place: Place, tickets: list[dict[str, str]], reference: Reference
) -> None:
    choices, levels = ([each.value for each in own.options] for own in (DEPARTMENT, URGENCY))
    decisions = [
        REFUND.to_json(),
        {"type": "choice", "name": "department", "instructions": DEPARTMENT.instructions,
         "choices": [{"value": each} for each in choices]},
        {"type": "score", "name": "urgency", "instructions": URGENCY.instructions,
         "levels": [{"label": each} for each in levels]},
    ]  # fmt: skip
    states = {
        "refund": {"type": "noul", "instructions": REFUND.instructions},
        "department": {"type": "choice", "instructions": DEPARTMENT.instructions, "criteria": dict.fromkeys(choices)},
        "urgency": {"type": "score", "instructions": URGENCY.instructions, "criteria": levels},
    }
    bodies = {
        "openai": [{"model": "gpt-6-luna", "input": row["text"], "questions": decisions} for row in tickets],
        "systemone": [{"model": "jev-latest", "state": row["text"], "questions": states} for row in tickets],
    }
    for form, asked in bodies.items():
        lines = [{"id": row["id"], **body} for row, body in zip(tickets, asked, strict=True)][:COMPARED]
        (place.folder / f"{form}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        place.run("prefill", "score", f"{form}.jsonl", "-m", place.sample("tickets"), "--format", form,
                  "--set", f"served_model_name={asked[0]['model']}", "-o", f"{form}.answers.jsonl")  # fmt: skip
        answers = [json.loads(line) for line in (place.folder / f"{form}.answers.jsonl").read_text().splitlines()]
        assert [each["custom_id"] for each in answers] == [line["id"] for line in lines]
        questions = (REFUND, DEPARTMENT, URGENCY)
        for each, body, *own in zip(
            answers, asked, *(wanted(reference, tickets, question) for question in questions), strict=False
        ):
            response = each["response"]["body"]
            require_form(body, response)
            for found, shown in zip(shares_of(response), own, strict=True):
                assert found == pytest.approx(shown, abs=TOLERANCE)


def test_a_day_from_an_export_to_a_corrected_night(place: Place, tickets: list[dict[str, str]]) -> None:
    rows = [
        row | {"id": f"{at:06}", "text": "" if at in EMPTY else row["text"]} for at, row in enumerate(tickets[:SIXTY])
    ]
    write(place.folder / "export.csv", rows)
    asked: list[Question] = [REFUND, DEPARTMENT, URGENCY]
    (place.folder / "day.json").write_text(json.dumps({"questions": [each.to_json() for each in asked]}))
    words = ["--questions", "day.json", "--id-column", "id", "--keep-columns", "text"]

    # Right answers: the page says how often the model is right, and how often the commonest answer would be
    truth = ["--truth", "refund=is_refund,department=team,urgency=level"]
    done = summary(place, "score", "export.csv", *words, *truth, "-o", "judged.csv")
    assert (done["status"], done["rows"]["scored"], done["rows"]["errors"]) == ("complete", SIXTY - len(EMPTY), 0)
    page, answered = words_of(place.folder / done["page"]), [row for row in rows if row["text"]]
    judged = [row for row in read(place.folder / "judged.csv") if row["department"]]
    right = sum(row["department"] == own["team"] for row, own in zip(judged, answered, strict=True))
    team, most = Counter(row["team"] for row in answered).most_common(1)[0]
    assert f"{right / len(answered):.1%} of {len(answered)} rows; always {team}: {most / len(answered):.1%}" in page
    assert page.index(done["verdict"]["text"]) < page.index("label mass") < page.index(DEPARTMENT.instructions)

    # A person looks at all of them in a spreadsheet, which makes numbers of ids, and writes what is wrong
    seen = ["--review-below", "1", "--review", "look.csv"]
    summary(place, "score", "export.csv", *words, *seen, "-o", "sample.csv")
    looked = read(place.folder / "look.csv")
    assert {row["id"] for row in looked if not row["department"]} == {f"{at:06}" for at in EMPTY}
    known = {int(row["id"]): row for row in rows}
    book = openpyxl.Workbook()
    sheet = book.active
    for line in [[*looked[0]], *([*row.values()] for row in looked)]:
        sheet.append([int(value) if value.isdigit() else value or None for value in line])
    names = [cell.value for cell in sheet[1]]
    for line in sheet.iter_rows(min_row=2):
        cells = dict(zip(names, line, strict=True))
        own = known[cells["id"].value]
        if own["text"]:
            cells["refund.right"].value = own["is_refund"] == "yes"
            for name, column in (("department", "team"), ("urgency", "level")):
                if cells[name].value != own[column]:
                    cells[f"{name}.right"].value = f"{own[column].capitalize()} "
    book.save(place.folder / "looked.xlsx")
    with (place.folder / "looked.csv").open("w", newline="", encoding="utf-8-sig") as file:
        for line in openpyxl.load_workbook(place.folder / "looked.xlsx").active.values:
            csv.writer(file, delimiter=";").writerow("" if value is None else value for value in line)

    # Floors, and a night of which a person sees the answers below them
    given = ["--truth-from", "looked.csv", "--review-blank", "confirmed", "--accuracy", "0.9", "-o", "day.floors.json"]
    floors = summary(place, "calibrate", "sample.csv", *given)["questions"]
    assert {name: each["floors"][0]["rows"] for name, each in floors.items()} == dict.fromkeys(
        ("refund", "department", "urgency"), len(answered)
    )
    entry = floors["department"]["floors"][0]
    assert entry["right"] == right
    write(place.folder / "later.csv", tickets[SIXTY:])
    given = ["--review-below", "day.floors.json", "--review", "tonight.csv", "-o", "night.csv"]
    done = summary(place, "score", "later.csv", *words, *given)
    answers = {row["id"]: row for row in read(place.folder / "night.csv")}
    shares = {name: json.loads(row["department.probabilities"]) for name, row in answers.items()}
    doubted = [name for name, each in shares.items() if max(each.values()) < entry["floor"]]
    reviewed = read(place.folder / "tonight.csv")
    assert [row["id"] for row in reviewed if "department" in row["review"]] == doubted
    assert not any(row["department.right"] for row in reviewed)
    sure = [row for row in tickets[SIXTY:] if row["id"] not in doubted]
    assert sum(row["team"] == answers[row["id"]]["department"] for row in sure) >= 0.9 * len(sure) > 0
    assert 0 < len(reviewed) < len(shares)
    page = words_of(place.folder / done["page"])
    assert f"to review {len(reviewed)} errors 0" in page
    assert f"in doubt {len(doubted)} (" in page
