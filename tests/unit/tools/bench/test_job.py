"""The command `prefill bench`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import prefillcli
from benchmarks.score_runs import SAMPLES
from prefillcli.cli import app
from prefillcli.options.commands import BenchSettings
from prefillcli.options.reading import PICKERS
from prefillcli.tools.bench import contest
from prefillcli.tools.bench.bench_job import bench_job
from prefillcli.tools.bench.report import BenchReport

TARGET = SAMPLES / "models" / "target"
PLAIN = (SAMPLES / "labeling.parquet", "--limit", "4", "--rounds", "1")
SMALL = (*PLAIN, "--set", "query_window=4", "--set", "keep_last=4")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PREFILL_MODEL", "PREFILL_LABELS", "PREFILL_QUIET"):
        monkeypatch.delenv(name, raising=False)


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def last_line(result: Result) -> dict:
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def saved(path: str = "bench.json") -> BenchReport:
    return BenchReport.model_validate_json(Path(path).read_text(), strict=False)


def test_methods_are_compared_on_a_question_about_a_file() -> None:
    rows = [{"text": f"{'late ' * number}parcel", "kind": "late" if number else "other"} for number in range(4)]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ("--ask", "What is it about?", "--options", "late,other", "--truth", "kind")
    result = bench("in.jsonl", "-m", TARGET, *asked, "--method", "hybrid", "--rounds", 0)
    assert result.exit_code == 0, result.stderr
    (workload,) = saved().workloads
    assert workload.rows == 4
    assert [each.method for each in workload.methods] == ["hybrid"]


def test_without_data_it_takes_a_quick_look() -> None:
    result = bench("--limit", 2, "--rounds", 1)
    assert result.exit_code == 0, result.output
    summary = last_line(result)
    assert (summary["status"], summary["exit_code"]) == ("complete", 0)
    assert (summary["output"], summary["page"]) == ("bench.json", "bench.html")
    assert summary["workloads"]["post_recommendation.parquet"]["hybrid"] | {"seconds": 0} == {
        "seconds": 0,
        "speedup": 1,
        "flips": None,
    }
    report = saved()
    assert report.schema_version == 1
    assert report.settings["limit"] == 2
    assert report.versions.keys() >= {"torch", "transformers", "prefillcli"}
    (workload,) = report.workloads
    assert [each.method for each in workload.methods] == ["hf", "hybrid", "specprefill@0.2", "random@0.2"]
    assert (workload.workload, workload.rows, workload.truth_rows) == ("post_recommendation.parquet", 2, 2)
    for words in ("specprefill@0.2", "random chunks instead", "sample draft", "next: prefill bench YOUR.parquet"):
        assert words in result.stderr
    tables = result.stderr.partition("post_recommendation.parquet: 2 rows")[2].partition("next:")[0]
    assert [line for line in tables.splitlines() if len(line) > 80] == []


@pytest.mark.nightly
def test_in_full_it_compares_all_methods() -> None:
    result = bench(*SMALL, "--full")
    assert result.exit_code == 0, result.output
    (workload,) = saved().workloads
    methods = {each.method for each in workload.methods}
    assert methods == {"hf", "full", "hybrid", *(f"{name}@0.2" for name in PICKERS)}
    for words in ("95 % interval", "mean diff."):
        assert words in result.stderr
    tables = result.stderr.partition("labeling.parquet: 4 rows")[2].partition("next:")[0]
    assert [line for line in tables.splitlines() if len(line) > 80 and not line.startswith("prefill:")] == []


def test_of_a_file_a_quick_look_takes_the_first_rows() -> None:
    data = SAMPLES / "labeling.parquet"
    settings = BenchSettings(inputs=(str(data),), method=("hybrid",), rounds=1)
    assert bench_job(settings, quick_tokens=700)["exit_code"] == 0
    (workload,) = saved().workloads
    assert 8 <= workload.rows <= 700 / 41
    assert workload.prompt_tokens <= 700
    assert f"a quick look at the first {workload.rows} rows" in workload.notes[-1]
    assert bench(data, "--method", "hybrid", "--rounds", 1, "--limit", 30).exit_code == 0
    assert saved().workloads[0].rows == 30
    assert BenchSettings(inputs=("x",)).with_defaults().input.limit == 60
    assert BenchSettings(inputs=("x",), full=True).with_defaults().input.limit is None
    assert BenchSettings(inputs=("x",), sample=9).with_defaults().input.limit is None


def test_the_page_needs_no_network() -> None:
    bench(*SMALL, "--method", "specprefill", "--keep", "0.5,0.3", "-o", "out/b.json")
    page = Path("out/b.html").read_text()
    assert not re.findall(r"(?:https?:)?//|@import|url\(|<script|<link|<img|src=", page)
    assert "prefers-color-scheme: dark" in page
    assert "specprefill@0.3" in page
    assert "specprefill@0.5" in page
    assert page.count('class="measured"') == 2


def test_what_the_page_shows_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "<b>rows & more.jsonl"
    Path(name).write_text(json.dumps({"prompt": "Is it about tea? Answer:"}) + "\n")
    assert bench(name, "--rounds", 1, "--method", "hybrid", "-m", TARGET, "-o", "b.json").exit_code == 0
    page = Path("b.html").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;rows &amp; more.jsonl" in page


def test_input_with_truth_has_accuracy_and_auc() -> None:
    result = bench(
        SAMPLES / "labeling.parquet", "--limit", 30, "--truth", "answer", "--rounds", 1, "--keep", 0.5,
        "--set", "keep_last=8", "--set", "query_window=4",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (workload,) = saved().workloads
    assert workload.workload == "labeling.parquet"
    assert (workload.rows, workload.truth_rows) == (30, 30)
    assert workload.reference_able is True
    by_name = {each.method: each.answers for each in workload.methods}
    assert by_name["hybrid"].accuracy > 0.9
    assert by_name["hybrid"].auc > 0.9
    assert by_name["hf"].audit.flips == 0
    low, high = by_name["hybrid"].accuracy_interval
    assert low <= by_name["hybrid"].accuracy <= high


def write_asked(**last: object) -> tuple[str, ...]:
    """Ten rows and two questions about each, the right answers to the first among them."""
    rows = pq.read_table(SAMPLES / "labeling.parquet").slice(0, 10).append_column("right", pa.array(["Yes", "No"] * 5))
    pq.write_table(rows, "in.parquet")
    topic = {"type": "choice", "instructions": "What is it about?", "choices": ["delivery", "the payment"]}
    refund = {"name": "refund", "type": "predicate", "instructions": "Is money asked for?"}
    asked = [refund, {"name": "topic", **topic} | last]
    Path("q.json").write_text(json.dumps({"questions": asked}))
    return "in.parquet", "-m", str(TARGET), "--questions", "q.json", "--rounds", "1"


def test_each_question_is_compared() -> None:
    given = write_asked()
    result = bench(*given, "--method", "hf", "--method", "full", "--truth", "refund=right")
    assert result.exit_code == 0, result.output
    (workload,) = saved().workloads
    assert (workload.rows, workload.answers, workload.truth_rows) == (10, 20, 10)
    assert workload.unique_tokens < 0.8 * workload.prompt_tokens
    scores = prefillcli.score("in.parquet", model=str(TARGET), questions="q.json")["refund"]
    said = [score > 0.5 for score in scores.to_pylist()]
    right = sum(one == (number % 2 == 0) for number, one in enumerate(said)) / 10
    for each in workload.methods:
        assert each.answers.accuracy == right
        if each.method != "hybrid":
            assert (each.answers.audit.rows, each.answers.audit.flips) == (20, 0)
            assert (each.answers.audit.max_difference or 0) < 1e-4
    assert workload.methods[1].target_tokens > workload.unique_tokens  # each prompt by itself


def test_what_cannot_be_compared_of_questions_is_told() -> None:
    given = write_asked(when="refund > 0.5")
    assert "leave its when out" in bench(*given).stderr
    assert "no question 'money'" in bench(*write_asked(), "--truth", "money=right").stderr
    assert "--questions" in bench("--questions", "q.json").stderr


def test_error_rows_are_left_out_with_a_note() -> None:
    prompts = ["Is it about tea? Answer:", None, " "]
    pq.write_table(pa.table({"prompt": prompts, "keep": [0.5, 0.5, 0.5], "right": [1, 0, 1]}), "rows.parquet")
    result = bench("rows.parquet", "--method", "hybrid", "--rounds", 1, "--truth", "right")
    assert result.exit_code == 0, result.output
    (workload,) = saved().workloads
    assert workload.rows == 1
    assert workload.notes == ["left out: 2 rows with an error (skipped_empty 2)"]
    assert workload.reference_able is False
    assert "the model cannot do this task" in result.stderr


def test_token_ids_without_a_text_are_read_in_full_by_bm25() -> None:
    pq.write_table(pa.table({"prompt_token_ids": [[70, 71, 72, 73] * 30, [80, 81, 82] * 40]}), "ids.parquet")
    result = bench("ids.parquet", "--method", "bm25,random", "--rounds", 1, "--set", "keep_last=4")
    assert result.exit_code == 0, result.output
    (workload,) = saved().workloads
    by_name = {each.method: each for each in workload.methods}
    assert by_name["bm25@0.2"].kept == 1
    assert by_name["random@0.2"].kept < 0.5
    assert "bm25@0.2: nothing was dropped" in result.stderr


def test_a_model_without_draft_has_two_methods_and_a_note() -> None:
    result = bench(*PLAIN, "-m", TARGET)
    assert [each.method for each in saved().workloads[0].methods] == ["hf", "hybrid"]
    assert "no draft model" in result.stderr
    assert "no draft model" in Path("bench.html").read_text()
    bench(*SMALL, "-m", TARGET, "--method", "random")
    assert [each.method for each in saved().workloads[0].methods] == ["hybrid", "random@0.2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-flips", "0.02"], "--max-flips needs one of the methods early-exit, first, first-exit and int8"),
        (["--method", "first", "-m", str(TARGET)], "--method first needs --first"),
        (["--method", "specprefil"], "did you mean 'specprefill'?"),
        (["--draft", "random"], "--draft random: give --method random"),
        (["--method", "specprefill", "-m", str(TARGET)], "needs --draft"),
        (["--keep", "0"], "--keep"),
        (["--truth", "answer"], "--truth needs INPUT"),
        (["-o", "b.html"], "names the JSON file"),
    ],
)
def test_wrong_usage_is_told_and_writes_nothing(words: list[str], said: str) -> None:
    result = bench(*words)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert last_line(result)["status"] == "failed"
    assert not list(Path().iterdir())


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_line_to_type_is_told() -> None:
    result = bench(*PLAIN, "--method", "vllm")
    assert result.exit_code == 2, result.output
    assert "--method vllm: the package vllm is not installed" in result.stderr
    assert "[vllm]'" in result.stderr
    assert not list(Path().iterdir())


def test_a_report_does_not_replace_the_input() -> None:
    Path("rows.json").write_text(json.dumps({"prompt": "Is it about tea? Answer:"}) + "\n")
    before = Path("rows.json").read_bytes()
    result = bench("rows.json", "-o", "rows.json")
    assert result.exit_code == 2
    assert Path("rows.json").read_bytes() == before


def test_a_signal_ends_it_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(methods, rounds, **more):
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    monkeypatch.setattr(contest, "interleaved", stopped)
    result = bench(*PLAIN, "--method", "hf")
    assert result.exit_code == 143
    assert last_line(result)["status"] == "interrupted"
    assert not list(Path().iterdir())
    assert "--resume" not in result.stderr


def test_quiet_says_nothing_but_warnings() -> None:
    result = bench(*PLAIN, "--method", "full", "-q", "-m", TARGET)
    assert result.exit_code == 0
    assert result.stderr == ""


def test_bm25_without_its_package_is_refused_where_it_is_named_and_else_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    named = bench(*SMALL, "-m", TARGET, "--method", "bm25")
    assert named.exit_code == 2
    assert "--method bm25: the package bm25s is not installed\npip install" in named.output
    bench(*SMALL, "-m", TARGET, "--full", "--draft", TARGET.with_name("draft"), "--rounds", 1)
    (workload,) = saved().workloads
    assert "bm25@0.2 is left out: --draft bm25: the package bm25s is not installed" in " ".join(workload.notes)
    assert not any(each.method.startswith("bm25") for each in workload.methods)
