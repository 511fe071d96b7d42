"""Whole runs from S3 to S3, on a real server whose answers are late, lost, wrong or missing."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from prefillcli.rows.output.store import Owner
from tests.jobs.jobs import read_output, score, texts, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows
from tests.s3_server import SLOW_DOWN, Bucket, LostAnswer, S3Server, every, expired, once

pytestmark = pytest.mark.slow

COUNT = 90
WRITE_PART = "prefillcli.rows.output.parts:write_part"
PARTS = r"\.prefill/part-"
OUTPUTS = ["o.parquet", "o/", "o.jsonl.gz"]
Run = Callable[..., Command]


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    """A bucket with an input of `COUNT` rows, of which one is an error."""
    bucket = s3_server.new_bucket()
    rows = {"id": [f"r{i}" for i in range(COUNT)], "prompt": [*texts(COUNT - 1), None]}
    write_parquet("in.parquet", **rows)
    write_jsonl("in.jsonl", [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)])
    for name in ("in.parquet", "in.jsonl"):
        bucket.put(f"data/{name}", Path(name).read_bytes())
    return bucket


@pytest.fixture
def run(bucket: Bucket, s3_server: S3Server, model: Path) -> Run:
    """`prefill score` from the bucket into it, in a process."""

    def start(output: str = "o.parquet", *flags: object, source: str = "in.parquet", **options: Any) -> Command:
        words = [f"{bucket.url}/data/{source}", "--output", f"{bucket.url}/out/{output}", "--model", model]
        words += ["--id-column", "id", "--max-error-rate", 1, *flags]
        environment = s3_server.environment | options.pop("environment", {})
        return Command("score", *words, environment=environment, **options)

    return start


@pytest.fixture
def expected(bucket: Bucket, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows of a run from disk to disk."""
    cut_small_windows(monkeypatch, flush_seconds=0.0)
    assert score("in.parquet", "local.parquet", model=model, id_column="id", max_error_rate=1)["exit_code"] == 0
    return without_times(read_output("local.parquet"))


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert [row["id"] for row in rows] == [f"r{i}" for i in range(COUNT)]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def rows_of(bucket: Bucket, output: str) -> list[dict[str, Any]]:
    """The rows of a finished output; of a folder those of the files that `_SUCCESS` names."""
    if not output.endswith("/"):
        Path(output).write_bytes(bucket.get(f"out/{output}"))
        return without_times(read_output(output))
    files = json.loads(bucket.get(f"out/{output}_SUCCESS"))["files"]
    assert bucket.keys(f"out/{output}") == sorted(f"out/{output}{name}" for name in ["_SUCCESS", *files])
    tables = [pq.read_table(io.BytesIO(bucket.get(f"out/{output}{name}"))) for name in sorted(files)]
    return without_times(pa.concat_tables(tables).to_pylist())


def work_of(bucket: Bucket, output: str = "o.parquet") -> list[str]:
    """The names in the work folder."""
    folder = f"out/{output.rstrip('/')}.prefill/"
    return [key.removeprefix(folder) for key in bucket.keys(folder)]


def parts_of(bucket: Bucket, output: str = "o.parquet") -> list[str]:
    return [name for name in work_of(bucket, output) if name.startswith("part-")]


