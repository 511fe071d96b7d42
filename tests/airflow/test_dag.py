"""The shipped DAG through a real Airflow: `make test-airflow`.

`airflow dags test` is Airflow's own loop over a run, with its database, variables, XComs, timeouts and retries.
What it lacks is a scheduler, and workers in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "samples"
AIRFLOW = os.environ.get("AIRFLOW", "")
PACK_TOKENS = "2048"
RECIPE = f"""
model: {SAMPLES}/models/target
chat: false
id_column: id
keep_columns: [answer]
"""
# prefill that writes after each pack, and in its first try is killed or slow; a process before it notes how it ends
COMMAND = """#!{python}
import os, signal, subprocess, sys, time
from functools import partial
from pathlib import Path

codes = Path("codes")
if "NOTED" not in os.environ:
    signal.signal(signal.SIGTERM, lambda *signal: None)  # the group's, and the command ends on it
    code = subprocess.call([sys.executable, *sys.argv], env=os.environ | {{"NOTED": "yes"}})
    with codes.open("a") as file:
        file.write(f"{{code}}\\n")
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)

import prefillcli.scoring.score as job
from prefillcli.cli import main
from prefillcli.rows.output.sink import Sink
from prefillcli.engines.torch import TorchEngine
from prefillcli.core.scorer import Granularity

job.score_job = partial(job.score_job, granularity=Granularity(flush_seconds=0.0))
trouble = Path("trouble").read_text() if Path("trouble").exists() and not codes.exists() else ""
write, answer, parts = Sink.write, TorchEngine.answer, 0

def kill_later(*arguments, **options):
    global parts
    write(*arguments, **options)
    parts += 1
    if parts == 5:
        os.kill(os.getpid(), signal.SIGKILL)

def slowly(*arguments):
    time.sleep(10)
    return answer(*arguments)

if trouble == "kill":
    Sink.write = kill_later
if trouble == "slow":
    TorchEngine.answer = slowly
main()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AIRFLOW, reason="AIRFLOW does not name the airflow command; make test-airflow does"),
]


@dataclass(frozen=True)
class Run:
    """What Airflow knows of a run."""

    states: dict[str, str]
    tries: dict[str, int]
    xcom: dict[str, Any]
    log: str


class Airflow:
    """An Airflow of its own, with its home and the job's folder below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "job"
        self.dags = folder / "airflow" / "dags"
        self.environment = os.environ | {
            "AIRFLOW_HOME": str(folder / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW_VAR_PREFILL_HOME": str(self.home),
            "AIRFLOW_VAR_PREFILL_COMMAND": "./prefill",
            "AIRFLOW_VAR_PREFILL_RECIPE": "job.yaml",
            "AIRFLOW_VAR_PREFILL_INPUT": "in/DATE.parquet",
            "PREFILL_PACK_TOKENS": PACK_TOKENS,  # of the worker: reaches the command
        }
        self.dags.mkdir(parents=True)
        self.call("db", "migrate")

    def call(self, *arguments: str) -> str:
        done = subprocess.run(
            [AIRFLOW, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,  # a hang, not a busy machine
        )
        return done.stdout

    def run(self, day: str, trouble: str = "", **changes: int) -> Run:
        """The DAG's run of a day; only the delay before a retry, and other `changes` of `score` in seconds, differ."""
        (self.home / "codes").unlink(missing_ok=True)
        (self.home / "trouble").write_text(trouble)
        shipped = (ROOT / "recipes" / "airflow_dag.py").read_text()
        seconds = {"retry_delay": 1} | changes
        changed = "".join(f"score.{name} = timedelta(seconds={value})\n" for name, value in seconds.items())
        (self.dags / "airflow_dag.py").write_text(f"{shipped}\n{changed}")
        log = self.call("dags", "test", "prefill_nightly", day)
        with sqlite3.connect(self.dags.parent / "airflow.db") as database:
            found = "from {} t join dag_run r using (dag_id, run_id) where r.logical_date like ?"
            tasks = database.execute(
                f"select task_id, t.state, try_number {found.format('task_instance')}", [f"{day}%"]
            )
            states = {task: (state, tries) for task, state, tries in tasks}
            pushed = database.execute(
                f"select task_id, value {found.format('xcom')} and key = 'return_value'", [f"{day}%"]
            )
            xcom = {task: json.loads(value) for task, value in pushed}
        assert states.keys() == {"score", "check"}, log
        return Run(
            {task: state for task, (state, _) in states.items()},
            {task: tries for task, (_, tries) in states.items()},
            xcom,
            log,
        )

    @property
    def codes(self) -> list[str]:
        """How the command ended, try by try."""
        return (self.home / "codes").read_text().split()


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    airflow = Airflow(tmp_path_factory.mktemp("nightly"))
    (airflow.home / "in").mkdir(parents=True)
    (airflow.home / "job.yaml").write_text(RECIPE)
    command = airflow.home / "prefill"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    return airflow


@pytest.fixture(scope="module")
def whole(airflow: Airflow) -> list[dict[str, Any]]:
    """What a run that nothing disturbs writes, without Airflow.

    On as many threads as the other runs, and in the same packs: the scores are the same bit for bit.
    """
    command = [sys.executable, "-m", "prefillcli", "score", str(SAMPLES / "labeling.parquet"), "--recipe", "job.yaml"]
    command += ["--pack-tokens", PACK_TOKENS, "--output", "whole.parquet", "--quiet"]
    subprocess.run(command, cwd=airflow.home, env=airflow.environment, check=True)
    return rows(airflow.home / "whole.parquet")


