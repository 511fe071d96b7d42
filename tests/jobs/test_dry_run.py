"""`prefill score --dry-run` and predictions: what is told beforehand is what the run then does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefillcli.core.scorer import Granularity
from prefillcli.engines.memory_plan import PACK_SECONDS
from prefillcli.forecast.profile import Profile, this_machine
from prefillcli.report.run import versions
from prefillcli.rows.proof import hash_model
from tests.jobs.compression import ABOVE, CHUNK, FIRST, HOW, LAST, RATE, lines_of, unrelated
from tests.jobs.jobs import (
    Reference,
    beside_answers,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.jobs.test_command import last_line, prefill
from tests.unit.tools.profile.making import made_curve

PER_TOKEN, PER_PACK = 0.25, 3.0  # seconds of the made-up profile


def dry_run(inputs: Any, model: Path, **flags: Any) -> dict[str, Any]:
    """The report of a dry run."""
    line = score(inputs, model=model, dry_run=True, **flags)
    assert line["dry_run"]
    assert line["report"] == "out.dry-run.json"
    return read_report("out.dry-run.json")


def save_profile(directory: Path, **changes: Any) -> None:
    """A profile of this machine that takes seconds for a pack and for each token."""
    profile = Profile(
        model=hash_model(directory), model_name="plain", family="llama", dtype="float32", device="cpu",
        machine=this_machine("cpu"), budget_bytes=1 << 30, chunk_tokens=64, max_model_tokens=2048,
        completion=made_curve(PER_PACK, PER_TOKEN, 0.0), versions=versions(),
    )  # fmt: skip
    Path("profile.json").write_text(profile.model_copy(update=changes).model_dump_json())


SHARED = texts(60)
LITTLE = {"memory": "50670000", "chunk_tokens": 16}  # some 400 tokens, by the memory law
JOBS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "shared trees": (SHARED, {}),
    "small packs": (SHARED, {"pack_tokens": 50}),
    "many packs, nothing kept": (SHARED, {"pack_tokens": 150, "prefix_kv": "discard"}),
    "many packs, offloaded": (SHARED, {"pack_tokens": 150, "prefix_kv": "offload"}),
    "many packs, little memory": (SHARED, {"pack_tokens": 200, **LITTLE}),
    "error rows": (["fox", None, "", "dog " * 900, *SHARED], {"max_length": 300, "max_error_rate": 1}),
    "empty rows as errors": (["fox", None, "", *SHARED], {"max_error_rate": 1, "empty_text": "error"}),
    "skipped rows": (["dog " * 900, *SHARED], {"max_length": 300, "on_long": "skip"}),
    "shortened rows": (["dog " * 900, *SHARED], {"max_length": 100, "on_long": "truncate-left"}),
    "no rows": ([], {}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("job", JOBS)
def test_a_dry_run_plans_what_the_run_computes(job: str, model: Path) -> None:
    prompts, flags = JOBS[job]
    source = write_jsonl("in.jsonl", [{"prompt": prompt} for prompt in prompts])
    flags = {"memory": "64MiB", **flags}
    survey = dry_run(source, model, **flags)["survey"]
    assert score(source, model=model, **flags)["exit_code"] == (0 if prompts else 1)
    report = read_report()
    plan = survey["plan"]
    assert plan["computed_tokens"] == report["tokens"]["computed"]
    assert plan["packs"] == report["packs"]
    assert survey["unique_tokens"] == report["tokens"]["unique"]
    assert survey["prompt_tokens"] == report["tokens"]["prompt"]
    rows = survey["rows"]
    assert (rows["total"], rows["prompts"]) == (report["rows"]["total"], report["rows"]["scored"])
    for key in ("errors", "skipped", "empty", "errors_by_code"):
        assert rows[key] == report["rows"][key]
    assert rows["truncated"] == sum(bool(row["truncated"]) for row in read_output("out.parquet"))


def test_windows_are_planned_one_by_one_as_they_are_scored(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.jobs.jobs.granularity", Granularity(batch_rows=10, window_rows=20))
    source = write_parquet("in.parquet", prompt=SHARED, id=[*range(59), 3])
    flags = {"pack_tokens": 100, "id_column": "id", "max_error_rate": 0.1}
    survey = dry_run(source, model, **flags)["survey"]
    score(source, model=model, **flags)
    report = read_report()
    assert survey["windows"] == 3
    assert survey["unique_tokens"] == report["tokens"]["unique"]
    assert survey["plan"]["computed_tokens"] == report["tokens"]["computed"]
    assert survey["rows"]["errors_by_code"] == {"duplicate_id": 1} == report["rows"]["errors_by_code"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_error_rows_have_their_ids_where_these_are_known(model: Path, kind: str) -> None:
    columns = {"prompt": ["fox", None, "dog", "", "no"], "id": ["a", "b", "c", "d", None]}
    source = write_parquet("in.parquet", **columns)
    if kind == "jsonl":
        source = write_jsonl(
            "in.jsonl", [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        )
    flags = {"id_column": "id", "max_error_rate": 1, "empty_text": "error"}
    failed = dry_run(source, model, **flags)["survey"]["rows"]["failed"]
    score(source, model=model, **flags)
    assert [(own["row"], own["id"]) for own in failed] == [(1, "b"), (3, "d"), (4, None)]
    assert [(own["row"], own["id"]) for own in read_report()["failed"]] == [(1, "b"), (3, "d"), (4, None)]


def test_prompts_that_memory_does_not_hold_are_told(model: Path) -> None:
    source = write_jsonl("in.jsonl", lines_of([[5, 6, 7], [5] * 1900]))
    flags = {**LITTLE, "max_error_rate": 1}
    survey = dry_run(source, model, **flags)["survey"]
    score(source, model=model, **flags)
    assert survey["rows"]["errors_by_code"] == {"exceeds_memory": 1} == read_report()["rows"]["errors_by_code"]


def test_no_weights_are_loaded_and_no_output_is_touched(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_parquet("in.parquet", prompt=texts(4))
    score(source, model=model)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    monkeypatch.setattr("prefillcli.models.load.load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    report = dry_run(source, model)
    assert (report["status"], report["exit_code"]) == ("complete", 0)
    assert {path: path.read_bytes() for path in before} == before
    assert {path for path in Path().rglob("*") if path.is_file()} == {*before, Path("out.dry-run.json")}


def test_the_longest_prompt_is_the_least_of_memory_and_model(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(4))
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    planned = prefill("score", source, "-m", model, "--dry-run").stderr
    assert f"a prompt has at most {longest:,} " in planned
    planned = prefill("score", source, "-m", model, "--dry-run", "--max-length", 300).stderr
    assert "a prompt has at most 300 " in planned


def test_the_last_line_and_the_tables(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=[*texts(30), texts(1)[0], None])
    done = prefill("score", source, "-m", model, "--dry-run", "--report", "r/own.run.json", "--max-error-rate", 0.5)
    assert done.exit_code == 0
    line = last_line(done.stdout)
    assert (line["status"], line["dry_run"], line["report"]) == ("complete", True, "r/own.dry-run.json")
    assert (line["rows"]["empty"], line["rows"]["errors_by_code"]) == (1, {})
    assert line["predicted_seconds"] is None
    for text in (
        "31 to score of 32",
        "1 row with the whole prompt",
        "█",
        "this job",
        "prefill profile",
        "unique",
    ):
        assert text in done.stderr
    assert "\r" not in done.stderr
    assert prefill("score", source, "-m", model, "--dry-run", "--empty-text", "error").exit_code == 3
    assert prefill("score", source, "-m", model, "--dry-run", "-q", "--max-error-rate", 1).stderr == ""


def test_a_failed_dry_run_has_its_line_and_report_too(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(4))
    done = prefill("score", source, "-m", model, "--dry-run", "--labels", "Yes,Yes sir")
    assert done.exit_code == 2
    assert "begins label 'Yes sir'" in last_line(done.stdout)["error"]
    assert read_report("in.scores.dry-run.json")["status"] == "failed"
    assert prefill("score", source, "-m", model, "--dry-run", "--memory", "1MiB").exit_code == 5


def test_a_profile_that_fits_predicts_time_and_price(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=SHARED)
    save_profile(model)
    report = dry_run(source, model, pack_tokens=150, price_per_hour=7.2)
    plan = report["survey"]["plan"]
    seconds = PER_PACK * plan["packs"] + PER_TOKEN * plan["computed_tokens"]
    assert report["profile"] == "profile.json"
    assert plan["seconds"] == pytest.approx(seconds)
    assert plan["price"] == pytest.approx(seconds * 7.2 / 3600)
    score(source, model=model, pack_tokens=150)
    assert read_report()["predicted_seconds"] == pytest.approx(seconds)
    assert (
        f"{seconds:.1f} predicted by the profile" in prefill("score", source, "-m", model, "--pack-tokens", 150).stderr
    )


def test_a_price_needs_a_profile_that_predicts_time(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=SHARED)
    done = prefill("score", source, "-m", model, "--dry-run", "--price-per-hour", 2)
    assert done.exit_code == 2
    assert "--price-per-hour: no time is predicted" in done.stderr
    assert "`prefill profile` with this model makes one" in done.stderr
    environment = {"PREFILL_PRICE_PER_HOUR": "2"}  # for runs that predict
    assert prefill("score", source, "-m", model, "--dry-run", environment=environment).exit_code == 0


def test_a_profile_sizes_packs(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=SHARED)
    flags = {"memory": "100MiB", "chunk_tokens": 16}
    unmeasured = dry_run(source, model, **flags)["survey"]["limits"]
    save_profile(model)
    survey = dry_run(source, model, **flags)["survey"]
    limits = survey["limits"]
    assert limits["pack_tokens"] == (PACK_SECONDS - PER_PACK) // PER_TOKEN
    assert unmeasured["pack_tokens"] > 2 * limits["pack_tokens"]
    score(source, model=model, **flags)
    assert read_report()["packs"] == survey["plan"]["packs"] > 2
    asked = dry_run(source, model, **flags, pack_tokens=100)["survey"]["limits"]
    assert asked["pack_tokens"] == 100


def test_a_resumed_run_predicts_what_it_does_itself(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(6))
    save_profile(model)
    score(source, model=model)
    score(source, model=model, resume=True)
    assert read_report()["predicted_seconds"] is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"model": "other"}, "another model"),
        ({"no_completion": "it was too busy"}, "it was too busy"),
    ],
)
def test_a_profile_of_something_else_or_with_a_bad_fit_predicts_nothing(
    changes: dict[str, Any], why: str, model: Path
) -> None:
    source = write_parquet("in.parquet", prompt=texts(3))
    unmeasured = dry_run(source, model)["survey"]["limits"]["pack_tokens"]
    save_profile(model, **changes)
    report = dry_run(source, model)
    assert report["survey"]["limits"]["pack_tokens"] == unmeasured  # nor does it size packs
    assert why in report["no_prediction"]
    assert report["survey"]["plan"]["seconds"] is None
    done = prefill("score", source, "-m", model)
    ran = read_report("in.scores.run.json")
    assert (done.exit_code, ran["predicted_seconds"]) == (0, None)
    assert why in ran["no_prediction"]
    assert "prefill: no prediction: profile.json" in done.stderr
    assert beside_answers(prefill("score", source, "-m", model, "--overwrite", "--quiet").stderr) == []
    named = prefill("score", source, "-m", model, "--profile", "profile.json", "--overwrite")
    assert named.exit_code == 0
    assert why in named.stderr


def test_a_profile_that_is_asked_for_must_be_one(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(3))
    missing = prefill("score", source, "-m", model, "--profile", "none.json")
    assert missing.exit_code == 2
    assert "none.json" in missing.stderr
    Path("profile.json").write_text(json.dumps({"something": "else"}))
    assert prefill("score", source, "-m", model, "--profile", "profile.json", "--dry-run").exit_code == 2
    assert prefill("score", source, "-m", model, "--dry-run").exit_code == 0, "nobody asked for it"


def test_the_predicted_end_is_shown_on_the_way(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(12))
    save_profile(model)
    arguments = ("score", source, "-m", model, "--pack-tokens", "40", "--progress-interval", "0.001")
    lines = [line for line in prefill(*arguments).stderr.splitlines() if "tokens/s, about" in line]
    assert lines
    assert lines[-1].endswith(" left")


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet("in.parquet", prompt=texts(3))
    monkeypatch.setattr("prefillcli.runtime.memory.loadable_memory", lambda device: 1000)
    monkeypatch.setattr("prefillcli.models.load.load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    done = prefill("score", source, "-m", model, "--dtype", "bfloat16")
    assert done.exit_code == 5
    assert "GiB in bfloat16" in done.stderr
    assert prefill("score", source, "-m", model, "--dtype", "bfloat16", "--dry-run").exit_code == 5
    planned = prefill("score", source, "-m", model, "--dtype", "bfloat16", "--dry-run", "--memory", "1GiB")
    assert planned.exit_code == 0
    assert "a run would fail here" in planned.stderr


@pytest.mark.nightly
def test_ten_times_the_rows_take_hardly_more_memory(model: Path) -> None:
    peaks = []
    for rows in (20_000, 200_000):
        write_jsonl("in.jsonl", [{"prompt": f"fox {number % 9973}: yes?"} for number in range(rows)])
        command = [sys.executable, "-m", "prefillcli", "score", "in.jsonl", "-m", str(model), "--dry-run", "-q"]
        done = subprocess.run(command, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert last_line(done.stdout.decode())["rows"]["prompts"] == rows
        peaks.append(read_report("in.scores.dry-run.json")["peak_memory_bytes"])
    assert peaks[1] <= 1.2 * peaks[0]


def test_a_signal_stops_a_dry_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_parquet("in.parquet", prompt=texts(3))
    monkeypatch.setattr(
        "prefillcli.forecast.survey.InputStatistics.add", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    line = score(source, model=model, dry_run=True)
    assert (line["status"], line["exit_code"]) == ("interrupted", 143)


def test_keep_rates_are_estimated_with_a_draft(model: Path, draft: Path, reference: Reference) -> None:
    lengths = [40, 90, 200, 333, 500]
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, lengths)))
    survey = dry_run(source, model, draft=draft, **HOW)["survey"]
    keeps = {each["keep"]: each for each in survey["keeps"]}
    assert keeps[1.0]["kept_tokens"] == sum(lengths) == survey["prompt_tokens"]
    assert keeps[1.0]["compressed_rows"] == 0
    assert [each["kept_tokens"] for each in survey["keeps"]] == sorted(
        (each["kept_tokens"] for each in survey["keeps"]), reverse=True
    )
    score(source, model=model, draft=draft, **HOW)
    kept, compressed = keeps[RATE]["kept_tokens"], sum(length > ABOVE for length in lengths)
    assert keeps[RATE]["chosen"]
    assert keeps[RATE]["compressed_rows"] == compressed
    found = read_report()["tokens"]["kept"]
    assert abs(kept - found) <= compressed * (FIRST + LAST + CHUNK), "chosen chunks may be those that are kept anyway"
    plan = survey["plan"]
    assert plan["computed_tokens"] == keeps[RATE]["computed_tokens"]


def test_a_draft_does_not_read_what_is_too_long_for_it(model: Path, draft: Path, reference: Reference) -> None:
    lengths = [200, 2048]  # the draft decodes ahead, and its positions end with the prompt's
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, lengths)))
    flags = {name: value for name, value in HOW.items() if name != "lookahead"}
    survey = dry_run(source, model, draft=draft, **flags)["survey"]
    score(source, model=model, draft=draft, **flags)
    methods = [row["method"] for row in read_output("out.parquet")]
    assert methods == ["specprefill", "fallback:draft_length"]
    assert [each["compressed_rows"] for each in survey["keeps"] if each["chosen"]] == [1]


@pytest.mark.parametrize(
    ("flags", "kv"),
    [
        ({}, "kept"),
        ({"rationale_limit": 3, "rationale_when": "score < 2"}, "again"),
        ({"memory": "52000000", "chunk_tokens": 16}, "kept"),
    ],
)
def test_whether_keys_and_values_survive_scoring_is_told_beforehand(
    flags: dict[str, Any], kv: str, model: Path
) -> None:
    write_parquet("in.parquet", prompt=SHARED[:12])
    flags = {"rationale": 4, "memory": "64MiB", **flags}
    found = dry_run("in.parquet", model, **flags)["survey"]["texts"]
    assert found["kv"] == kv
    score("in.parquet", model=model, **flags)
    report = read_report()["rationales"]
    assert (report["kv"], report["kv_reason"], report["kv_bytes"]) == (found["kv"], found["reason"], found["bytes"])
    assert (report["kept_prompts"] > 0) == (kv == "kept")
    assert dry_run("in.parquet", model)["survey"]["texts"] is None
