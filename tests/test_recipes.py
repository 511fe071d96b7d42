"""What a nightly job is copied from: the job recipes, the script for cron, the crontab, the DAG's command."""

from __future__ import annotations

import ast
import csv
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.options.commands import ScoreSettings

ROOT = Path(__file__).parent.parent
RECIPES, SAMPLES = ROOT / "recipes", ROOT / "samples"
NIGHTLY, CRONTAB, DAG = RECIPES / "prefill-nightly.sh", RECIPES / "crontab.example", RECIPES / "airflow_dag.py"
ROWS = {"labeling": 2000, "post_recommendation": 240, "credit_verification": 40, "rationale": 400}
# Recipes with a file of questions: how many these are.
QUESTIONS = {"quality": 8, "moderation": 12, "queries": 12, "triage": 3, "pictures": 5}
OPTIONS = {"--" + name.replace("_", "-") for name in ScoreSettings.options()} | {"--recipe"}
DAY = "2026-01-01"
FIELD = r"(?:\*|\d+(?:-\d+)?(?:,\d+)*)(?:/\d+)?"

# ---------------------------------------------------------------------------------------------------------- recipes


def test_every_recipe_is_tested() -> None:
    # The models of two are no samples: tests/test_rerank_recipe.py, tests/jobs/test_adapters.py.
    elsewhere = {"rerank", "adapters", "perplexity", "cascade"}
    assert {path.stem for path in RECIPES.glob("*.yaml")} == ROWS.keys() | QUESTIONS.keys() | elsewhere


