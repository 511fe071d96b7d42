"""What a job writes beside its output: histograms of all rows, the page, metrics; however it ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefillcli.report.run import Seconds
from prefillcli.runtime.clock import Clock, MemoryWatch, Phase
from tests.jobs.jobs import read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_since import stop_at_pack

ROWS = 60


def make_input(kind: str = "parquet") -> Path:
    """Rows with ids of which every tenth is an error and one in twenty too long."""
    prompts = [None if at % 10 == 3 else "fox " * 60 if at % 20 == 7 else text for at, text in enumerate(texts(ROWS))]
    ids = [f"id-{at}" for at in range(ROWS)]
    if kind == "parquet":
        return write_parquet("in.parquet", prompt=prompts, id=ids)
    return write_jsonl("in.jsonl", [{"prompt": p, "id": i} for p, i in zip(prompts, ids, strict=True)])


def flags(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": model, "id_column": "id", "max_error_rate": 0.5, "max_length": 100, "empty_text": "error", **more}


def test_every_phase_of_the_clock_is_a_key_of_the_report() -> None:
    beside = {"total", "render", "tokenize"}  # not measured by the clock's phases
    assert Seconds.model_fields.keys() == set(get_args(Phase)) | beside


ASKED = """
questions:
  refund: {type: predicate, instructions: "Is it?"}
  topic: {type: choice, instructions: "What?", choices: [fox, dog, cat], when: "refund > 0.5"}
  anger: {type: score, instructions: "How?", levels: [calm, angry]}
