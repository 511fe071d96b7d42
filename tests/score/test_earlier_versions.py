"""What earlier versions wrote: verified, resumed, taken over by `--since`, compared with and read as `run.json`.

`python -m tests.fixtures` made it, with the version that its folder is named after.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from prefillcli.jobs.verify import verify_job
from prefillcli.models.files import sample_model
from tests.score.jobs import TOLERANCE, read_output, read_report, run_schema, score

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = sorted(path.name for path in FIXTURES.iterdir() if (path / "in.jsonl").exists())
FLAGS: dict[str, Any] = {"model": sample_model(), "chat": False, "dtype": "float32", "id_column": "id"}


@pytest.fixture(autouse=True, params=VERSIONS)
def version(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FIXTURES / request.param, tmp_path / "kept")
    monkeypatch.chdir(tmp_path / "kept")


def assert_as_done(rows: list[dict[str, Any]]) -> None:
    done = read_output("done.parquet")
    assert [row["id"] for row in rows] == [row["id"] for row in done]
    assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in done], abs=TOLERANCE)


def as_written(path: str) -> Any:
    """A report of an earlier version, which may lack keys that have come since."""
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize("output", ["done.parquet", "done.jsonl"])
def test_an_output_is_verified_and_used_by_since(output: str) -> None:
    assert verify_job(output, ["in.jsonl"], quiet=True)["problems"] == []
    with Path("in.jsonl").open("a") as lines:
        lines.write(json.dumps({"id": 40, "prompt": "One more. Answer:"}) + "\n")
    done = score("in.jsonl", since=output, **FLAGS)
    assert (done["rows"]["scored"], done["since"]["rows"]) == (41, 40)
    assert_as_done(read_output("out.parquet")[:40])


def test_a_job_is_resumed() -> None:
    assert as_written("stopped.run.json")["rows"]["scored"] < 40
    assert score("in.jsonl", "stopped.parquet", resume=True, pack_tokens="64", **FLAGS)["exit_code"] == 0
    report = read_report("stopped.run.json")
    assert report["resumed"]
    assert report["tokens"]["prompt"] < as_written("done.run.json")["tokens"]["prompt"]
    assert_as_done(read_output("stopped.parquet"))


def test_a_finished_job_is_known_again_and_its_scores_are_compared_with() -> None:
    done = score("in.jsonl", "done.parquet", resume=True, max_drift=0.01, drift_from="done.run.json", **FLAGS)
    assert done["exit_code"] == 0
    assert read_report("done.run.json")["drift"]["distance"] == 0


@pytest.mark.parametrize("name", ["done", "stopped"])
def test_no_key_of_a_report_has_gone_or_has_another_type(name: str) -> None:
    schema = json.loads(json.dumps(run_schema().schema))
    for each in (schema, *schema["$defs"].values()):
        each.pop("required", None)  # a key may have come
    Draft202012Validator(schema).validate(as_written(f"{name}.run.json"))