def test_the_recipe_for_perplexity_reads_each_token_of_a_corpus_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    output = tmp_path / "perplexity.parquet"
    words = ["--recipe", "recipes/perplexity.yaml", "-o", str(output), "--limit", "50", "--quiet"]
    done = CliRunner().invoke(app, ["score", *words])
    assert done.exit_code == 0, done.stderr
    rows = pq.read_table(output).to_pylist()
    texts = pq.read_table(SAMPLES / "labeling.parquet")["text"].to_pylist()[:50]
    assert [row["target_bytes"] for row in rows] == [len(text.encode()) for text in texts]
    use = json.loads((tmp_path / "perplexity.run.json").read_text())["likelihood"]
    tokens = sum(row["target_tokens"] for row in rows)
    assert use["perplexity"] == pytest.approx(math.exp(-sum(row["logprob"] for row in rows) / tokens))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_cascade_goes_from_night_to_night_by_the_dags_command(home: Path) -> None:
    for path in ("samples", "recipes"):
        (home / path).symlink_to(ROOT / path)
    command, profile = dag_command(), "out/first.exit.json"
    for night, given in (("first", ""), ("second", profile)):
        names = {"COMMAND": ".venv/bin/prefill", "RECIPE": "recipes/cascade.yaml", "EXIT_PROFILE": given}
        names |= {"INPUT": "", "OUTPUT": f"out/{night}.parquet"}
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment(home, **{f"SCORING_{name}": value for name, value in names.items()}),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        exits = json.loads(done.stdout.splitlines()[-1])["exits"]
        assert exits["status"] == ("reused" if given else "learnt")
        rows = pq.read_table(home / "out" / f"{night}.parquet").to_pylist()
        assert exits["left"] == sum(row["method"] == "first" for row in rows) > len(rows) / 4


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_runs_from_the_root_and_finds_the_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    output = tmp_path / "scores.parquet"
    done = CliRunner().invoke(app, ["score", "--recipe", f"recipes/{name}.yaml", "-o", str(output), "--quiet"])
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    scores = pq.read_table(output).to_pylist()
    assert len(scores) == ROWS[name]
    assert {row["error"] for row in scores} == {None}
    right = [row["prediction"] == row["answer"] for row in scores]
    assert sum(right) / len(right) > (0.85 if name == "credit_verification" else 0.95)
    report = json.loads((tmp_path / "scores.run.json").read_text())
    assert report["settings"]["output"] == str(output)
    if name == "credit_verification":
        assert report["audits"]["answer"]["rows"] == 20
        assert report["tokens"]["kept"] < 0.3 * report["tokens"]["prompt"]
    if name == "rationale":
        uncertain = [row for row in scores if 0.1 < row["score"] < 0.9]
        assert uncertain
        assert [row for row in scores if row["rationale"] is not None] == uncertain
        assert all({each["section"] for each in row["evidence"]} == {"text", "subject"} for row in uncertain)
    if name == "post_recommendation":
        assert report["tokens"]["computed"] < 0.2 * report["tokens"]["prompt"]  # histories are shared


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_recipe_asks_all_its_questions_and_reads_each_document_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    output = tmp_path / "scores.parquet"
    words = ["score", "--recipe", f"recipes/{name}.yaml", "-o", str(output), "--quiet", "--limit", "400"]
    words += ["--review", str(tmp_path / "review.csv")] if name == "triage" else []
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    scores = pq.read_table(output)
    assert len(scores) == {"triage": 120, "pictures": 300}.get(name, 400)
    assert scores["error"].null_count == len(scores)
    assert sum(column.endswith(".label_mass") for column in scores.column_names) == QUESTIONS[name]
    report = json.loads((tmp_path / "scores.run.json").read_text())
    assert report["tokens"]["computed"] < 0.7 * report["tokens"]["prompt"]
    if name == "triage":
        with (SAMPLES / "tickets.csv").open(newline="") as file:
            tickets = list(csv.DictReader(file))
        found = [(row["department"], row["refund"] > 0.5) for row in scores.to_pylist()]
        right = [own == (row["team"], row["is_refund"] == "yes") for own, row in zip(found, tickets, strict=True)]
        assert sum(right) > 0.85 * len(right)
        with (tmp_path / "review.csv").open(newline="") as file:
            doubted = [row["id"] for row in csv.DictReader(file)]
        assert doubted == [row["id"] for row in scores.to_pylist() if row["review"]]
    if name == "pictures":
        evaluations = report["evaluations"]
        assert min(evaluations[each]["accuracy"]["value"] for each in ("red", "printed")) >= 0.95
    if name == "queries":  # which are the sample's own
        known = [row for row in scores.to_pylist() if row["subject"] in row]
        right = [(row[row["subject"]] > 0.5) == (row["answer"] == "Yes") for row in known]
        assert len(known) > 40
        assert sum(right) / len(right) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labeling", "post_recommendation"])
def test_the_template_of_a_recipe_makes_the_prompts_of_the_sample(name: str) -> None:
    import jinja2
    import yaml

    template = jinja2.Template(yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["template"])
    for row in pq.read_table(SAMPLES / f"{name}.parquet").to_pylist()[::7]:
        assert template.render(row) == row["prompt"]


