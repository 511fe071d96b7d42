"""Whatever stops a job that compresses, going on with it gives what an undisturbed run would have given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefillcli.reading.compress.compressor import RATES
from tests.jobs.compression import HOW, compressed, lines_of, unrelated
from tests.jobs.jobs import Reference, read_output, read_report, score, write_jsonl
from tests.jobs.models import save_model
from tests.jobs.processes import Command, Hold, cut_small_windows, words_of

ROWS = 70
ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
PACK = "prefillcli.scoring.recorder:Recorder.pack_begins"
ESTIMATE = "prefillcli.reading.compress.draft:Draft.estimate"
AUTO = {"keep": "auto", "max_flips": 0.999, "audit": 25}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def make_input(reference: Reference) -> Path:
    """Rows of users, rows by themselves, short ones, one that is an error, and one with a rate of its own."""
    rng = np.random.default_rng(0)
    histories = unrelated(reference, [90, 120, 75])
    prompts = [
        [*histories[number % 3], *rng.integers(3, 260, 20 + number % 7).tolist(), *histories[0][-4:]]
        for number in range(ROWS - 20)
    ] + unrelated(reference, [30 + 6 * number for number in range(20)], seed=1)
    keep: list[Any] = [...] * ROWS
    keep[7], keep[33], keep[60] = 0.6, 2, None
    truth = [("Yes", "No")[number % 3 == 0] for number in range(ROWS)]
    return write_jsonl("in.jsonl", lines_of(prompts, keep=keep, truth=truth))


#: None leaves an option out.
NO_COMPRESSION = dict.fromkeys(("draft", "audit", "truth", *HOW))


def flags(model: Path, draft: Path, **more: Any) -> dict[str, Any]:
    given = {"pack_tokens": 150, "max_error_rate": 0.5, "audit": 25, "truth": "truth", "overwrite": False}
    return {"model": model, "draft": draft, **given, **more}


def arguments(model: Path, draft: Path, *more: object, **changes: Any) -> list[object]:
    given = HOW | flags(model, draft, **changes)
    del given["overwrite"]
    return ["score", "in.jsonl", "-o", "out.parquet", *words_of(given), *more]


def without_seconds(path: str = "out.parquet") -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_output(path)]


def parts() -> list[Path]:
    return sorted(Path("out.parquet.prefill").glob("part-*.parquet"))


@dataclass(frozen=True)
class Undisturbed:
    """What a run that nothing stops gives."""

    rows: list[dict[str, Any]]
    report: dict[str, Any]


def run_undisturbed(folder: Path, reference: Reference, options: dict[str, Any]) -> Undisturbed:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cut_small_windows(patch)
        assert compressed(make_input(reference), **options)["exit_code"] == 0
        return Undisturbed(without_seconds(), read_report())


@pytest.fixture(scope="module")
def whole(model: Path, draft: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    whole = run_undisturbed(tmp_path_factory.mktemp("whole"), reference, flags(model, draft))
    methods = [row["method"] for row in whole.rows]
    assert (methods.count("specprefill"), methods.count("full"), methods.count(None)) == (63, 6, 1)
    assert whole.report["audits"]["answer"]["rows"] == 25
    assert whole.report["packs"] > 20
    return whole


@pytest.fixture(scope="module")
def whole_auto(
    model: Path, draft: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    whole = run_undisturbed(tmp_path_factory.mktemp("auto"), reference, flags(model, draft, **AUTO))
    assert whole.report["keep"] == RATES[-1]
    return whole


def assert_resumes(whole: Undisturbed, options: dict[str, Any], same_packs: bool = True) -> dict[str, Any]:
    """The job goes on to the undisturbed output, audit included; the report of the resumed run."""
    summary = compressed("in.jsonl", resume=True, **options)
    assert summary["exit_code"] == 0
    assert len(whole.rows) == ROWS
    if same_packs:
        assert without_seconds() == whole.rows
    report = read_report()
    assert summary["rows"] == whole.report["rows"]
    assert report["audits"]["answer"] == whole.report["audits"]["answer"] or not same_packs
    assert report["keep"] == whole.report["keep"]
    assert report.get("keep_auto") == whole.report.get("keep_auto")
    assert not parts()
    return report


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "hold",
    [
        Hold(ANSWER, 1),
        Hold(ANSWER, 17),
        Hold(ESTIMATE, 2),
        Hold("prefillcli.rows.output.sink:Sink.finish"),
    ],
    ids=["before the first pack", "in a later window", "in the draft", "before the output"],
)
def test_resume_after_kill_loses_no_row(
    model: Path, draft: Path, reference: Reference, whole: Undisturbed, hold: Hold
) -> None:
    make_input(reference)
    command = Command(*arguments(model, draft), hold=hold)
    command.wait_until_held()
    safe = len(parts())
    command.kill()
    report = assert_resumes(whole, flags(model, draft))
    assert report["resumed"] is (safe > 0)
    if safe:
        assert report["tokens"]["prompt"] < whole.report["tokens"]["prompt"]


def test_a_finished_job_is_not_done_again(model: Path, draft: Path, reference: Reference, whole: Undisturbed) -> None:
    compressed(make_input(reference), **flags(model, draft))
    summary = compressed("in.jsonl", resume=True, **flags(model, draft))
    assert summary["exit_code"] == 0
    report = read_report()
    assert (report["tokens"]["computed"], report["tokens"]["draft"]) == (0, 0)
    assert (report["audits"]["answer"], report["keep"]) == (whole.report["audits"]["answer"], HOW["keep"])
    assert without_seconds() == whole.rows


def test_a_rate_that_was_chosen_stands(
    model: Path, draft: Path, reference: Reference, whole_auto: Undisturbed
) -> None:
    make_input(reference)
    command = Command(*arguments(model, draft, **AUTO), hold=Hold(PACK, 9))
    command.wait_until_held()
    command.kill()
    assert json.loads(Path("out.parquet.prefill/manifest.json").read_text())["settled"]["keep"] == RATES[-1]
    assert_resumes(whole_auto, flags(model, draft, **AUTO))


def test_a_job_that_was_stopped_before_the_choice_chooses_the_same(
    model: Path, draft: Path, reference: Reference, whole_auto: Undisturbed
) -> None:
    make_input(reference)
    command = Command(
        *arguments(model, draft, **AUTO), hold=Hold("prefillcli.reading.compress.compressor:answer_requests", 2)
    )
    command.wait_until_held()
    command.kill()
    assert "keep" not in json.loads(Path("out.parquet.prefill/manifest.json").read_text())["settled"]
    assert_resumes(whole_auto, flags(model, draft, **AUTO))


def test_another_way_to_compress_is_another_job(
    model: Path, draft: Path, reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_input(reference)
    command = Command(*arguments(model, draft), hold=Hold(ANSWER, 8))
    command.wait_until_held()
    command.kill()
    safe = [path.read_bytes() for path in parts()]
    other = save_model(tmp_path / "other", seed=4, layers=1)
    for changes, part in (
        ({"keep": 0.4}, "compression"),
        ({"draft": other}, "draft"),
        (NO_COMPRESSION, "draft"),
    ):
        options = HOW | flags(model, draft) | changes | {"resume": True}
        given = {name: value for name, value in options.items() if value is not None}
        assert score("in.jsonl", "out.parquet", **given)["exit_code"] == 4
        message = capsys.readouterr().err
        assert "belongs to another job" in message
        assert part in message
    assert [path.read_bytes() for path in parts()] == safe
    assert not Path("out.run.json").exists()