def assert_finished(bucket: Bucket, expected: list[dict[str, Any]], output: str = "o.parquet") -> None:
    """The output has every row once, with the scores of a local run, and nothing is left beside it."""
    assert rows_of(bucket, output) == expected
    assert work_of(bucket, output) == ["manifest.json", "row-digests.bin"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_run_from_s3_to_s3_writes_what_a_local_one_does(
    bucket: Bucket, run: Run, expected: list[dict[str, Any]], output: str, s3_server: S3Server
) -> None:
    metrics = f"{bucket.url}/out/run.prom"
    assert run(output, "--metrics-file", metrics, source="in.jsonl").end() == 0
    assert_finished(bucket, expected, output)
    summary = json.loads(Path("stdout").read_text())
    assert summary["output"] == f"{bucket.url}/out/{output}"
    name = output.rstrip("/").partition(".")[0]
    report = json.loads(bucket.get(f"out/{name}.run.json"))
    assert report["rows"]["total"] == COUNT
    assert b"<html" in bucket.get(f"out/{name}.run.html")
    assert b"prefill_rows" in bucket.get("out/run.prom")
    everything = [bucket.get(key) for key in bucket.keys("out/")] + [Path("stderr").read_bytes()]
    assert not any(b"first-secret" in each for each in everything)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL"])
def test_the_environment_says_where_s3_is(bucket: Bucket, s3_server: S3Server, name: str) -> None:
    environment = s3_server.environment
    environment[name] = environment.pop("AWS_ENDPOINT_URL")
    words = [sys.executable, "-m", "prefillcli", "status", f"{bucket.url}/out/o.parquet"]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"no run of prefill is known for {bucket.url}/out/o.parquet" in done.stderr
    assert s3_server.requests


@pytest.mark.nightly
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_put_whose_answer_is_lost_is_one_put(
    bucket: Bucket, run: Run, expected: list[dict[str, Any]], output: str, s3_server: S3Server
) -> None:
    lost = LostAnswer(2.5)
    final = {"o.parquet": r"o\.parquet$", "o/": "o/(part-00000.parquet|_SUCCESS)$", "o.jsonl.gz": r"o\.jsonl\.gz$"}
    for pattern in (r"/lock$", PARTS + "000001", r"manifest\.json$", final[output]):
        s3_server.faults.append(once("PUT", pattern, lost))
    if output == "o/":
        s3_server.faults.append(once("PUT", "_SUCCESS$", lost))
    impatient = {"FSSPEC_S3": json.dumps({"config_kwargs": {"read_timeout": 1}})}
    assert run(output, environment=impatient).end() == 0
    assert_finished(bucket, expected, output)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("slow", "attempts"),
    [("", {}), ("out/", {"AWS_MAX_ATTEMPTS": "1"})],
    ids=["all requests", "those of the output, where S3's own client tries once"],
)
def test_a_store_that_asks_to_slow_down_now_and_then_gets_its_time(
    bucket: Bucket,
    run: Run,
    expected: list[dict[str, Any]],
    s3_server: S3Server,
    slow: str,
    attempts: dict[str, str],
) -> None:
    slowed = every(8, SLOW_DOWN)
    s3_server.faults.append(lambda request: slowed(request) if request.key.startswith(slow) else None)
    assert run("o/", environment=attempts).end() == 0
    assert_finished(bucket, expected, "o/")
    assert len(s3_server.requests) > 30


@pytest.mark.sampled(1)
@pytest.mark.parametrize("output", ["o.parquet", "o/"])
def test_credentials_that_expire_stop_the_run_and_new_ones_finish_it(
    bucket: Bucket, run: Run, expected: list[dict[str, Any]], output: str, s3_server: S3Server
) -> None:
    s3_server.faults.append(expired("first-key", after_puts=3, pattern=PARTS))
    stopped = run(output, "--debug")
    assert stopped.end() == 1
    assert "Traceback" in stopped.stderr
    assert "first-secret" not in stopped.stderr
    assert "The provided token has expired.\nthe credentials have expired or do not allow this" in stopped.stderr
    assert "continue with --resume" in stopped.stderr
    assert len(parts_of(bucket, output)) == 3
    kept = s3_server.requests[:]
    renewed = {"AWS_ACCESS_KEY_ID": "second-key", "AWS_SECRET_ACCESS_KEY": "second-secret"}
    assert run(output, "--resume", environment=renewed).end() == 0
    assert_finished(bucket, expected, output)
    resumed = s3_server.requests[len(kept) :]
    assert not any("part-000000-" in request.key for request in resumed if request.method == "PUT"), "scored again"