"""


def assert_told(told: dict[str, Any], name: str, rows: list[dict[str, Any]], shares: list[dict[str, float]]) -> None:
    """The report says of a question what its probabilities in the output, by row, say."""
    best = [max(own, key=own.__getitem__) for own in shares]
    assert told["answers"] == {answer: best.count(answer) for answer in set(best)}
    assert told["rows"] == len(rows)
    prefix = f"{name}." if name else ""
    assert told["label_mass"] == pytest.approx(np.mean([row[f"{prefix}label_mass"] for row in rows]))
    ordered = [sorted(own.values()) for own in shares]
    assert told["close"] == sum(own[-1] <= 3 * own[-2] for own in ordered)
    least = sorted((own[-1], row["id"]) for own, row in zip(ordered, rows, strict=True))[: len(told["least_sure"])]
    assert len(least) == min(10, len(rows))
    assert [(pytest.approx(each["probability"]), each["id"]) for each in told["least_sure"]] == least


@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl"])
def test_the_answers_to_each_question_are_those_of_the_output(
    model: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch)
    Path("q.yaml").write_text(ASKED)
    summary = score(make_input("jsonl"), output, **flags(model, questions="q.yaml"))
    assert summary["exit_code"] == 0, summary
    rows = [row for row in read_output(output) if row["error"] is None]
    report = read_report(summary["report"])
    chosen = [row for row in rows if row["topic"] is not None]
    assert 0 < len(chosen) < len(rows)
    yes = [{"Yes": row["refund"], "No": 1 - row["refund"]} for row in rows]
    assert_told(report["answers"]["refund"], "refund", rows, yes)
    for name, own in (("topic", chosen), ("anger", rows)):
        assert_told(report["answers"][name], name, own, [row[f"{name}.probabilities"] for row in own])
    assert summary["answers"] == {name: own["answers"] for name, own in report["answers"].items()}
    assert report["mean_score"] is None
    assert "mean_score" not in summary
    assert summary["verdict"] == report["verdict"]
    assert report["verdict"]["text"] in Path(summary["page"]).read_text()


@pytest.mark.parametrize("labels", ["fox,dog", "fox,dog,cat"])
def test_the_answers_of_a_job_of_labels_are_those_of_the_output(labels: str, model: Path) -> None:
    summary = score(make_input(), **flags(model, labels=labels))
    rows = [row for row in read_output("out.parquet") if row["error"] is None]
    weights = [{name: np.exp(row[f"logprob_{name}"]) for name in labels.split(",")} for row in rows]
    shares = [{name: value / sum(own.values()) for name, value in own.items()} for own in weights]
    assert_told(read_report()["answers"]["answer"], "", rows, shares)
    assert summary["mean_score"] == pytest.approx(np.mean([row["score"] for row in rows]))


def test_quietly_what_is_wrong_with_the_answers_is_a_warning(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["The quick brown fox saw a dog."] * 30
    source = write_parquet("in.parquet", prompt=prompts, truth=["No"] * 20 + ["Yes"] * 10)
    score(source, model=model, labels="Yes,No", truth="truth")
    (said,) = read_report()["answers"]["answer"]["answers"]
    told = capsys.readouterr().err
    assert f"answer: all 30 rows have the answer {said}" in told
    assert ("always answering No is right in 66.7%" in told) == (said == "Yes")


def test_a_phase_that_the_report_does_not_know_costs_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithPolish(Clock):
        def __init__(self) -> None:
            super().__init__()
            with self.phase("polish"):  # type: ignore[arg-type]
                pass

    monkeypatch.setattr("prefillcli.scoring.score.Clock", WithPolish)
    assert score(make_input(), **flags(model))["exit_code"] == 0
    assert 0 <= read_report()["seconds"]["polish"] < 1


def assert_sums_up(rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Everything that run.json says of rows follows from the output."""
    scored = [row for row in rows if row["error"] is None]
    histogram = report["histograms"]["score"]
    assert histogram["counts"].keys() == {row["prediction"] for row in scored}
    for name, counts in histogram["counts"].items():
        own = [row["score"] for row in scored if row["prediction"] == name]
        assert counts == np.histogram(own, 50, (0, 1))[0].tolist()
    assert histogram["edges"] == pytest.approx(np.linspace(0, 1, 51))
    lengths = report["histograms"]["prompt_tokens"]
    edges = lengths["edges"]
    kinds = {
        "scored": [row["prompt_tokens"] for row in scored if not row["truncated"]],
        "truncated": [row["prompt_tokens"] for row in scored if row["truncated"]],
        "error": [row["prompt_tokens"] for row in rows if row["error"] and row["prompt_tokens"] is not None],
    }
    assert lengths["counts"].keys() == {kind for kind, own in kinds.items() if own}
    for kind, counts in lengths["counts"].items():
        assert counts == np.histogram(kinds[kind], edges)[0].tolist()
        assert sum(counts) == len(kinds[kind])
    methods = [row["method"] for row in scored]
    assert report["methods"] == {name: methods.count(name) for name in set(methods)}
    slowest = sorted(scored, key=lambda row: -row["seconds"])[:20]
    assert [row["seconds"] for row in report["slowest"]] == [row["seconds"] for row in slowest]
    by_id = {row["id"]: row for row in rows}
    for named in report["slowest"]:
        own = by_id[named["id"]]
        assert {
            key: own[key] for key in ("seconds", "prompt_tokens", "computed_tokens", "method")
        }.items() <= named.items()
    errors = [row["id"] for row in rows if row["error"] not in (None, "skipped_too_long")]
    assert len(report["failed"]) == min(20, len(errors))
    for named in report["failed"]:
        assert named["id"] in errors
        assert (named["code"], named["detail"]) == (by_id[named["id"]]["error"], by_id[named["id"]]["error_detail"])


@pytest.mark.parametrize(
    ("kind", "output", "on_long"),
    [("parquet", "out.parquet", "error"), ("jsonl", "out.jsonl", "truncate-left"), ("jsonl", "o/", "skip")],
)
def test_histograms_and_named_rows_are_those_of_the_output(
    model: Path, kind: str, output: str, on_long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch)
    summary = score(make_input(kind), output, **flags(model, on_long=on_long))
    assert summary["exit_code"] == 0
    assert_sums_up(read_output(output), read_report(summary["report"]))
    page = Path(summary["page"])
    assert page == Path(summary["report"]).with_suffix(".html")
    assert "id-3" in page.read_text()


def test_an_interrupted_job_and_the_one_that_goes_on_tell_of_all_rows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch, flush_seconds=0.0)
    source, how = make_input(), flags(model, pack_tokens=64, metrics_file="m/prefill.prom")
    with monkeypatch.context() as patch:
        stop_at_pack(patch, 8)
        summary = score(source, **how)
    assert (summary["status"], summary["exit_code"]) == ("interrupted", 143)
    report = read_report()
    assert 0 < sum(sum(counts) for counts in report["histograms"]["score"]["counts"].values()) < ROWS
    assert "interrupted, exit code 143" in Path("out.run.html").read_text()
    assert "prefill_run_exit_code 143\n" in Path("m/prefill.prom").read_text()
    summary = score(source, resume=True, **how)
    assert summary["exit_code"] == 0
    assert_sums_up(read_output("out.parquet"), read_report())
    assert "The job was resumed" in Path("out.run.html").read_text()
    assert "prefill_run_exit_code 0\n" in Path("m/prefill.prom").read_text()