# ---------------------------------------------------------------------------------------------------- nightly script


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a job of 40 rows, in which `prefill` is the real command."""
    table = pq.read_table(SAMPLES / "labeling.parquet").slice(0, 40)
    pq.write_table(table, tmp_path / "in.parquet")
    recipe = f"input: in.parquet\nmodel: {SAMPLES}/models/target\nchat: false\nid_column: id\n"
    (tmp_path / "job.yaml").write_text(recipe)
    write_command(tmp_path, f'exec "{sys.executable}" -m prefillcli "$@"')
    return tmp_path


def write_command(home: Path, body: str) -> None:
    """Make `body` the command of the jobs in `home`."""
    command = home / ".venv" / "bin" / "prefill"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(f"#!/bin/bash\n{body}\n")
    command.chmod(0o755)


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFILL_")}
    return kept | {"SCORING_HOME": str(home), "SCORING_DAY": DAY} | more


def nightly(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(NIGHTLY), "job.yaml", *arguments]
    return subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=120)


def log(home: Path) -> str:
    return (home / "out" / "job.log").read_text()


def summaries(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log(home).splitlines() if line.startswith("{")]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_night_is_silent_and_a_second_run_finds_nothing_to_do(home: Path) -> None:
    for _ in range(2):
        done = nightly(home)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(pq.read_table(home / "out" / f"job.{DAY}.parquet")) == 40
    first, second = summaries(home)
    assert first["rows"] == second["rows"]
    assert first["mean_score"] == second["mean_score"]
    report = json.loads((home / "out" / f"job.{DAY}.run.json").read_text())
    assert report["resumed"]
    assert report["tokens"]["prompt"] == 0


@pytest.mark.nightly
def test_a_stopped_night_is_finished_by_the_next_run(home: Path) -> None:
    held = (
        "import time, prefillcli.scoring.score as job; from prefillcli.engines.torch import TorchEngine as T\n"
        "from prefillcli.cli import main\nfrom functools import partial\n"
        "from prefillcli.core.scorer import Granularity\nanswer = T.answer\n"
        "def slow(*a):\n    time.sleep(0.3)\n    return answer(*a)\n"
        "job.score_job = partial(job.score_job, granularity=Granularity(flush_seconds=0.0))\n"
        "T.answer = slow\nmain()"
    )
    write_command(home, f"exec '{sys.executable}' -c '{held}' \"$@\" --pack-tokens 128")
    script = [str(NIGHTLY), "job.yaml"]
    process = subprocess.Popen(
        script, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    work = home / "out" / f"job.{DAY}.parquet.prefill"
    end = time.monotonic() + 60
    while len(list(work.glob("part-*.parquet"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no part was written"
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)  # to the script alone
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "was stopped; the same command goes on" in said
    assert summaries(home)[-1]["status"] == "interrupted"
    write_command(home, f'exec "{sys.executable}" -m prefillcli "$@"')
    assert nightly(home).returncode == 0
    assert json.loads((home / "out" / f"job.{DAY}.run.json").read_text())["resumed"]
    assert summaries(home)[-1]["rows"]["scored"] == 40
    whole = CliRunner().invoke(app, ["score", str(home / "in.parquet"), *_options(home), "--quiet"])
    assert whole.exit_code == 0, whole.stderr
    assert _scores(home / "out" / f"job.{DAY}.parquet") == pytest.approx(_scores(home / "whole.parquet"), abs=1e-5)


def _options(home: Path) -> list[str]:
    return ["--recipe", str(home / "job.yaml"), "-o", str(home / "whole.parquet")]


def _scores(path: Path) -> list[float]:
    scores: list[float] = pq.read_table(path)["score"].to_pylist()
    return scores


def test_a_signal_reaches_the_command_once_however_often_timeout_sends_it(home: Path) -> None:
    counting = """
import os, signal, time
from pathlib import Path
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
Path("ready").touch()
while not got:
    time.sleep(0.01)
