"""`--calibration` and `--calibrate-with`: the column `probability`, in every way that a job is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.special import expit, softmax

from prefillcli.errors import UsageError
from prefillcli.judging.calibration import Calibration, IsotonicSteps, PlattScaling, read_calibrations
from prefillcli.options.commands import CalibrateSettings
from prefillcli.options.load import load_settings
from prefillcli.ray import Scorer
from prefillcli.tools.calibrate import calibrate_job
from tests.jobs.jobs import (
    TOLERANCE,
    Reference,
    beside_answers,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.jobs.processes import Command, Hold, cut_small_windows, words_of
from tests.jobs.test_shards import merge

ROWS = 70
PLATT = PlattScaling(slope=0.5, biases=(0.7, 0.0))
TEMPLATE = "{{ shots }} {{ post }} Answer:"
SHOTS = "yes fox Answer: Yes no fox Answer: No"


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def save(path: str = "c.json", scaling: Any = PLATT, labels: tuple[str, ...] = ("Yes", "No"), **more: Any) -> str:
    Path(path).write_text(Calibration(labels=labels, scaling=scaling, **more).model_dump_json())
    return path


def make_input() -> Path:
    """Rows of which some are errors."""
    prompts: list[str | None] = [*texts(ROWS - 3), None, "", "fox"]
    return write_parquet("in.parquet", prompt=prompts, id=[f"r{i}" for i in range(ROWS)])


def make_posts(rows: int = ROWS) -> Path:
    return write_parquet("posts.parquet", post=texts(rows), shots=[SHOTS] * rows, n=[3] * rows)


def flags(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": model, "pack_tokens": 64, "max_error_rate": 0.5, "memory": "64MiB", **more}


def calibrate(scores: str, **more: Any) -> dict[str, Any]:
    given = {"scores": scores, "truth": "answer", "quiet": True, **more}
    return calibrate_job(load_settings(CalibrateSettings, given, environment={}))


def platt_of(row: dict[str, Any]) -> float:
    return float(expit(PLATT.slope * (row["logprob_Yes"] - row["logprob_No"]) + 0.7))


def assert_platt(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == ROWS
    assert sum(row["error"] is not None for row in rows) == 2
    assert max(abs(row["probability"] - row["score"]) for row in rows if row["error"] is None) > 0.05
    for row in rows:
        if row["error"] is not None:
            assert row["probability"] is None
        else:
            assert row["probability"] == pytest.approx(platt_of(row), rel=1e-9)


def test_the_probability_stands_beside_the_score_and_nothing_else_changes(model: Path) -> None:
    make_input()
    assert score("in.parquet", "plain.parquet", **flags(model))["exit_code"] == 0
    assert score("in.parquet", calibration=save(), **flags(model))["exit_code"] == 0
    assert "calibrations" not in read_report("plain.run.json")
    assert read_report()["calibrations"] == {"answer": {"method": "platt", "rows": None, "prior": None}}
    rows, plain = read_output("out.parquet"), read_output("plain.parquet")
    assert_platt(rows)
    assert list(rows[0])[:3] == ["row", "score", "probability"]
    for row, other in zip(rows, plain, strict=True):
        assert {name: row[name] for name in other if name != "seconds"} == {
            name: value for name, value in other.items() if name != "seconds"
        }


@pytest.mark.parametrize(("output", "more"), [("out.jsonl", {"workers": 2}), ("out/", {"temperature": 3})])
def test_it_is_in_every_format_and_the_temperature_has_no_part_in_it(
    model: Path, output: str, more: dict[str, Any]
) -> None:
    make_input()
    assert score("in.parquet", output, calibration=save(), **flags(model, **more))["exit_code"] == 0
    assert_platt(read_output(output))


def test_shards_write_the_same(model: Path) -> None:
    make_input()
    for shard in ("1/2", "2/2"):
        assert score("in.parquet", calibration=save(), shard=shard, **flags(model))["exit_code"] == 0
    assert merge()["exit_code"] == 0
    assert_platt(read_output("out.parquet"))


def test_several_labels_have_a_probability_each(model: Path) -> None:
    make_input()
    labels = ("Yes", "No", "yes")
    scaling = PlattScaling(slope=0.5, biases=(0.7, 0.0, -0.3))
    calibration = save(scaling=scaling, labels=labels)
    assert score("in.parquet", labels=labels, calibration=calibration, **flags(model))["exit_code"] == 0
    for row in read_output("out.parquet"):
        if row["error"] is None:
            logprobs = np.array([row[f"logprob_{label}"] for label in labels])
            wanted = softmax(0.5 * logprobs + np.array(scaling.biases))
            assert [row[f"probability_{label}"] for label in labels] == pytest.approx(wanted.tolist(), rel=1e-9)
            assert row["probability"] == row["probability_Yes"]


def test_a_table_is_calibrated_as_a_file(model: Path) -> None:
    make_input()
    table = pq.read_table("in.parquet")
    assert score("in.parquet", calibration=save(), **flags(model))["exit_code"] == 0
    scored = Scorer(model=model, calibration=save())(table)
    for row, wanted in zip(scored.to_pylist(), read_output("out.parquet"), strict=True):
        assert row["probability"] == pytest.approx(wanted["probability"], abs=TOLERANCE)
    with pytest.raises(UsageError, match="has a column 'probability' already"):
        Scorer(model=model, calibration=save())(table.append_column("probability", pa.nulls(ROWS)))


def test_a_kept_column_may_not_be_called_probability(model: Path) -> None:
    write_parquet("in.parquet", prompt=texts(3), probability=[1, 2, 3])
    done = score("in.parquet", calibration=save(), keep_columns="probability", **flags(model))
    assert done["exit_code"] == 2
    assert "the output has a column probability already" in done["error"]
    assert score("in.parquet", keep_columns="probability", **flags(model))["exit_code"] == 0


def test_a_killed_job_goes_on_with_the_same_probabilities(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_input()
    given: dict[str, Any] = {"template": "{{ prompt }}", "calibrate_with": "N/A", **flags(model)}
    assert score("in.parquet", "whole.parquet", **given)["exit_code"] == 0
    hold = Hold("prefillcli.engines.torch:TorchEngine.answer", 8)
    command = Command("score", "in.parquet", "-o", "out.parquet", *words_of(given), hold=hold)
    command.wait_until_held()
    command.kill()
    assert list(Path("out.parquet.prefill").glob("part-*"))
    again = "prefillcli.judging.calibration.contextual_calibrations"
    monkeypatch.setattr(again, lambda *_: pytest.fail("the prompt without content is scored once for a job"))
    assert score("in.parquet", resume=True, **given)["exit_code"] == 0
    found, wanted = read_output("out.parquet"), read_output("whole.parquet")
    assert [row["probability"] for row in found] == [row["probability"] for row in wanted]
    assert [row["error"] for row in found] == [row["error"] for row in wanted]


def test_another_calibration_is_another_job(model: Path) -> None:
    make_input()
    assert score("in.parquet", calibration=save(), **flags(model))["exit_code"] == 0
    assert score("in.parquet", calibration=save("renamed.json"), resume=True, **flags(model))["exit_code"] == 0
    other = save("other.json", PlattScaling(slope=0.6, biases=(0.7, 0.0)))
    for given in ({"calibration": other}, {}, {"template": "{{ prompt }}", "calibrate_with": "N/A"}):
        done = score("in.parquet", resume=True, **given, **flags(model))
        assert done["exit_code"] == 4
    assert "calibration" in score("in.parquet", resume=True, calibration=other, **flags(model))["error"]


def test_a_calibration_of_an_output_is_for_jobs_with_its_model_prompt_and_labels(
    model: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [("Yes", "No")[i % 2] for i in range(ROWS)]
    write_parquet("in.parquet", prompt=texts(ROWS), answer=answers)
    options: dict[str, Any] = {"template": "{{ prompt }}", **flags(model)}
    assert score("in.parquet", "s.parquet", keep_columns="answer", **options)["exit_code"] == 0
    assert score("in.parquet", "s/", keep_columns="answer", **options)["exit_code"] == 0
    for scores in ("s.parquet", "s/"):
        assert calibrate(scores)["exit_code"] == 0
        job = json.loads(Path("calibration.json").read_text())["fitted_on"]["job"]
        assert job == read_report("s.run.json")["fingerprint"]
    write_parquet("new.parquet", prompt=texts(20), id=list(range(20)))
    new: dict[str, Any] = {"inputs": "new.parquet", "calibration": "calibration.json", "overwrite": True}
    done = score(**new, **options, id_column="id", temperature=2)
    assert done["exit_code"] == 0
    assert beside_answers(capsys.readouterr().err) == []
    found = read_output("out.parquet")
    scaling = read_calibrations("calibration.json", None)[0]
    logprobs = np.array([[row["logprob_Yes"], row["logprob_No"]] for row in found])
    assert [row["probability"] for row in found] == scaling.probabilities(logprobs)[:, 0].tolist()

    for other, part in (
        ({"model": draft}, "model"),
        ({"template": "{{ prompt }}?"}, "prompt settings"),
        ({"labels": ("Yes= Yes|yes", "No")}, "label spellings"),
    ):
        done = score(**new, **options | other)
        assert done["exit_code"] == 2
        assert f"another {part}" in done["error"]
    capsys.readouterr()
    compressed = {"draft": draft, "keep": 0.5, "compress_above": 0}
    assert score(**new, **options, **compressed)["exit_code"] == 0
    assert "another draft and another compression; the probabilities may be off" in capsys.readouterr().err

    pq.write_table(pq.read_table("s.parquet").replace_schema_metadata(None), "copy.parquet")
    assert calibrate("copy.parquet")["exit_code"] == 0
    assert "cannot check that the calibration is for its model" in capsys.readouterr().err
    assert score(**new, **options)["exit_code"] == 0
    assert "does not name the model whose scores" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file\nmake it with prefill calibrate"),
        ("{", "it is not a calibration: Invalid JSON"),
        ('{"schema_version": 2}', "it is of another version of prefill"),
        ('{"labels": ["Yes", "No"]}', "scaling: Field required"),
        ('{"labels": ["No", "Yes"], "scaling": {"method": "temperature", "temperature": 1}}', "No, Yes, not Yes, No"),
        ('{"labels": ["Yes", "No"], "scaling": {"method": "temperature", "temperature": -1}}', "greater than 0"),
        ("\x00\xff", "it is not a calibration"),
    ],
)
def test_a_file_that_is_no_calibration_ends_the_run_before_anything_loads(
    content: str | None, said: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_input()
    if content is not None:
        Path("c.json").write_text(content)
    monkeypatch.setattr("prefillcli.scoring.loading.loader_of", lambda engine: pytest.fail("a model was opened"))
    monkeypatch.setattr("prefillcli.models.open.open_models", lambda settings: pytest.fail("a model was opened"))
    for dry_run in (False, True):
        done = score("in.parquet", calibration="c.json", dry_run=dry_run, **flags(model))
        assert done["exit_code"] == 2
        assert said in done["error"]
        assert len(done["error"].splitlines()) <= 3
    assert not Path("out.parquet").exists()


def test_a_calibration_may_be_in_an_object_store(model: Path) -> None:
    import fsspec

    make_input()
    text = Path(save()).read_text()
    with fsspec.open("memory://calibrations/c.json", "w") as file:
        file.write(text)
    assert score("in.parquet", calibration="memory://calibrations/c.json", **flags(model))["exit_code"] == 0
    assert_platt(read_output("out.parquet"))


def contextual(reference: Reference, prompt: str, without_content: list[str]) -> float:
    """W p of Zhao et al. for a prompt, after prompts without content."""
    shares = [softmax(np.array(reference.answer(text).logprobs)) for text in (prompt, *without_content)]
    found = shares[0] / np.mean(shares[1:], axis=0)
    return float(found[0] / found.sum())


@pytest.mark.parametrize("runner", [{"workers": 2}, {"engine": "hf"}], ids=["workers", "hf"])
def test_what_the_model_says_without_content_is_divided_out(
    model: Path, reference: Reference, runner: dict[str, Any]
) -> None:
    make_posts()
    options: dict[str, Any] = {"template": TEMPLATE, "calibrate_columns": "post", **flags(model), **runner}
    if "engine" in runner:
        del options["pack_tokens"], options["memory"]
    assert score("posts.parquet", calibrate_with=("N/A", "fox"), **options)["exit_code"] == 0
    free = [f"{SHOTS} {text} Answer:" for text in ("N/A", "fox")]
    rows = read_output("out.parquet")
    shares = np.mean([softmax(np.array(reference.answer(text).logprobs)) for text in free], axis=0)
    reported = read_report()["calibrations"]["answer"]["prior"]
    assert reported == pytest.approx(dict(zip(("Yes", "No"), shares.tolist(), strict=True)), abs=1e-5)
    for row, post in zip(rows, texts(ROWS), strict=True):
        assert row["probability"] == pytest.approx(contextual(reference, f"{SHOTS} {post} Answer:", free), abs=1e-5)
    assert max(abs(row["probability"] - row["score"]) for row in rows) > 0.01


def test_all_text_is_content_unless_columns_are_named(model: Path, reference: Reference) -> None:
    make_posts()
    template = "{{ shots }} {{ post }} {{ n }} Answer:"
    assert score("posts.parquet", template=template, calibrate_with="N/A", **flags(model))["exit_code"] == 0
    free = ["N/A N/A 3 Answer:"]
    for row, post in zip(read_output("out.parquet"), texts(ROWS), strict=True):
        wanted = contextual(reference, f"{SHOTS} {post} 3 Answer:", free)
        assert row["probability"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"calibrate_columns": "shots"}, "column post keeps its value, but it differs from row to row"),
        ({"template": "{{ post }} {{ id }}:"}, "column id keeps its value, but it differs from row to row"),
        ({"template": "{{ n }} Answer:"}, "no column of the template holds text"),
        ({"calibrate_columns": "prose"}, "the template has no such column\nit has: "),
        ({"template": "{% if post != 'N/A' %}{{ post }}{% endif %}"}, "no prompt can be made of it"),
        ({"template": None, "prompt_column": "post"}, "needs a --template or --questions, whose columns it replaces"),
        ({"calibrate_with": None, "calibrate_columns": "post"}, "--set calibrate_columns needs --calibrate-with"),
    ],
)
def test_what_has_no_prompt_without_content_is_refused(model: Path, given: dict[str, Any], said: str) -> None:
    posts = pq.read_table(make_posts()).append_column("id", pa.array(range(ROWS)))
    pq.write_table(posts, "posts.parquet")
    options = {"template": TEMPLATE, "calibrate_with": "N/A", **flags(model), **given}
    try:
        done = score("posts.parquet", **{name: value for name, value in options.items() if value is not None})
    except UsageError as error:
        done = {"exit_code": error.exit_code, "error": str(error)}
    assert done["exit_code"] == 2
    assert said in done["error"]
    assert not Path("out.parquet").exists()


def test_an_input_without_good_rows_has_no_probabilities(model: Path) -> None:
    for rows in (0, 3):
        write_parquet("posts.parquet", post=pa.nulls(rows, pa.string()))
        options = {"template": "{{ post or ' ' }}", "calibrate_with": "N/A", "overwrite": True, "max_error_rate": 1}
        done = score("posts.parquet", **flags(model) | options)
        assert (done["exit_code"], done["rows"]["empty"]) == (1, rows)
        table = pq.read_table("out.parquet")
        assert table["probability"].to_pylist() == [None] * rows
        assert table.schema.field("probability").type == pa.float64()


def test_json_lines_have_prompts_without_content_too(model: Path, reference: Reference) -> None:
    write_jsonl("posts.jsonl", [b"{broken", *({"post": text} for text in texts(9))])
    options = {"template": "{{ post }} Answer:", "calibrate_with": ("N/A", "[MASK]", ""), **flags(model)}
    assert score("posts.jsonl", "out.jsonl", **options)["exit_code"] == 0
    free = [f"{text} Answer:" for text in ("N/A", "[MASK]", "")]
    for row, post in zip(read_output("out.jsonl")[1:], texts(9), strict=True):
        assert row["probability"] == pytest.approx(contextual(reference, f"{post} Answer:", free), abs=1e-5)


def test_isotonic_steps_are_looked_up_by_the_score(model: Path) -> None:
    make_input()
    steps = IsotonicSteps(scores=(0.2, 0.5, 0.8), probabilities=(0.1, 0.3, 0.9))
    assert score("in.parquet", calibration=save(scaling=steps), **flags(model))["exit_code"] == 0
    rows = [row for row in read_output("out.parquet") if row["error"] is None]
    wanted = np.interp([row["score"] for row in rows], steps.scores, steps.probabilities)
    assert [row["probability"] for row in rows] == pytest.approx(wanted.tolist(), abs=1e-9)


def test_scores_that_a_norm_divides_are_not_calibrated_with_whole_log_probabilities(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [("Yes", "No")[i % 2] for i in range(ROWS)]
    source = write_parquet("in.parquet", prompt=texts(ROWS), answer=answers)
    assert score(source, "s.parquet", keep_columns="answer", label_norm="bytes", **flags(model))["exit_code"] == 0
    assert calibrate("s.parquet")["exit_code"] == 2
    assert "s.parquet: its scores are made of log-probabilities that --label-norm divides" in capsys.readouterr().err


def test_a_norm_divides_what_the_model_says_without_content_too(model: Path, reference: Reference) -> None:
    given = {"template": TEMPLATE, "calibrate_with": "N/A", "calibrate_columns": "post", "label_norm": "bytes"}
    assert score(make_posts(6), **given, **flags(model))["exit_code"] == 0

    def divided(text: str) -> np.ndarray:
        answer = reference.answer(f"{SHOTS} {text} Answer:")
        return np.array(answer.logprobs) / [3, 2]

    free = divided("N/A")
    for row, text in zip(read_output("out.parquet"), texts(6), strict=True):
        wanted = softmax(divided(text) - np.log(softmax(free)))
        assert row["probability"] == pytest.approx(wanted[0], abs=TOLERANCE)