@pytest.mark.parametrize("keep_manifest", [True, False])
def test_a_job_that_is_done_tells_of_its_rows_again(model: Path, keep_manifest: bool) -> None:
    source = make_input()
    score(source, **flags(model))
    before = read_report()
    if not keep_manifest:
        Path("out.parquet.prefill/manifest.json").unlink()
    score(source, resume=True, **flags(model))
    after = read_report()
    for key in ("rows", "methods", "histograms"):
        assert after[key] == before[key]
    for key in ("slowest", "failed"):
        without = [[{**row, "row": None} for row in report[key]] for report in (before, after)]
        assert without[0] == without[1]


def test_a_job_that_fails_before_anything_is_known_has_its_files(model: Path) -> None:
    summary = score("none.parquet", model=model, metrics_file="prefill.prom")
    assert summary["exit_code"] == 2
    assert "none.parquet" in Path(summary["page"]).read_text()
    (exit_code,) = [
        sample.value
        for family in text_string_to_metric_families(Path("prefill.prom").read_text())
        for sample in family.samples
        if sample.name == "prefill_run_exit_code"
    ]
    assert exit_code == 2


def test_the_page_follows_the_report(model: Path) -> None:
    summary = score(make_input(), **flags(model, report="r/numbers.json"))
    assert (summary["report"], summary["page"]) == ("r/numbers.json", "r/numbers.html")
    assert read_report("r/numbers.json")["page"] == "r/numbers.html"
    assert Path("r/numbers.html").exists()


def test_a_second_output_of_the_same_stem_leaves_the_report_of_the_first(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(3))
    given: dict[str, Any] = {"model": model}
    assert score(source, "a.csv", **given)["report"] == "a.run.json"
    before = Path("a.run.json").read_bytes(), Path("a.run.html").read_bytes()
    other = score(source, "a.parquet", **given)
    assert (other["exit_code"], other["report"], other["page"]) == (0, "a.parquet.run.json", "a.parquet.run.html")
    assert read_report("a.parquet.run.json")["output"] == "a.parquet"
    assert (Path("a.run.json").read_bytes(), Path("a.run.html").read_bytes()) == before
    assert score(source, "a.csv", **given, resume=True)["report"] == "a.run.json"
    Path("a.csv").unlink()
    assert score(source, "a.parquet", **given, overwrite=True)["report"] == "a.run.json"


def test_odd_ids_are_written(model: Path) -> None:
    ids: list[Any] = ["\ud800", "x" * 9000, 10**30, 1.5, True, {"a": [1]}, "\x00"]
    lines = [json.dumps({"prompt": None, "id": each}).encode() for each in ids]
    lines.append(b'{"prompt": "fox", "id": 1}')
    summary = score(write_jsonl("in.jsonl", lines), "out.jsonl", **flags(model, max_error_rate=1))
    assert summary["exit_code"] == 0, summary
    named = [row["id"] for row in read_report()["failed"]]
    assert named[0] is None, "half a surrogate pair is no text"
    assert named[2:6] == [str(10**30), "1.5", "true", '{"a":[1]}']
    assert len(named[1]) == 200
    assert Path(summary["page"]).exists()


@pytest.mark.parametrize(
    ("torch", "device"),
    [
        (None, 0),
        (SimpleNamespace(cuda=SimpleNamespace()), 0),
        (SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)), 0),
        (
            SimpleNamespace(
                cuda=SimpleNamespace(
                    is_initialized=lambda: True, device_count=lambda: 2, memory_allocated=lambda at: 100 + at
                )
            ),
            201,
        ),
    ],
    ids=["not imported", "being imported", "not in use", "two devices"],
)
def test_devices_are_watched_once_they_are_in_use(torch: Any, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with MemoryWatch(Clock()) as watch:
        pass
    assert watch.samples[-1][2] == device


def test_a_trace_of_any_run_is_short() -> None:
    with MemoryWatch(Clock(), interval=0.001, most=20) as watch:
        while watch._interval < 0.004:
            pass
    seconds = [second for second, _, _ in watch.samples]
    assert len(seconds) <= 20
    assert seconds == sorted(seconds)
    assert all(host > 10 << 20 for _, host, _ in watch.samples)
