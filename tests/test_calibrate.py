"""`prefill calibrate` on rows of every kind, without a model: the files it reads, and what it refuses."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.errors import UsageError
from prefillcli.judging.calibration import Calibration, fit_platt, log_shares_of, read_calibrations
from prefillcli.options.commands import CalibrateSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.calibrate import calibrate_job
from tests.jobs.jobs import write_jsonl, write_parquet
from tests.unit.stats.test_calibration import sampled

ROWS = 120


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def calibrate(scores: str | Path = "s.parquet", **flags: Any) -> dict[str, Any]:
    """The summary of a job run in this process, quietly unless the flags say otherwise."""
    given = {"scores": str(scores), "truth": "answer", "quiet": True, **flags}
    return calibrate_job(load_settings(CalibrateSettings, given, environment={}))


def written(path: str = "calibration.json") -> Calibration:
    return read_calibrations(path, None)[0]


def columns(rows: int = ROWS, labels: tuple[str, ...] = ("Yes", "No"), **sampling: Any) -> dict[str, list[Any]]:
    """Rows as an output has them, with right answers."""
    logprobs, truth = sampled(rows, len(labels), slope=0.5, **sampling)
    found: dict[str, list[Any]] = {"row": list(range(rows)), "score": np.exp(log_shares_of(logprobs))[:, 0].tolist()}
    found |= {f"logprob_{label}": logprobs[:, at].tolist() for at, label in enumerate(labels)}
    return found | {"error": [None] * rows, "answer": [labels[at] for at in truth]}


def rows_of(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def test_the_file_has_the_fit_of_the_rows_and_what_it_was_fitted_on() -> None:
    table = columns()
    write_parquet("s.parquet", **table)
    summary = calibrate(method="platt", folds=4, seed=2)
    assert summary["exit_code"] == 0
    found = written()
    logprobs = np.array([table["logprob_Yes"], table["logprob_No"]]).T
    truth = np.array([("Yes", "No").index(answer) for answer in table["answer"]])
    assert found.scaling == fit_platt(log_shares_of(logprobs), truth)
    assert found.labels == ("Yes", "No")
    assert (found.folds, found.seed) == (4, 2)
    fitted = found.fitted_on
    assert fitted is not None
    assert (fitted.scores, fitted.truth, fitted.rows, fitted.job) == ("s.parquet", "answer", ROWS, {})
    assert fitted.rows_by_label == {name: table["answer"].count(name) for name in ("Yes", "No")}
    assert list(found.held_out) == ["none", "temperature", "platt", "isotonic"]
    assert summary["before"] == found.held_out["none"].model_dump()
    assert summary["after"] == found.held_out["platt"].model_dump()
    assert summary["method"] == "platt"


def test_auto_takes_the_smallest_log_loss_and_the_table_shows_them_all() -> None:
    write_parquet("s.parquet", **columns(600))
    done = CliRunner().invoke(app, ["calibrate", "s.parquet", "--truth", "answer", "-o", "c.json"])
    assert done.exit_code == 0
    line = json.loads(done.stdout.splitlines()[-1])
    held = written("c.json").held_out
    fitted = {name: each.log_loss for name, each in held.items() if name != "none"}
    assert line["method"] == min(fitted, key=lambda name: fitted[name])
    assert line["after"]["log_loss"] < line["before"]["log_loss"]
    for name, each in held.items():
        shown = next(
            text for text in done.stderr.splitlines() if text.startswith(name if name != "none" else "scores as is")
        )
        assert f"{each.log_loss:.4f}" in shown
        assert f"{each.log_loss_spread:.4f}" in shown
        assert ("*" in shown) == (name == line["method"])


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", "/", "*.parquet"])
def test_every_format_of_an_output_is_read(ending: str) -> None:
    table = columns()
    write_parquet("wanted.parquet", **table)
    calibrate("wanted.parquet", output="wanted.json")
    name = f"out{ending}"
    if "json" in ending:
        write_jsonl(name, rows_of(table))
    elif ending in ("/", "*.parquet"):
        folder = Path("out") if ending == "/" else Path()
        folder.mkdir(exist_ok=True)
        write_parquet(folder / "out-0.parquet", **{key: values[:50] for key, values in table.items()})
        write_parquet(folder / "out-1.parquet", **{key: values[50:] for key, values in table.items()})
    else:
        write_parquet(name, **table)
    assert calibrate(name)["exit_code"] == 0
    assert written().scaling == written("wanted.json").scaling


@pytest.mark.parametrize(
    ("labels", "answers"),
    [
        (("Yes", "No"), {"Yes": True, "No": False}),
        (("Yes", "No"), {"Yes": 1, "No": 0}),
        (("Yes", "No"), {"Yes": 1.0, "No": 0.0}),
        (("Yes", "No"), {"Yes": "yes", "No": "NO"}),
        (("positive", "negative"), {"positive": "yes", "negative": "no"}),
        (("No", "Yes"), {"No": False, "Yes": True}),
        (("1", "2"), {"1": 1, "2": 2}),
    ],
)
def test_right_answers_may_be_truth_values_and_numbers(labels: tuple[str, str], answers: dict[str, Any]) -> None:
    table = columns(labels=labels)
    write_parquet("wanted.parquet", **table)
    calibrate("wanted.parquet", output="wanted.json")
    write_parquet("s.parquet", **table | {"answer": [answers[each] for each in table["answer"]]})
    calibrate()
    assert written().scaling == written("wanted.json").scaling


def test_rows_that_cannot_be_used_are_left_out_and_counted() -> None:
    good = rows_of(columns())
    bad = [
        {**good[0], "score": None, "logprob_Yes": None, "logprob_No": None, "error": "null_prompt"},
        {**good[0], "score": -1.0},
        {**good[0], "score": math.nan},
        {**good[0], "score": 2.0},
        {**good[0], "logprob_Yes": math.nan},
        {**good[0], "logprob_No": math.inf},
        {**good[0], "logprob_No": None},
        {**good[0], "answer": None},
        {**good[0], "answer": ""},
        {**good[0], "answer": "maybe"},
    ]
    write_parquet("good.parquet", **columns())
    calibrate("good.parquet", output="good.json")
    pq.write_table(pa.Table.from_pylist([*bad, *good]), "s.parquet")
    assert calibrate()["exit_code"] == 0
    found = written()
    assert found.scaling == written("good.json").scaling
    assert found.fitted_on is not None
    assert found.fitted_on.left_out == {
        "without an answer": 1,
        "whose answer has no probabilities": 6,
        "without a right answer": 2,
        "whose right answer is none of the options": 1,
    }
    assert found.fitted_on.mistakes is not None
    assert [(each.value, each.rows) for each in found.fitted_on.mistakes.examples] == [("maybe", 1)]


def test_impossible_labels_have_a_place_in_the_fit() -> None:
    table = columns()
    for at in range(0, ROWS, 7):
        table["score"][at], table["logprob_Yes"][at], table["logprob_No"][at] = 1.0, -0.5, -math.inf
    write_parquet("s.parquet", **table)
    for method in ("temperature", "platt", "isotonic"):
        assert calibrate(method=method)["exit_code"] == 0
        assert np.isfinite(written().probabilities(np.array([[-0.5, -math.inf], [-1.0, -2.0]]))).all()


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_label_without_probability_is_known_where_a_format_has_no_infinity(ending: str) -> None:
    table = columns()
    for at in range(0, ROWS, 7):
        table["score"][at], table["logprob_Yes"][at], table["logprob_No"][at] = 1.0, -0.5, -math.inf
    write_parquet("wanted.parquet", **table)
    calibrate("wanted.parquet", output="wanted.json", method="platt")
    table["logprob_No"] = [None if each == -math.inf else each for each in table["logprob_No"]]
    if ending == "jsonl":
        write_jsonl("s.jsonl", rows_of(table))
    else:
        with Path("s.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table))
            writer.writeheader()
            writer.writerows(rows_of(table))
            file.write("a,line,that,has,far,too,many,cells\n")
    assert calibrate(f"s.{ending}", method="platt")["exit_code"] == 0
    fitted, wanted = written(), written("wanted.json")
    assert fitted.scaling == wanted.scaling
    assert fitted.fitted_on is not None
    assert fitted.fitted_on.left_out == ({} if ending == "jsonl" else {"that cannot be read": 1})


def test_a_column_of_lists_has_no_right_answers() -> None:
    write_parquet("s.parquet", **columns() | {"answer": [["Yes"]] * ROWS})
    assert 'none of its values is a label: ["Yes"]' in calibrate()["error"]


def test_lines_that_are_no_rows_are_left_out() -> None:
    rows: list[Any] = rows_of(columns())
    odd = {**rows[0], "score": "high", "logprob_Yes": [1]}
    write_jsonl("s.jsonl", [*rows, b"{broken", {"row": 5}, odd, 7])
    assert calibrate("s.jsonl")["exit_code"] == 0
    fitted = written().fitted_on
    assert fitted is not None
    assert fitted.rows == ROWS
    assert fitted.left_out == {"that cannot be read": 3, "whose answer has no probabilities": 1}


def test_right_answers_may_lie_in_another_file_by_id_or_by_row() -> None:
    table = columns()
    answers = table.pop("answer")
    write_parquet("wanted.parquet", **table, answer=answers)
    calibrate("wanted.parquet", output="wanted.json")
    write_parquet("s.parquet", **table)
    write_parquet("input.parquet", text=["x"] * ROWS, answer=answers)
    assert calibrate(truth_from="input.parquet")["exit_code"] == 0
    assert written().scaling == written("wanted.json").scaling

    named = {"post": [f"p{at}" for at in range(ROWS)]} | {name: own for name, own in table.items() if name != "row"}
    write_parquet("s.parquet", **named)
    others = [{"post": f"p{at}", "answer": answers[at]} for at in reversed(range(ROWS))]
    write_jsonl("answers.jsonl", [{"post": "unknown", "answer": "Yes"}, *others])
    assert calibrate(truth_from="answers.jsonl", id_column="post", output="by-id.json")["exit_code"] == 0
    assert written("by-id.json").scaling == written("wanted.json").scaling

    done = calibrate(truth_from="answers.jsonl")
    assert done["exit_code"] == 2
    assert "name it with --id-column" in done["error"]
    write_jsonl("twice.jsonl", [*others, {"post": "p3", "answer": "maybe"}])
    done = calibrate(truth_from="twice.jsonl", id_column="post")
    assert done["exit_code"] == 2
    assert "post p3 has two right answers" in done["error"]


def test_what_a_temperature_did_to_the_scores_does_not_matter() -> None:
    table = columns()
    write_parquet("s.parquet", **table)
    calibrate()
    plain = written()
    odds = np.array(table["logprob_Yes"]) - np.array(table["logprob_No"])
    write_parquet("s.parquet", **table | {"score": (1 / (1 + np.exp(-odds / 3))).tolist()})
    calibrate()
    assert written().scaling == plain.scaling
    assert written().held_out["platt"] == plain.held_out["platt"]
    assert written().held_out["none"] != plain.held_out["none"]  # the scores as they are


def test_several_labels_have_temperature_and_platt() -> None:
    write_parquet("s.parquet", **columns(300, ("a", "b", "c")))
    assert calibrate()["exit_code"] == 0
    assert list(written().held_out) == ["none", "temperature", "platt"]
    done = calibrate(method="isotonic")
    assert done["exit_code"] == 2
    assert done["error"].startswith("--method isotonic is for two labels, and there are 3: a, b, c")


def without(name: str) -> dict[str, list[Any]]:
    return {key: values for key, values in columns().items() if key != name}


@pytest.mark.parametrize(
    ("table", "flags", "said"),
    [
        (without("score"), {}, "not an output of prefill score"),
        (without("logprob_No"), {}, "not an output of prefill score"),
        (without("answer"), {}, "no column 'answer'\nscore with --truth answer, which keeps it"),
        (columns() | {"answer": ["Yes"] * ROWS}, {}, "No is the right answer of 0 rows; at least 10 rows"),
        (columns(12), {}, "at least 10 rows of each label are needed"),
        (columns(60), {"folds": 50}, "at least 50 rows of each label are needed"),
        (
            columns() | {"answer": ["?"] * ROWS},
            {},
            f"--truth answer: none of its values is a label: ? ({ROWS} rows)\nthe labels are Yes, No",
        ),
        (columns() | {"score": [None] * ROWS}, {}, f"({ROWS} without an answer)"),
        (columns() | {"score": ["high"] * ROWS}, {}, f"({ROWS} whose answer has no probabilities)"),
        (columns() | {"score": [1 - each for each in columns()["score"]]}, {}, "score is not the probability of Yes"),
        (columns() | {"exit_layer": [*[None] * (ROWS - 1), 9]}, {}, "rows left early (--exit)"),
        ({name: values[:0] for name, values in columns().items()}, {}, "it has no rows"),
        (columns(), {"truth": None}, "no --truth given"),
        (columns(), {"output": "c.parquet"}, "end it in .json"),
        (columns(), {"id_column": "row"}, "--id-column needs --truth-from"),
        (columns(), {"truth_from": "nowhere.parquet"}, "nowhere.parquet"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(table: dict[str, Any], flags: dict[str, Any], said: str) -> None:
    write_parquet("s.parquet", **table)
    words = ["calibrate", "s.parquet", "--truth", "answer"]
    for name, value in flags.items():
        if value is None:
            del words[-2:]
        else:
            words += ["--" + name.replace("_", "-"), str(value)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["exit_code"] == 2
    assert said in line["error"]
    assert len(line["error"].splitlines()) <= 3
    assert not Path("calibration.json").exists()


@pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1garbagePAR1"])
def test_a_file_that_is_damaged_is_named(content: bytes) -> None:
    Path("s.parquet").write_bytes(content)
    done = calibrate()
    assert done["exit_code"] in (1, 2)
    assert "s.parquet" in done["error"]


def test_a_calibration_that_brings_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    table = columns(400)
    truth = np.random.default_rng(1).permutation(table["answer"]).tolist()  # nothing to do with the scores
    logprobs, right = sampled(400)  # these hold as they are
    good = {"score": np.exp(log_shares_of(logprobs))[:, 0].tolist(), "logprob_Yes": logprobs[:, 0].tolist()}
    good |= {"logprob_No": logprobs[:, 1].tolist(), "answer": [("Yes", "No")[at] for at in right]}
    write_parquet("s.parquet", **table | good)
    assert calibrate(method="isotonic")["exit_code"] == 0
    assert "calibrating brings nothing here" in capsys.readouterr().err
    wrong = [{"Yes": "No", "No": "Yes"}[each] for each in good["answer"]]
    write_parquet("s.parquet", **table | good | {"answer": wrong})
    assert calibrate(method="platt")["exit_code"] == 0
    assert "every row gets the same probability" in capsys.readouterr().err
    write_parquet("s.parquet", **table | {"answer": truth})
    assert calibrate()["exit_code"] == 0


def test_scores_and_calibration_may_be_in_an_object_store() -> None:
    import fsspec

    write_parquet("s.parquet", **columns())
    calibrate()
    with fsspec.open("memory://calibrate/s.parquet", "wb") as file:
        file.write(Path("s.parquet").read_bytes())
    done = calibrate("memory://calibrate/s.parquet", output="memory://calibrate/c.json")
    assert done["exit_code"] == 0
    assert written("memory://calibrate/c.json").scaling == written().scaling


def test_a_right_answer_may_be_what_a_folder_names() -> None:
    table = columns()
    answers = table.pop("answer")
    write_parquet("wanted.parquet", **table, answer=answers)
    calibrate("wanted.parquet", output="wanted.json")
    for label in ("Yes", "No"):
        Path(f"out/answer={label}").mkdir(parents=True)
        own = {name: [each for each, own in zip(values, answers, strict=True) if own == label]
               for name, values in table.items()}  # fmt: skip
        write_parquet(f"out/answer={label}/part.parquet", **own)
    assert calibrate("out", method="platt")["exit_code"] == 0
    found, wanted = written().scaling, written("wanted.json").held_out["none"]
    assert found.method == "platt"
    assert written().held_out["none"].auc == pytest.approx(wanted.auc)


@pytest.mark.parametrize("name", ["slope", "temperature", "scores", "probabilities"])
def test_a_calibration_with_a_changed_digit_is_refused(name: str) -> None:
    """Also where the values still make a calibration."""
    write_parquet("s.parquet", **columns())
    calibrate(method={"slope": "platt", "temperature": "temperature"}.get(name, "isotonic"))
    text = Path("calibration.json").read_text()
    assert written().labels == ("Yes", "No")
    scaling = json.loads(text)["scaling"]
    value = scaling[name][0] if isinstance(scaling[name], list) else scaling[name]
    changed = json.loads(text.replace(str(value), str(value + 0.001 if value < 0.5 else value - 0.001)))
    assert changed["scaling"] != scaling
    Path("changed.json").write_text(json.dumps(changed))
    with pytest.raises(UsageError, match="it is not as prefill wrote it"):
        read_calibrations("changed.json", None)
    Path("indented.json").write_text(json.dumps(json.loads(text), indent=8, sort_keys=True))
    assert written("indented.json") == written()
    del changed["checksum"]
    Path("by_hand.json").write_text(json.dumps(changed))
    assert written("by_hand.json").scaling != written().scaling