def rows(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in pq.read_table(path).to_pylist()]


def output(airflow: Airflow, day: str) -> Path:
    return airflow.home / "out" / f"nightly.{day}.parquet"


def put_input(airflow: Airflow, day: str) -> None:
    shutil.copy(SAMPLES / "labeling.parquet", airflow.home / "in" / f"{day}.parquet")


def test_a_night_is_scored_and_checked(airflow: Airflow, whole: list[dict[str, Any]]) -> None:
    put_input(airflow, "2026-01-01")
    run = airflow.run("2026-01-01")
    assert run.states == {"score": "success", "check": "success"}, run.log
    assert run.xcom["score"]["rows"]["scored"] == run.xcom["check"]["scored"] == len(whole)
    assert run.xcom["score"]["mean_score"] == pytest.approx(sum(r["score"] for r in whole) / len(whole))
    assert rows(output(airflow, "2026-01-01")) == whole


def test_a_killed_try_is_resumed_by_the_next(airflow: Airflow, whole: list[dict[str, Any]]) -> None:
    put_input(airflow, "2026-01-02")
    run = airflow.run("2026-01-02", "kill")
    assert airflow.codes == ["-9", "0"], run.log
    assert "return code -9" in run.log
    assert run.states == {"score": "success", "check": "success"}, run.log
    assert run.tries["score"] == 2
    report = json.loads((airflow.home / run.xcom["score"]["report"]).read_text())
    assert report["resumed"]
    assert report["tokens"]["prompt"] < sum(row["prompt_tokens"] for row in whole)
    assert rows(output(airflow, "2026-01-02")) == whole


def test_a_night_that_is_too_long_is_stopped_and_resumed(airflow: Airflow, whole: list[dict[str, Any]]) -> None:
    put_input(airflow, "2026-01-03")
    run = airflow.run("2026-01-03", "slow", retry_delay=5, execution_timeout=60)
    assert "Sending SIGTERM signal to process group" in run.log
    *stopped, last = airflow.codes  # on a busy machine the second try may be too long as well
    assert set(stopped) == {"143"}, run.log
    assert last == "0", run.log
    assert run.states == {"score": "success", "check": "success"}, run.log
    assert run.tries["score"] >= 2
    report = json.loads((airflow.home / run.xcom["score"]["report"]).read_text())
    assert report["resumed"]
    assert rows(output(airflow, "2026-01-03")) == whole


def test_an_empty_night_is_skipped(airflow: Airflow) -> None:
    empty = pq.read_table(SAMPLES / "labeling.parquet").slice(0, 0)
    pq.write_table(empty, airflow.home / "in" / "2026-01-04.parquet")
    run = airflow.run("2026-01-04")
    assert airflow.codes == ["99"]
    assert run.states == {"score": "skipped", "check": "skipped"}, run.log


def test_a_night_with_bad_rows_fails_in_the_check_without_another_try(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pq.read_table(SAMPLES / "labeling.parquet").slice(0, 50)
    prompts = [None, "", *table["prompt"].to_pylist()[2:]]
    pq.write_table(
        table.set_column(table.column_names.index("prompt"), "prompt", [prompts]),
        airflow.home / "in" / "2026-01-05.parquet",
    )
    monkeypatch.setitem(airflow.environment, "PREFILL_EMPTY_TEXT", "error")
    run = airflow.run("2026-01-05")
    assert airflow.codes == ["0"], run.log
    assert run.states == {"score": "success", "check": "failed"}, run.log
    assert run.xcom["score"]["rows"]["errors_by_code"] == {"empty_prompt": 1, "null_prompt": 1}
    assert "2 of 50 rows failed: {" in run.log


def test_a_night_that_fails_for_good_has_one_try(airflow: Airflow, monkeypatch: pytest.MonkeyPatch) -> None:
    put_input(airflow, "2026-01-07")
    monkeypatch.setitem(airflow.environment, "PREFILL_MIN_LABEL_MASS", "0.9999999")
    run = airflow.run("2026-01-07")
    assert airflow.codes == ["3"], run.log
    assert run.states["score"] == "failed", run.log
    assert "exit code 3: another try would not help" in run.log


def test_a_night_of_a_cascade_takes_the_profile_of_an_earlier_one(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = f"model: {SAMPLES}/models/deep\nfirst: {SAMPLES}/models/draft"
    recipe = f"{models}\nchat: false\nid_column: id\nmax_flips: 0.05\nlabels: [Yes, No]\n"
    (airflow.home / "cascade.yaml").write_text(recipe)
    command = [sys.executable, "-m", "prefillcli", "score", str(SAMPLES / "labeling.parquet"), "--quiet"]
    command += ["--recipe", "cascade.yaml", "--output", "learnt.parquet"]
    subprocess.run(command, cwd=airflow.home, env=airflow.environment, check=True)
    monkeypatch.setitem(airflow.environment, "AIRFLOW_VAR_PREFILL_RECIPE", "cascade.yaml")
    monkeypatch.setitem(airflow.environment, "AIRFLOW_VAR_PREFILL_EXIT_PROFILE", "learnt.exit.json")
    put_input(airflow, "2026-01-06")
    run = airflow.run("2026-01-06")
    assert run.states == {"score": "success", "check": "success"}, run.log
    left = sum(row["method"] == "first" for row in rows(output(airflow, "2026-01-06")))
    assert left > 500
    assert f"{left:,} rows decided early; exits: reused" in run.log