time.sleep(1)
print(len(got), "signal, own group:", os.getpgid(0) == os.getpid())
raise SystemExit(143)
"""
    write_command(home, f"exec '{sys.executable}' -c '{counting}'")
    with subprocess.Popen(
        [str(NIGHTLY), "job.yaml"], env=environment(home), stderr=subprocess.DEVNULL, start_new_session=True
    ) as script:
        while not (home / "ready").exists():
            assert script.poll() is None
            time.sleep(0.01)
        for _ in range(2):
            os.killpg(script.pid, signal.SIGTERM)
            time.sleep(0.2)
    assert script.returncode == 143
    assert "1 signal, own group: True" in log(home)
    assert "job: exit code 143" in log(home)


def test_a_second_run_beside_the_first_is_left_out(home: Path) -> None:
    write_command(home, "touch started")
    (home / "out").mkdir()
    with (home / "out" / "job.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = nightly(home)
    assert done.returncode == 5
    assert "the run before is still going on" in done.stderr
    assert not (home / "started").exists()
    assert nightly(home).returncode == 0  # a lock file that is left behind locks nothing


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 99, 130, 143])
def test_exit_codes_pass_through_and_trouble_is_mailed(home: Path, code: int) -> None:
    write_command(home, f"echo 'prefill: what happened' >&2; echo '{{}}'; exit {code}")
    done = nightly(home)
    assert done.returncode == code
    assert f"job: exit code {code}" in log(home)
    if code in (0, 99):
        assert done.stdout + done.stderr == ""
    else:
        assert "prefill: what happened" in done.stderr


@pytest.mark.nightly
def test_a_real_failure_says_what_is_wrong(home: Path) -> None:
    done = nightly(home, "--id-column", "none")
    assert done.returncode == 2
    assert "none" in done.stderr
    pq.write_table(pa.table({"id": ["a", "b"], "prompt": ["yes", None]}), home / "in.parquet")
    done = nightly(home, "--empty-text", "error")
    assert done.returncode == 3
    assert "null_prompt" in done.stderr


def test_the_script_passes_options_that_exist(home: Path) -> None:
    write_command(home, 'printf "%s\\n" "$@" >> words')
    assert nightly(home, "other.parquet", "--limit", "3").returncode == 0
    words = (home / "words").read_text().splitlines()
    assert words[:6] == ["score", "--recipe", "job.yaml", "other.parquet", "--limit", "3"]
    assert words[words.index("--output") + 1] == f"out/job.{DAY}.parquet"
    assert {"--resume", "--skip-empty", "--quiet"} <= set(words)
    assert {word for word in words if word.startswith("--")} <= OPTIONS


def test_the_script_without_a_recipe_says_how_to_use_it() -> None:
    done = subprocess.run([str(NIGHTLY)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage:" in done.stderr


# ----------------------------------------------------------------------------------------------------------- crontab


def cron_lines() -> list[tuple[list[str], str]]:
    """Time fields and command of each job."""
    lines = [line for line in CRONTAB.read_text().splitlines() if line.strip() and not line.startswith("#")]
    jobs = [line.split(None, 5) for line in lines if not re.match(r"[A-Z_]+=", line)]
    return [(fields[:5], fields[5]) for fields in jobs]


def test_crontab_lines_have_six_fields_and_name_what_exists() -> None:
    assert len(cron_lines()) == 4
    for times, command in cron_lines():
        assert all(re.fullmatch(FIELD, each) for each in times), times
        assert not re.search(r"(?<!\\)%", command), "cron ends the command at a bare %"
        recipes = re.findall(r"recipes/[\w.-]+", command)
        assert recipes
        assert all((ROOT / each).exists() for each in recipes)
        assert set(re.findall(r"--[a-z][a-z-]+", command)) <= OPTIONS
    assert os.access(NIGHTLY, os.X_OK)


def test_the_crontab_line_without_the_script_locks_and_logs(home: Path) -> None:
    (line,) = [command for _, command in cron_lines() if "flock" in command]
    command = line.replace("\\%", "%").replace("/srv/scoring", str(home))
    write_command(home, 'printf "%s\\n" "$@"')
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout == ""
    words = (home / "out" / "posts.log").read_text().splitlines()
    assert words[0] == "score"
    assert re.fullmatch(r"out/posts\.\d{4}-\d\d-\d\d\.parquet", words[words.index("-o") + 1])
    write_command(home, "echo wrong >&2; exit 1")
    assert "wrong" in subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout
    write_command(home, "touch started")
    with (home / "out" / "posts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["sh", "-c", command], capture_output=True)
    assert not (home / "started").exists()


def as_cron(line: str, home: Path, night: str) -> subprocess.CompletedProcess[str]:
    """Run a crontab's line as cron does, on that day: by sh, up to the first bare %, and with % for \\%."""
    command, *text = re.split(r"(?<!\\)%", line.split(None, 5)[5].replace("/srv/scoring", str(home)))
    real, fake = shutil.which("date"), home / "bin" / "date"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f'#!/bin/sh\nexec {real} --date={night} "$@"\n')
    fake.chmod(0o755)
    return subprocess.run(
        ["/bin/sh", "-c", command.replace("\\%", "%")],
        input="\n".join(text),
        env={"HOME": str(home), "LOGNAME": "scoring", "PATH": f"{fake.parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )


def lines_for_cron(text: str) -> list[str]:
    return re.findall(rf"^{FIELD}(?: {FIELD}){{4}} .*$", text, re.MULTILINE)


@pytest.mark.nightly
def test_the_readmes_line_works_every_night(home: Path) -> None:
    (line,) = lines_for_cron((ROOT / "README.md").read_text())
    (home / "in").mkdir()
    (home / "models").mkdir()
    (home / "models" / "judge").symlink_to(SAMPLES / "models" / "target")
    table = pq.read_table(home / "in.parquet")
    outputs = [home / "out" / f"2026-01-3{day}.parquet" for day in (0, 1)]
    for night, output in enumerate(outputs):
        pq.write_table(table.slice(20 * night, 6 + night), home / "in" / "today.parquet")
        done = as_cron(line, home, output.stem)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), (home / "prefill.log").read_text()
    assert [len(pq.read_table(output)) for output in outputs] == [6, 7]
    pq.write_table(table, home / "in" / "today.parquet")  # what is another job under that name is refused
    assert '"exit_code":4' in as_cron(line, home, outputs[0].stem).stdout  # which cron mails


def test_crontab_lines_write_another_output_each_night(home: Path) -> None:
    shutil.copytree(RECIPES, home / "recipes")
    write_command(home, 'printf "%s " "$@" >> words; echo >> words')
    lines = [*lines_for_cron(CRONTAB.read_text()), *lines_for_cron((ROOT / "docs" / "scheduling.md").read_text())]
    assert len(lines) == 5
    for line in lines:
        (home / "words").unlink(missing_ok=True)
        for night in ("2026-01-30", "2026-01-31"):
            done = as_cron(line, home, night)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        first, second = ((home / "words").read_text()).splitlines()
        assert re.search(r" (-o|--output) out/\w+\.2026-01-30\.parquet ", first)
        assert first.replace("2026-01-30", "2026-01-31") == second


# --------------------------------------------------------------------------------------------------------------- DAG


def dag_command() -> str:
    """The shell command of the DAG, read without Airflow."""
    for node in ast.parse(DAG.read_text(), str(DAG)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMAND":
            command: str = ast.literal_eval(node.value)
            return command
    raise AssertionError("the DAG has no COMMAND")


def test_the_dag_compiles_and_its_command_has_options_that_exist() -> None:
    compile(DAG.read_text(), str(DAG), "exec")
    options = set(re.findall(r"--[a-z][a-z-]+", dag_command()))
    assert {"--resume", "--skip-empty"} <= options <= OPTIONS


def test_the_dag_sets_every_variable_that_its_command_reads() -> None:
    (set_,) = [
        keyword.value
        for node in ast.walk(ast.parse(DAG.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "env"
    ]
    assert isinstance(set_, ast.Dict)
    assert {ast.literal_eval(key) for key in set_.keys if key} == set(re.findall(r"SCORING_\w+", dag_command()))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param("in.parquet", id="an input of its own", marks=pytest.mark.nightly),
        pytest.param("", id="the recipe's input"),
    ],
)
def test_the_last_line_of_the_dags_command_is_the_summary(home: Path, given: str) -> None:
    names = {"COMMAND": ".venv/bin/prefill", "RECIPE": "job.yaml", "INPUT": given, "OUTPUT": "out/a b.parquet"}
    done = subprocess.run(
        ["bash", "-c", dag_command()],
        env=environment(home, **{f"SCORING_{name}": value for name, value in names.items()}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # as the BashOperator does
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["rows"]["scored"] == 40
    assert len(pq.read_table(home / "out" / "a b.parquet")) == 40
