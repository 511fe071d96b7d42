"""The recipes for shards: the Jobs of Kubernetes, the crontab for N machines, the commands of the DAG."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.options.commands import MergeSettings, ScoreSettings
from prefillcli.options.load import load_settings
from tests.test_recipes import (
    FIELD,
    RECIPES,
    ROOT,
    as_cron,
    environment,
    home,  # noqa: F401 - a fixture
    lines_for_cron,
    write_command,
)

CRONTAB, DAG = RECIPES / "crontab.shards.example", RECIPES / "airflow_shards_dag.py"
DAY = "2026-01-30"
JOBS = ["nightly", "shards", "merge"]


def container(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specification of a Job, also one that a CronJob makes, and that of its container."""
    (job,) = yaml.safe_load_all((RECIPES / "kubernetes" / f"{name}.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob" if name == "nightly" else "Job")
    if name == "nightly":
        job = job["spec"]["jobTemplate"]
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return job["spec"], found


def run_pod(name: str, home: Path, **given: str) -> subprocess.CompletedProcess[str]:  # noqa: F811
    """Run the command of a Job's pod as its container does, with `home` for the volumes."""
    _, found = container(name)
    given = {each["name"]: each["value"] for each in found["env"] if "value" in each} | given
    words = [*found["command"], *(text.replace("/job/", f"{home}/") for text in found["args"])]
    path = f"{home}/.venv/bin:/usr/bin:/bin"
    return subprocess.run(
        words, cwd=home, env=environment(home) | given | {"PATH": path}, capture_output=True, text=True, timeout=120
    )


def test_the_indexed_job_has_one_pod_for_each_shard() -> None:
    spec, found = container("shards")
    (shards,) = (each["value"] for each in found["env"] if each["name"] == "SHARDS")
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == int(shards)
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy needs
    mounts, volumes = ({each["name"] for each in given} for given in (found["volumeMounts"], pod["volumes"]))
    assert mounts == volumes
    codes = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes == [[2, 4]]  # what another try does not help
    merged = container("merge")[1]
    assert [each for each in found["env"] if each["name"] == "OUTPUT"] == merged["env"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", JOBS)
def test_kubernetes_own_types_have_every_key_of_a_job(name: str) -> None:
    path = RECIPES / "kubernetes" / f"{name}.yaml"
    # Without a cluster: kubectl decodes the file, refuses a wrong type, and drops what it does not know.
    words = ["kubectl", "set", "env", "--local", "-f", str(path), "ADDED=1", "-o", "json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert_within(yaml.safe_load(path.read_text()), json.loads(done.stdout))


@pytest.mark.parametrize("name", JOBS)
def test_pods_meet_the_profile_restricted_and_have_limits(name: str) -> None:
    """As https://kubernetes.io/docs/concepts/security/pod-security-standards/ has it."""
    spec, found = container(name)
    pod = spec["template"]["spec"]["securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["runAsUser"] != 0
    assert pod["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
    assert found["securityContext"]["allowPrivilegeEscalation"] is False
    assert found["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert found["resources"]["limits"].keys() >= {"cpu", "memory"}  # the quota that --threads follows, and --memory


@pytest.mark.parametrize(
    ("job", "day"),
    [
        ("prefill-nightly-29412135", "2025-12-03"),  # due at 2025-12-03 02:15 UTC
        ("prefill-try", datetime.now(UTC).date().isoformat()),
    ],
)
def test_a_night_keeps_its_day(job: str, day: str, home: Path) -> None:  # noqa: F811
    write_command(home, 'printf "%s\\n" "$@" > words')
    assert run_pod("nightly", home, JOB_NAME=job).returncode == 0
    words = (home / "words").read_text().splitlines()
    assert words[:2] == ["score", f"in/{day}.parquet"]
    settings = load_settings(ScoreSettings, flags_of(words[2:]), recipe=f"{home}/job.yaml", environment={})
    assert (settings.files.output, settings.files.resume) == (f"out/{day}.parquet", True)


def assert_within(given: Any, found: Any) -> None:
    """Everything that is given was found; there may be more."""
    if isinstance(given, dict):
        for key in given:
            assert_within(given[key], found[key])
    elif isinstance(given, list):
        for each, other in zip(given, found[: len(given)], strict=True):
            assert_within(each, other)
    else:
        assert given == found


def test_the_pods_command_lines_are_valid(home: Path) -> None:  # noqa: F811
    write_command(home, 'printf "%s\\n" "$@" > words')
    for index in range(4):
        assert run_pod("shards", home, JOB_COMPLETION_INDEX=str(index)).returncode == 0
        first, *words = (home / "words").read_text().splitlines()
        assert first == "score"
        settings = load_settings(ScoreSettings, flags_of(words), recipe=f"{home}/job.yaml", environment={})
        assert (settings.files.shard, settings.files.resume) == (f"{index + 1}/4", True)
    assert run_pod("merge", home).returncode == 0
    first, *words = (home / "words").read_text().splitlines()
    assert first == "merge"
    settings = load_settings(MergeSettings, flags_of(words), recipe=f"{home}/job.yaml", environment={})
    assert settings.files.output == "out/scores.parquet"


def flags_of(words: list[str]) -> dict[str, Any]:
    """The options of a command line, as the command would take them."""
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        if not words[at].startswith("--"):
            found["output"] = words[at]
        elif at + 1 == len(words) or words[at + 1].startswith("--"):
            found[words[at][2:].replace("-", "_")] = True
        else:
            found[words[at][2:].replace("-", "_")] = words[at + 1]
            at += 1
        at += 1
    found.pop("recipe", None)
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_the_pods_make_the_output_of_one_process(home: Path) -> None:  # noqa: F811
    for index in range(4):
        done = run_pod("shards", home, JOB_COMPLETION_INDEX=str(index))
        assert done.returncode == 0, done.stderr
    for _ in range(2):  # a pod may be started again
        done = run_pod("merge", home)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["rows"]["scored"] == 40
    assert_whole(home, home / "out" / "scores.parquet")


def assert_whole(home: Path, output: Path) -> None:  # noqa: F811
    """The output is the one that a single process writes."""
    alone = home / "alone.parquet"
    given = ["score", str(home / "in.parquet"), "--recipe", str(home / "job.yaml"), "-o", str(alone), "--quiet"]
    assert CliRunner().invoke(app, given).exit_code == 0
    rows, wanted = (pq.read_table(path).to_pylist() for path in (output, alone))
    assert [row["id"] for row in rows] == [row["id"] for row in wanted]
    assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in wanted], abs=1e-5)


# ----------------------------------------------------------------------------------------------------------- crontab


def test_the_crontab_for_machines_names_options_and_recipes_that_exist() -> None:
    lines = lines_for_cron(CRONTAB.read_text())
    assert len(lines) == 3
    options = {"--" + name.replace("_", "-") for name in MergeSettings.options()} | {"--recipe"}
    for line in lines:
        times, command = line.split(None, 5)[:5], line.split(None, 5)[5]
        assert all(re.fullmatch(FIELD, each) for each in times)
        assert not re.search(r"(?<!\\)%", command)
        assert all((ROOT / each).exists() for each in re.findall(r"recipes/[\w.-]+", command))
        assert set(re.findall(r"--[a-z][a-z-]+", command)) <= options


@pytest.mark.slow
@pytest.mark.nightly
def test_machines_score_and_merge_by_their_crontab(home: Path) -> None:  # noqa: F811
    (home / "recipes").mkdir()
    for name in ("prefill-nightly.sh", "labeling.yaml"):
        (home / "recipes" / name).write_bytes((RECIPES / name).read_bytes())
    (home / "recipes" / "prefill-nightly.sh").chmod(0o755)
    (home / "recipes" / "labeling.yaml").write_text((home / "job.yaml").read_text() + "resume: true\n")
    (home / "in").mkdir()
    (home / "in" / f"{DAY}.parquet").write_bytes((home / "in.parquet").read_bytes())
    score, again, merge = lines_for_cron(CRONTAB.read_text())
    for shard in ("1/2", "2/2"):
        script = home / "recipes" / "prefill-nightly.sh"
        text = (RECIPES / "prefill-nightly.sh").read_text()
        script.write_text(text.replace("set -uo pipefail", f"set -uo pipefail\nexport PREFILL_SHARD={shard}"))
        for line in (score, again):
            done = as_cron(line, home, DAY)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert (home / "out" / f"labeling.shard-{shard.replace('/', '-of-')}.log").exists()
        if shard == "1/2":
            assert "shard 2 of 2 of " in as_cron(merge, home, DAY).stdout
    for _ in range(2):
        done = as_cron(merge, home, DAY)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_whole(home, home / "out" / f"labeling.{DAY}.parquet")


# --------------------------------------------------------------------------------------------------------------- DAG


def commands() -> dict[str, str]:
    """The shell commands of the DAG, read without Airflow."""
    found = {}
    for node in ast.parse(DAG.read_text(), str(DAG)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("SCORE", "MERGE"):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    return found


@pytest.mark.nightly
def test_the_last_lines_of_the_dags_commands_are_summaries(home: Path) -> None:  # noqa: F811
    names = {"COMMAND": ".venv/bin/prefill", "RECIPE": "job.yaml", "INPUT": "in.parquet", "OUTPUT": "out/a b.parquet"}

    def run(command: str, **more: str) -> dict[str, Any]:
        given = {f"SCORING_{name}": value for name, value in (names | more).items()}
        done = subprocess.run(
            ["bash", "-c", commands()[command]],
            env=environment(home, **given),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # as the BashOperator does
            text=True,
        )
        assert done.returncode == 0, done.stdout
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    assert sum(run("SCORE", SHARD=f"{number}/3")["rows"]["scored"] for number in (1, 2, 3)) == 40
    assert run("MERGE")["rows"]["scored"] == 40
    assert_whole(home, home / "out" / "a b.parquet")
