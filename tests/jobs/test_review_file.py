"""`--review`: the file that a person opens in a spreadsheet, fills in, and gives to `prefill calibrate`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.options.commands import CalibrateSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.calibrate import calibrate_job
from prefillcli.tools.floors import floors_job
from tests.jobs.jobs import read_output, read_report, score, write_jsonl

ROWS = 40
TEAMS = ("billing", "technical", "other")
LEVELS = ("calm", "annoyed", "angry")
QUESTIONS = """
questions:
  refund: {type: predicate, instructions: "Do they want money back?"}
  team: {type: choice, instructions: "Which team?", choices: [billing, technical, other]}
  anger: {type: score, instructions: "How angry are they?", levels: [calm, annoyed, angry]}
"""
ASKED = {
    "refund": "Do they want money back? (Yes or No)",
    "team": "Which team? (billing, technical or other)",
    "anger": "How angry are they? (calm, annoyed or angry)",
}


def make_tickets() -> Path:
    """Tickets in CSV with ids that a spreadsheet takes for numbers; three of them are empty."""
    Path("q.yaml").write_text(QUESTIONS)
    rows = [[f"{at:06}", "" if at in (5, 17, 30) else f"fox {'no ' * (at % 7)}yes {at}"] for at in range(ROWS)]
    with Path("tickets.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *rows])
    return Path("tickets.csv")


def night(model: Path, output: str = "out.parquet", review: str = "look.csv", **flags: Any) -> dict[str, Any]:
    """The summary of a job on the tickets, of which a person should look at all."""
    given = {"questions": "q.yaml", "id_column": "id", "keep_columns": ("text",), "max_error_rate": 0.5}
    return score(make_tickets(), output, model=model, review=review, **given | {"review_below": "1"} | flags)


def calibrate(**flags: Any) -> dict[str, Any]:
    """The summary of a calibration by floors."""
    given = {"scores": "out.parquet", "truth_from": "looked.csv", "accuracy": "0.5", **flags}
    return floors_job(load_settings(CalibrateSettings, given, environment={}))


def _typed(text: str) -> Any:
    # What Excel makes of a field of a CSV file.
    if text.upper() in ("TRUE", "FALSE"):
        return text.upper() == "TRUE"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def _saved(value: Any) -> str:
    return str(value).upper() if isinstance(value, bool) else "" if value is None else f"{value}"


def through_excel(edit: Callable[[dict[str, Any]], None], separator: str = ",") -> None:
    """Opens look.csv as Excel does, edits each row in a workbook, and saves it as CSV."""
    data = Path("look.csv").read_bytes()
    assert data.startswith(b"\xef\xbb\xbf")  # else Excel takes it for Windows-1252
    book = openpyxl.Workbook()
    for row in csv.reader(io.StringIO(data.decode("utf-8-sig"))):
        book.active.append([_typed(cell) for cell in row])
    book.save("look.xlsx")
    (header, *rows) = openpyxl.load_workbook("look.xlsx").active.iter_rows(values_only=True)
    found = [dict(zip(header, row, strict=True)) for row in rows]
    for row in found:
        edit(row)
    with Path("looked.csv").open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.writer(file, delimiter=separator)
        table.writerow(header)
        table.writerows([map(_saved, row.values()) for row in found])


def answers(row: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """The answer to each question in a row of the output, in words, and its probability."""
    yes = row["refund"]
    found = {"refund": ("Yes" if yes >= 0.5 else "No", max(yes, 1 - yes))}
    for name in ("team", "anger"):
        shares = row[f"{name}.probabilities"]
        found[name] = max(shares.items(), key=lambda item: item[1])
    return found


@pytest.mark.parametrize(("output", "review"), [("out.parquet", "look.jsonl"), ("out.jsonl", "look.parquet"),
                                                ("out.csv", "look.jsonl"), ("out/", "look.parquet")])  # fmt: skip
def test_a_person_reads_question_answer_and_reason_and_finds_an_empty_column(
    model: Path, output: str, review: str
) -> None:
    floors = {"refund": 0.9, "team": 0.99}
    below = ",".join(f"{name}={floor}" for name, floor in floors.items())
    assert night(model, output, review, review_below=below)["exit_code"] == 0
    assert night(model, "plain.parquet", "plain.jsonl", review_below=below)["exit_code"] == 0
    rows, found = read_output("plain.parquet"), {row["id"]: row for row in read_output(review)}
    wanted = {row["id"]: row for row in rows if row["review"] or row["error"]}
    assert list(found) == list(wanted)
    parts = [f"{name}{end}" for name in ASKED for end in (".question", "", ".sure", ".right")]
    assert list(next(iter(found.values()))) == ["id", "text", *parts, "review"]
    for id_, row in wanted.items():
        own = found[id_]
        assert own["text"] == row["text"]
        if row["error"] is not None:
            assert own["review"] == f"no answer: {row['error']}: {row['error_detail']}"
            assert own["team"] is own["team.sure"] is own["refund"] is None
            continue
        assert own["review"] == "; ".join(f"{name}: below {floors[name]}" for name in row["review"])
        for name, (said, sure) in answers(row).items():
            assert own[f"{name}.question"] == ASKED[name]
            assert (own[name], own[f"{name}.right"]) == (said, None)
            assert 0 <= sure - own[f"{name}.sure"] < 1e-4
    errors = [row["id"] for row in wanted.values() if row["error"]]
    assert errors == ["000005", "000017", "000030"]
    report = read_report("plain.run.json")["review"]
    assert (report["unanswered"], report["rows"]) == (3, len(wanted) - 3)


@pytest.mark.parametrize("labels", ["Yes,No", "yes,no,fox"])
def test_a_job_of_labels_has_the_same_columns_for_its_only_answer(model: Path, labels: str) -> None:
    given = {"questions": None, "prompt_column": "text", "labels": labels}
    assert night(model, review="look.jsonl", **given)["exit_code"] == 0
    rows = {row["id"]: row for row in read_output("out.parquet")}
    for row in read_output("look.jsonl"):
        own = rows[row["id"]]
        assert list(row)[2:] == ["answer.question", "prediction", "answer.sure", "answer.right", "review"]
        assert (row["prediction"], row["answer.right"]) == (own["prediction"], None)
        if own["error"] is None:
            shares = pa.array([own[f"logprob_{name}"] for name in labels.split(",")]).to_numpy()
            best = 2.718281828 ** (shares.max() - shares[0]) * own["score"]
            assert 0 <= best - row["answer.sure"] < 1.1e-4
            assert row["answer.question"] == {"Yes,No": "Yes or No", "yes,no,fox": "yes, no or fox"}[labels]


@pytest.mark.parametrize("separator", [",", ";"])
def test_what_a_person_wrote_in_a_spreadsheet_are_the_right_answers(model: Path, separator: str) -> None:
    night(model)
    rows = {row["id"]: row for row in read_output("out.parquet")}
    written: dict[str, tuple[Any, ...]] = {}

    def edit(row: dict[str, Any]) -> None:
        if not isinstance(row["id"], int):
            raise TypeError("the zeros of an id are not lost")
        at = row["id"]
        row["refund.right"] = [True, "no", "Yes ", 0][at % 4]
        row["team.right"] = [f"{TEAMS[at % 3]} ", TEAMS[at % 3].title(), TEAMS[at % 3]][at % 2]
        row["anger.right"] = [float(at % 3), LEVELS[at % 3].upper(), at % 3][at % 2]
        written[f"{at:06}"] = (at % 4 in (0, 2), TEAMS[at % 3], LEVELS[at % 3])

    through_excel(edit, separator)
    done = calibrate()
    assert set(done["questions"]) == {"refund", "team", "anger"}
    for number, (name, found) in enumerate(done["questions"].items()):
        (entry,) = found["floors"]
        known = {id_: own[number] for id_, own in written.items() if rows[id_]["error"] is None}
        said = {id_: answers(rows[id_])[name][0] for id_ in known}
        said = {id_: word == "Yes" for id_, word in said.items()} if name == "refund" else said
        assert entry["rows"] == len(known) == ROWS - 3
        assert entry["right"] == sum(said[id_] == right for id_, right in known.items())
        assert found["truth"] == f"{name}.right"
        assert found["mistakes"] is None


def corrected(row: dict[str, Any]) -> None:
    """What someone writes who corrects only what is wrong: here every fourth answer."""
    if row["team"] is not None and row["id"] % 4 == 0:
        row["team.right"] = TEAMS[(TEAMS.index(row["team"]) + 1) % 3]


def test_blank_cells_are_unseen_unless_they_are_said_to_be_confirmed(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night(model)
    through_excel(corrected)
    scored = [row["id"] for row in read_output("out.parquet") if row["error"] is None]
    wrong = sum(int(id_) % 4 == 0 for id_ in scored)
    done = calibrate()
    (entry,) = done["questions"]["team"]["floors"]
    assert (entry["rows"], entry["right"], list(done["questions"])) == (wrong, 0, ["team"])
    assert "give --review-blank confirmed" in " ".join(capsys.readouterr().err.split())
    done = calibrate(review_blank="confirmed")
    (entry,) = done["questions"]["team"]["floors"]
    assert (entry["rows"], entry["right"]) == (len(scored), len(scored) - wrong)
    (entry,) = done["questions"]["refund"]["floors"]
    assert (entry["rows"], entry["right"]) == (len(scored), len(scored))


def test_a_blank_cell_confirms_nothing_that_nobody_was_to_look_at(model: Path) -> None:
    night(model, review_below="team=1")
    through_excel(corrected)
    assert list(calibrate(review_blank="confirmed")["questions"]) == ["team"]


def test_an_untouched_file_is_no_right_answers(model: Path) -> None:
    night(model)
    through_excel(lambda row: None)
    said = calibrate()["error"]
    assert "no right answer is written in refund.right, team.right, anger.right" in said
    assert "--review-blank confirmed" in said
    assert "this column has the answers that were shown" in calibrate(truth="team=team")["error"]


def test_what_is_no_option_and_ids_of_no_row_are_named_with_the_nearest(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night(model)

    def edit(row: dict[str, Any]) -> None:
        row["team.right"] = "tecnical" if row["id"] in (2, 3) else "billing"
        row["id"] = {7: "00O007", 8: 999999999}.get(row["id"], row["id"])

    through_excel(edit)
    done = calibrate()
    found = json.loads(Path("floors.json").read_text())
    mistakes = found["questions"]["team"]["mistakes"]
    assert mistakes["rows"] == 2
    assert mistakes["examples"] == [{"value": "tecnical", "rows": 2, "near": "technical"}]
    assert done["questions"]["team"]["floors"][0]["rows"] == ROWS - 3 - 2 - 2
    assert found["unknown_ids"]["rows"] == 2
    assert {"value": "00O007", "rows": 1, "near": "000007"} in found["unknown_ids"]["examples"]
    said = " ".join(capsys.readouterr().err.split())
    assert "2 right answers are none of billing, technical, other: tecnical (2 rows), nearest is technical" in said
    assert "2 ids of no row of out.parquet, left out: " in said
    assert "00O007, nearest is 000007" in said

    def all_wrong(row: dict[str, Any]) -> None:
        row["id"], row["team.right"] = f"ticket-{row['id']:06}", "billing"

    through_excel(all_wrong)
    said = calibrate()["error"]
    assert "none of its 40 ids is one of out.parquet: ticket-000000, nearest is 000000" in said


def test_rows_without_ids_are_found_by_their_number(model: Path) -> None:
    night(model, id_column=None, sample=20, seed=3)
    rows = {row["row"]: row for row in read_output("out.parquet")}

    def edit(row: dict[str, Any]) -> None:
        row["team.right"] = row["team"] if row["row"] % 2 else "other"

    through_excel(edit)
    (entry,) = calibrate()["questions"]["team"]["floors"]
    known = {at: row for at, row in rows.items() if row["error"] is None}
    assert entry["rows"] == len(known)
    assert entry["right"] == sum(bool(at % 2) or row["team"] == "other" for at, row in known.items())


def test_corrected_rows_are_right_answers_of_a_further_job(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    night(model)

    def edit(row: dict[str, Any]) -> None:
        if row["id"] % 3:
            row["team.right"] = ["Billing", "technical ", "tecnical"][row["id"] % 3]

    through_excel(edit)
    given = {"model": model, "questions": "q.yaml", "id_column": "id", "max_error_rate": 0.5}
    capsys.readouterr()
    assert score("looked.csv", "again.parquet", truth="team=team.right", **given)["exit_code"] == 0
    found = read_report("again.run.json")["evaluations"]["team"]
    rows = [row for row in read_output("again.parquet") if row["error"] is None and int(row["id"]) % 3 == 1]
    assert (found["rows"], found["mistakes"]["examples"][0]["near"]) == (len(rows), "technical")
    right = sum(row["team"] == "technical" for row in rows)
    assert found["accuracy"]["value"] == pytest.approx(right / len(rows))
    assert (
        "--truth team=team.right: 11 right answers are none of billing, technical, other: tecnical (11 rows)"
        in " ".join(capsys.readouterr().err.split())
    )


def test_a_file_that_somebody_filled_in_is_not_written_over(model: Path) -> None:
    night(model)
    assert night(model, resume=True)["exit_code"] == 0
    through_excel(corrected)
    before = Path("looked.csv").read_bytes()
    Path("look.csv").write_bytes(before)
    done = night(model, resume=True)
    assert done["exit_code"] == 2
    assert "without anybody's right answers" in done["error"]
    assert Path("look.csv").read_bytes() == before


def test_a_kept_column_with_the_name_of_one_of_the_file_is_refused(model: Path) -> None:
    make_tickets()
    rows = [{"id": str(at), "text": "fox", "team.right": "other"} for at in range(3)]
    given = {"model": model, "questions": "q.yaml", "keep_columns": ("team.right",), "review_below": "1"}
    done = score(write_jsonl("in.jsonl", rows), review="look.csv", **given)
    assert (done["exit_code"], done["error"].splitlines()[0]) == (
        2,
        "--review: its file has a column team.right already",
    )


def test_a_truth_column_named_like_a_question_is_told_before_torch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("q.yaml").write_text(QUESTIONS)
    rows = [{"text": "fox", "team": "other", "right": "bill"} for _ in range(3)]

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is opened")

    monkeypatch.setattr("prefillcli.scoring.opening.open_models", too_late)
    given = {"model": model, "questions": "q.yaml"}
    done = score(write_jsonl("in.jsonl", rows), truth="team=team", **given)
    assert (done["exit_code"], done["error"].splitlines()[0]) == (
        2,
        "--truth team: the output has a column team already",
    )
    done = score("in.jsonl", truth="team=right", **given)
    assert done["exit_code"] == 2
    assert "none of its values is a label: bill (3 rows), nearest is billing" in done["error"]


def test_the_model_is_not_its_own_judge(model: Path) -> None:
    night(model, "out.parquet")
    done = calibrate(truth="team=team", truth_from=None)
    assert (done["exit_code"], "has the answers of the model" in done["error"]) == (2, True)


def test_a_question_alone_needs_no_name(model: Path) -> None:
    Path("one.yaml").write_text(QUESTIONS.replace("  team", "#").replace("  anger", "#"))
    night(model, questions="one.yaml")
    rows = pq.read_table("out.parquet")
    table = rows.select(["id"]).append_column("was", pa.array(["yes", "No"] * (ROWS // 2)))
    pq.write_table(table, "right.parquet")
    done = calibrate(truth="was", truth_from="right.parquet")
    assert done["questions"]["refund"]["floors"][0]["rows"] == ROWS - 3


@pytest.mark.parametrize("flags", [{"truth": "refund=refund.right"}, {"truth": {"refund": "refund.right"}}])
def test_a_review_file_fits_the_probabilities_of_one_of_its_questions(
    model: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, Any]
) -> None:
    night(model)

    def edit(row: dict[str, Any]) -> None:
        row["refund.right"] = [True, "no", "perhaps"][row["id"] % 3]

    through_excel(edit)
    given = {"scores": "out.parquet", "truth_from": "looked.csv", **flags}
    done = calibrate_job(load_settings(CalibrateSettings, given, environment={}))
    fitted = json.loads(Path("calibration.json").read_text())
    rows = [int(row["id"]) % 3 for row in read_output("out.parquet") if row["error"] is None]
    assert (done["exit_code"], fitted["question"], fitted["fitted_on"]["truth"]) == (0, "refund", "refund.right")
    assert fitted["fitted_on"]["rows_by_label"] == {"Yes": rows.count(0), "No": rows.count(1)}
    assert fitted["fitted_on"]["mistakes"]["rows"] == rows.count(2)
    assert f"{rows.count(2)} right answers are none of Yes, No: perhaps" in " ".join(capsys.readouterr().err.split())


def test_the_only_question_is_fitted_without_its_name(model: Path) -> None:
    given = {"questions": None, "ask": "Do they want money back?"}
    night(model, **given)
    through_excel(lambda row: row.update({"answer.right": ["yes", "no"][row["id"] % 2]}))
    flags = {"scores": "out.parquet", "truth_from": "looked.csv"}
    for more in ({}, {"truth": "answer.right"}):
        done = calibrate_job(load_settings(CalibrateSettings, flags | more, environment={}))
        assert (done["exit_code"], done["rows"]) == (0, ROWS - 3)
