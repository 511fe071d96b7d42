"""CSV as input and output, and pipes: the scores are those of the same rows as Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.tools.status import status_job
from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import read_output, score, texts, without_seconds, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "samples" / "models" / "target"
COUNT = 45
PROMPTS = [*texts(COUNT - 3), 'say "hi",\nthen; go\tAnswer:', "123", ""]
IDS = [f"{i:03}" for i in range(COUNT)]
TRUTH = ["Yes", "No", "1", "0", None] * (COUNT // 5)
KEPT = ['a "b", c', "two\r\nlines", " 1.50 ", "=1+1", None] * (COUNT // 5)


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in three files, in the test's folder."""
    cut_small_windows(monkeypatch)
    columns = {"prompt": PROMPTS, "id": IDS, "truth": TRUTH, "kept": KEPT}
    write_parquet("in.parquet", **columns)
    write_jsonl("in.jsonl", [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    for name, delimiter in (("in.csv", ","), ("in.tsv", "\t")):
        with open(name, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))


def flags(model: Path, **more: Any) -> dict[str, Any]:
    return {"id_column": "id", "truth": "truth", "keep_columns": "kept", "max_error_rate": 0.5, "model": model} | more


def of_csv(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a CSV file by Arrow, whose nulls are fields without quotes; all but `seconds`, as texts."""
    with open(path, newline="") as file:
        names = next(csv.reader(file, delimiter="\t" if str(path).endswith("tsv") else ","))
    kind = pa.csv.ConvertOptions(
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        null_values=[""],
        column_types=dict.fromkeys(names, pa.string()),
    )
    tabs = str(path).endswith("tsv")  # without quoting
    form = pa.csv.ParseOptions(
        delimiter="\t" if tabs else ",", newlines_in_values=not tabs, quote_char=not tabs and '"'
    )
    return pa.csv.read_csv(path, parse_options=form, convert_options=kind).to_pylist()


def as_texts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the values that a CSV output has."""

    def text(value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value
        return json.dumps(value, separators=(",", ":"))

    return [{name: text(value) for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("name", ["in.csv", "in.tsv"])
def test_scores_of_csv_are_bit_for_bit_those_of_the_same_rows_as_parquet(name: str) -> None:
    assert score("in.parquet", "a.parquet", **flags(SAMPLE))["exit_code"] == 0
    summary = score(name, "b.parquet", **flags(SAMPLE), csv_quoting="quotes")  # as the csv module writes both
    assert summary["exit_code"] == 0
    assert (summary["rows"]["empty"], summary["rows"]["errors"]) == (1, 0)
    assert pq.read_schema("b.parquet").remove_metadata() == pq.read_schema("a.parquet").remove_metadata()
    assert without_seconds("b.parquet") == without_seconds("a.parquet")
    reports = [json.loads(Path(f"{each}.run.json").read_text())["evaluations"]["answer"] for each in "ab"]
    assert reports[0] == reports[1]
    assert reports[0]["rows"] == COUNT - COUNT // 5


@pytest.mark.parametrize("choice", [{"limit": 12}, {"sample": 12, "seed": 3}])
def test_the_same_rows_are_chosen_as_of_parquet(model: Path, choice: dict[str, int]) -> None:
    for name in ("in.parquet", "in.csv"):
        assert score(name, f"{name}.parquet", **flags(model, **choice))["exit_code"] == 0
    assert without_seconds("in.csv.parquet") == without_seconds("in.parquet.parquet")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", ["in.parquet", "in.jsonl", "in.csv"])
@pytest.mark.parametrize("name", ["o.csv", "o.tsv"])
def test_a_csv_output_holds_the_values_of_a_parquet_output(model: Path, source: str, name: str) -> None:
    assert score(source, "o.parquet", **flags(model))["exit_code"] == 0
    assert score(source, name, **flags(model))["exit_code"] == 0
    found = [{key: value for key, value in row.items() if key != "seconds"} for row in of_csv(name)]
    expected = as_texts(read_output("o.parquet"))
    if name == "o.tsv":
        expected = [row | {"kept": row["kept"] and row["kept"].replace("\r\n", "\\r\\n")} for row in expected]
    assert found == expected
    for inputs in ([], [source]):
        verified = verify_job(name, inputs)
        assert (verified["exit_code"], verified["problems"]) == (0, [])
    rows = status_job(name)["rows"]
    assert (rows["done"], rows["saved"], rows["total"]) == (COUNT, COUNT, COUNT)
    assert score(source, name, **flags(model))["exit_code"] == 2
    assert score(source, name, resume=True, **flags(model))["exit_code"] == 0
    Path(name).write_bytes(Path(name).read_bytes().replace(b"No", b"Yes", 1))
    assert verify_job(name)["exit_code"] == 1


def test_choices_are_lists_of_json_and_the_output_has_such_lists(model: Path) -> None:
    words = ["one", "two, or", "three"]
    rows = [{"prompt": text, "of": words[: 2 + at % 2], "right": at % 2} for at, text in enumerate(texts(8))]
    write_jsonl("c.jsonl", rows)
    with open("c.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "of", "right"])
        writer.writerows([row["prompt"], json.dumps(row["of"]), row["right"]] for row in rows)
    chosen = {"model": model, "choices_column": "of", "truth": "right"}
    assert score("c.jsonl", "a.parquet", **chosen)["exit_code"] == 0
    assert score("c.csv", "b.csv", **chosen)["exit_code"] == 0
    found = of_csv("b.csv")
    expected = read_output("a.parquet")
    assert [json.loads(row["scores"]) for row in found] == [row["scores"] for row in expected]
    assert [int(row["prediction"]) for row in found] == [row["prediction"] for row in expected]
    accuracies = [
        json.loads(Path(f"{each}.run.json").read_text())["evaluations"]["answer"]["accuracy"] for each in "ab"
    ]
    assert accuracies[0] == accuracies[1]


def test_rows_choose_their_compression_by_numbers_and_empty_fields(model: Path, draft: Path) -> None:
    settings = [("0.5", ""), ("", "false"), ("1", "true"), ("2", ""), ("", "maybe"), ("", "")]
    lines = [f"{at} fox {'dog ' * 40},{keep},{own}" for at, (keep, own) in enumerate(settings)]
    Path("k.csv").write_text("\n".join(["prompt,keep,specprefill", *lines]))
    given = {"model": model, "draft": draft, "keep": 0.5, "compress_above": 0, "max_error_rate": 1}
    assert score("k.csv", "k.parquet", **given)["exit_code"] == 0
    rows = read_output("k.parquet")
    assert [row["error"] for row in rows] == [None, None, None, "invalid_keep", "invalid_keep", None]
    assert [row["method"] for row in rows if row["method"]] == ["specprefill", "full", "full", "specprefill"]


def test_a_killed_job_with_csv_output_goes_on_to_the_same_file(model: Path) -> None:
    assert score("in.csv", "whole.csv", pack_tokens=64, **flags(model))["exit_code"] == 0
    words = ["--id-column", "id", "--truth", "truth", "--keep-columns", "kept", "--max-error-rate", 0.5]
    hold = Hold("prefillcli.engines.torch:TorchEngine.answer", 3)
    command = Command("score", "in.csv", "-m", model, "-o", "out.csv", "--pack-tokens", 64, *words, hold=hold)
    command.wait_until_held()
    command.kill()
    assert not Path("out.csv").exists()
    assert score("in.csv", "out.csv", resume=True, pack_tokens=64, **flags(model))["exit_code"] == 0
    times = {"seconds", "shared_tokens", "computed_tokens"}
    found, whole = (
        [{name: value for name, value in row.items() if name not in times} for row in of_csv(path)]
        for path in ("out.csv", "whole.csv")
    )
    assert found == whole


def test_shards_are_merged_to_csv_and_rows_are_taken_over_from_it(model: Path) -> None:
    assert score("in.csv", "whole.parquet", **flags(model))["exit_code"] == 0
    for shard in ("1/2", "2/2"):
        assert score("in.csv", "out.csv", shard=shard, **flags(model))["exit_code"] == 0
    assert CliRunner().invoke(app, ["merge", "out.csv", "--max-error-rate", "0.5"]).exit_code == 0
    merged = of_csv("out.csv")
    assert [row["id"] for row in merged] == IDS
    expected = [row["score"] for row in read_output("whole.parquet")]
    assert [row["score"] and float(row["score"]) for row in merged] == pytest.approx(expected, abs=1e-5)
    with open("in.csv", "a") as file:
        file.write("one more. Answer:,new,Yes,\n")
    summary = score("in.csv", "next.csv", since="out.csv", **flags(model))
    assert (summary["exit_code"], summary["since"]) == (0, {"rows": COUNT - 1})
    assert [row["score"] for row in of_csv("next.csv")][:COUNT] == [row["score"] for row in merged]


def test_a_calibration_is_the_same_from_csv(model: Path) -> None:
    for name in ("a.parquet", "b.csv"):
        assert score("in.csv", name, **flags(model))["exit_code"] == 0
        found = CliRunner().invoke(app, ["calibrate", name, "--truth", "truth", "-o", f"{name}.json"])
        assert found.exit_code == 0, found.output
    contents = [json.loads(Path(f"{name}.json").read_text()) for name in ("a.parquet", "b.csv")]
    assert contents[0]["scaling"] == contents[1]["scaling"]


def test_rejects_in_csv_are_the_input_of_another_job(model: Path) -> None:
    with open("in.csv", "a") as file:
        file.write("too,few\n")
    assert score("in.csv", rejects="bad.csv", **flags(model, empty_text="error"))["exit_code"] == 0
    rows = of_csv("bad.csv")
    assert [(row["row"], row["id"], row["error"]) for row in rows] == [
        (str(COUNT - 1), IDS[-1], "empty_prompt"),
        (str(COUNT), None, "invalid_csv"),
    ]
    assert score("bad.csv", "again.parquet", model=model, template="Row {{ row }}{{ prompt }}")["exit_code"] == 0


def test_csv_is_read_from_other_filesystems_and_folders(model: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/csv/day=1/a.csv", Path("in.csv").read_bytes())
    memory.pipe_file("/csv/day=2/b.csv.gz", gzip.compress(b'truth,prompt,kept,id\nNo,"fox\nAnswer:",,new\n'))
    assert score("memory://csv", "memory://out/a.csv", **flags(model, keep_columns="day"))["exit_code"] == 0
    rows = list(csv.DictReader(io.StringIO(memory.cat_file("/out/a.csv").decode())))
    assert [row["day"] for row in rows] == ["1"] * COUNT + ["2"]
    assert verify_job("memory://out/a.csv", ["memory://csv"])["problems"] == []


# Pipes, in processes of their own.


def pipe(*words: object) -> subprocess.Popen[bytes]:
    """`prefill score` with these words between two pipes, whose temporary folder is `tmp`."""
    Path("tmp").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(Path("tmp").resolve())}
    command = [sys.executable, "-m", "prefillcli", "score", *map(str, words), "-m", str(SAMPLE), "--quiet"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def piped(given: bytes, *words: object) -> tuple[bytes, dict[str, Any]]:
    """What a job writes to stdout, and its summary on stderr."""
    out, err = pipe(*words).communicate(given, timeout=120)
    assert not [name for name in os.listdir("tmp") if name.startswith("prefill-")]
    return out, json.loads(err.decode().splitlines()[-1])


def stdin_is_a_pipe() -> None:
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    tempfile.tempdir = None  # chosen where this process was forked


@contextmanager
def between_pipes(*words: object, **options: Any) -> Iterator[tuple[Command, IO[bytes]]]:
    """`pipe` in a process that need not start torch: the command, and what it writes to stdout."""
    Path("tmp").mkdir(exist_ok=True)
    environment = {"TMPDIR": os.path.abspath("tmp")}
    for name in ("stdin", "stdout"):
        os.mkfifo(name)
    with open(os.open("stdout", os.O_RDONLY | os.O_NONBLOCK), "rb") as stdout:
        command = Command("score", *words, "-m", SAMPLE, "--quiet", environment=environment, **options)
        command.wait_until(Path("stderr").exists)  # it opens it after the other
        os.set_blocking(stdout.fileno(), True)
        yield command, stdout
    for name in ("stdin", "stdout", "stderr"):
        os.unlink(name)


def open_when_read(name: str, command: Command) -> IO[bytes]:
    """A pipe that the command reads."""
    ends: list[int] = []

    def opened() -> bool:
        with suppress(OSError):  # nobody reads it yet
            ends.append(os.open(name, os.O_WRONLY | os.O_NONBLOCK))
        return bool(ends)

    command.wait_until(opened)
    os.set_blocking(ends[0], True)
    return open(ends[0], "wb")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.parquet"])
def test_rows_come_through_a_pipe_and_scores_go_through_another(name: str, tmp_path: Path) -> None:
    before = sorted(os.listdir())
    words = ["--id-column", "id", "--max-error-rate", 0.5]
    with between_pipes("-", *words, prepare=stdin_is_a_pipe) as (command, stdout):
        with open_when_read("stdin", command) as stdin:
            stdin.write(Path(name).read_bytes())
        out = stdout.read()
        command.end()
        summary = json.loads(command.stderr.splitlines()[-1])
    assert sorted(os.listdir()) == sorted([*before, "tmp"])
    assert (summary["exit_code"], summary["output"], summary["report"]) == (0, "-", None)
    assert summary["rows"]["total"] == COUNT
    kind = "csv" if name == "in.csv" else "jsonl"
    Path(f"piped.{kind}").write_bytes(out)
    assert score(name, "expected.parquet", model=SAMPLE, id_column="id", max_error_rate=0.5)["exit_code"] == 0
    rows = of_csv("piped.csv") if kind == "csv" else as_texts(read_output("piped.jsonl"))
    wanted = as_texts(read_output("expected.parquet"))
    for name in ("id", "prediction", "prompt_tokens", "error"):
        assert [row[name] for row in rows] == [row[name] for row in wanted]
    for name in ("score", "logprob_No"):
        found, expected = ([row[name] and float(row[name]) for row in each] for each in (rows, wanted))
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_file_may_be_the_other_end_of_a_pipe(tmp_path: Path) -> None:
    out, _ = pipe("in.csv", "-o", "-", "--limit", 2, "--report", "r.json").communicate(timeout=120)
    assert len(list(csv.DictReader(io.StringIO(out.decode())))) == 2
    assert json.loads(Path("r.json").read_text())["rows"]["scored"] == 2
    out, _ = pipe("-", "-o", "scores.parquet").communicate(b"prompt\nfox\n", timeout=120)
    assert json.loads(out)["output"] == "scores.parquet"
    assert len(read_output("scores.parquet")) == 1


@pytest.mark.slow
def test_a_pipe_that_fails_or_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    out, summary = piped(b"text,id\nfox,1\n", "-")
    assert (out, summary["exit_code"]) == (b"", 2)
    assert "no column 'prompt'" in summary["error"]
    with pipe("-") as process:
        assert process.stdin is not None
        process.stdin.write(b"prompt\n" + b"fox\n" * 100_000)
        process.stdin.flush()
        end = time.monotonic() + 60
        while not any(name.startswith("prefill-") for name in os.listdir("tmp")) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == (b"", 143)
    assert json.loads(err.decode().splitlines()[-1])["status"] == "interrupted"
    assert "--resume" not in err.decode()
    assert not [name for name in os.listdir("tmp") if name.startswith("prefill-")]


def test_a_full_disk_behind_a_pipe_is_no_reason_to_resume(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        stdout = os.dup(1)
        os.dup2(full.fileno(), 1)
        try:
            summary = score("in.csv", "-", **flags(model))
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    assert summary["exit_code"] == 5
    assert summary["error"] == "no space left on the device for stdout\nmake room, then run again"
    assert "--resume" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    with between_pipes("in.csv", "-o", "-", "--max-error-rate", 0.5) as (command, stdout):
        stdout.close()
        assert command.end() == 0


@pytest.mark.parametrize(
    ("inputs", "more"),
    [
        ("-", {"output": "o.csv", "resume": True}),
        ("in.csv", {"output": "-", "resume": True}),
        ("-", {"shard": "1/2"}),
        (["-", "in.csv"], {}),
    ],
)
def test_what_a_pipe_cannot_do_is_refused(inputs: Any, more: dict[str, Any]) -> None:
    words = [inputs] if isinstance(inputs, str) else inputs
    words += ["--resume"] * ("resume" in more) + (["--shard", more["shard"]] if "shard" in more else [])
    found = CliRunner().invoke(app, ["score", *words, *(["-o", more["output"]] if "output" in more else [])])
    assert found.exit_code == 2
    assert "cannot be combined with -" in found.output or "stdin is read alone" in found.output