@pytest.mark.nightly
def test_of_two_jobs_at_one_time_one_wins(
    bucket: Bucket, run: Run, expected: list[dict[str, Any]], s3_server: S3Server
) -> None:
    hold = Hold("prefillcli.rows.output.store:exclusive_put")
    jobs = [run("o.parquet", "--resume", seconds_per_pack=0.3, log=f"{name}.", hold=hold) for name in ("a", "b")]
    for job in jobs:
        job.wait_until_held()
    for job in jobs:
        job.let_go()
    codes = [job.end() for job in jobs]
    assert sorted(codes) == [0, 5]
    assert "in use by process" in jobs[codes.index(5)].stderr
    assert_finished(bucket, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("output", "last_step"),
    [
        ("o.parquet", Hold("prefillcli.rows.output.store:exclusive_put", ending="put_file")),
        ("o/", Hold("prefillcli.rows.output.publication:_InPlace.publish")),
    ],
)
def test_of_two_jobs_the_first_to_publish_wins_where_somebody_deleted_a_lock(
    bucket: Bucket, run: Run, expected: list[dict[str, Any]], output: str, last_step: Hold
) -> None:
    """A run is taken for dead in the moment before it publishes."""
    slow = run(output, hold=last_step, log="slow.")
    slow.wait_until_held()
    bucket.delete(f"out/{output.rstrip('/')}.prefill/lock")
    assert run(output, "--overwrite").end() == 0
    published = {key: bucket.get(key) for key in bucket.keys(f"out/{output}") if "prefill" not in key}
    slow.let_go()
    assert slow.end() == 5
    assert "was written by another run meanwhile" in slow.stderr
    assert {key: bucket.get(key) for key in published} == published
    assert rows_of(bucket, output) == expected
    assert parts_of(bucket, output) == []


def test_kill_9_in_the_middle_and_a_resume_lose_and_double_nothing(
    bucket: Bucket, run: Run, expected: list[dict[str, Any]]
) -> None:
    for attempt in (1, 2):
        killed = run("o/", "--resume", hold=Hold(WRITE_PART, call=2))
        killed.wait_until_held()
        killed.kill()
        assert len(parts_of(bucket, "o/")) == attempt
        assert "lock" in work_of(bucket, "o/"), "that of a dead process of this machine"
    assert run("o/", "--resume").end() == 0
    assert_finished(bucket, expected, "o/")


@pytest.mark.nightly
def test_a_lock_of_a_dead_run_elsewhere_says_what_to_delete(
    bucket: Bucket, run: Run, expected: list[dict[str, Any]]
) -> None:
    killed = run(hold=Hold(WRITE_PART, call=3))
    killed.wait_until_held()
    killed.kill()
    lock = "out/o.parquet.prefill/lock"
    owner = TypeAdapter(Owner).validate_json(bucket.get(lock))
    assert owner is not None
    assert owner.alive() is False
    bucket.put(lock, json.dumps(vars(owner) | {"host": "node7", "machine": "another boot"}).encode())
    refused = run("o.parquet", "--resume")
    assert refused.end() == 5
    assert f"if it is dead, delete {bucket.url}/{lock}" in refused.stderr
    bucket.delete(lock)
    assert run("o.parquet", "--resume").end() == 0
    assert_finished(bucket, expected)


def test_a_signal_stops_a_run_on_s3_and_its_lock_goes(
    bucket: Bucket, run: Run, expected: list[dict[str, Any]]
) -> None:
    stopped = run("o.parquet", seconds_per_pack=0.3)
    stopped.wait_until(lambda: len(parts_of(bucket)) >= 2)
    stopped.send(signal.SIGTERM)
    assert stopped.end() == 143
    assert "lock" not in work_of(bucket)
    assert run("o.parquet", "--resume").end() == 0
    assert_finished(bucket, expected)


@pytest.mark.nightly
def test_an_input_on_s3_that_is_replaced_under_the_run_is_noticed(bucket: Bucket, run: Run) -> None:
    running = run("o.parquet", seconds_per_pack=0.3)
    running.wait_until(lambda: len(parts_of(bucket)) >= 2)
    write_parquet("in.parquet", id=[f"r{i}" for i in range(COUNT)], prompt=[f"other {t}" for t in texts(COUNT)])
    bucket.put("data/in.parquet", Path("in.parquet").read_bytes())
    assert running.end() == 4
    assert f"{bucket.url}/data/in.parquet" in running.stderr
    assert bucket.keys("out/o.parquet") == [key for key in bucket.keys("out/") if ".prefill/" in key]
