"""`prefill verify` and `prefill status`: what they say of outputs in every state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.rows.output.destination import write_parquet as write_sealed
from prefillcli.rows.output.store import Heartbeat, open_store
from prefillcli.runtime.clock import Pace
from prefillcli.tools.status import status_job
from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import score, texts, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows

ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
COUNT = 45
IDS = [f"r{i}" for i in range(COUNT)]
CASES = {
    "o.parquet": ("in.parquet", "id"),
    "o/": ("in.jsonl", "id"),
    "o.jsonl.gz": ("in.parquet", None),
    "p.jsonl": ("in.jsonl", "id"),
    "p.parquet": ("in.jsonl", None),
}


@pytest.fixture(scope="module")
def outputs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cut_small_windows(patch)
        prompts = [*texts(COUNT - 1), None]
        write_parquet("in.parquet", prompt=prompts, id=IDS)
        write_jsonl("in.jsonl", [{"prompt": p, "id": i} for p, i in zip(prompts, IDS, strict=True)])
        for name, (source, id_column) in CASES.items():
            options: dict[str, Any] = {"model": model, "id_column": id_column, "limit": 41, "max_error_rate": 1}
            assert score(source, name, **options)["exit_code"] == 0
    return folder


@pytest.fixture
def here(outputs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(outputs, tmp_path, dirs_exist_ok=True))


@pytest.mark.parametrize("name", CASES)
def test_a_good_output_is_verified_with_and_without_its_input(here: Path, name: str) -> None:
    for inputs in ([], [CASES[name][0]]):
        summary = verify_job(name, inputs)
        assert (summary["exit_code"], summary["problems"]) == (0, [])
        assert summary["rows"] == {"total": 41, "scored": 41, "errors": 0}


@pytest.mark.parametrize("name", ["o.parquet", "o.jsonl"])
def test_a_line_that_was_too_long_to_be_read_has_no_id_to_compare(tmp_path: Path, model: Path, name: str) -> None:
    rows = [{"id": "a", "prompt": "fox"}, {"id": "b", "prompt": "fox " * 50}, {"id": "c", "prompt": "x"}]
    flags = {"model": model, "id_column": "id", "max_row_bytes": "100", "max_error_rate": 1}
    assert score(write_jsonl("in.jsonl", rows), name, **flags)["exit_code"] == 0
    assert verify_job(name, ["in.jsonl"])["problems"] == []
    write_jsonl("in.jsonl", [*rows[:2], rows[2] | {"id": "d"}])
    assert verify_job(name, ["in.jsonl"])["exit_code"] == 1


def test_a_sealed_output_is_verified_wherever_it_was_copied_to(here: Path) -> None:
    for name, copy in (("o.parquet", "elsewhere.parquet"), ("o/", "elsewhere/")):
        (shutil.copytree if name == "o/" else shutil.copy)(name, copy)
        assert verify_job(copy, [CASES[name][0]])["exit_code"] == 0
    shutil.copy("p.jsonl", "elsewhere.jsonl")
    assert "nothing proves it" in verify_job("elsewhere.jsonl")["problems"][0]


@pytest.mark.parametrize("name", CASES)
def test_another_input_or_a_changed_one_is_told(here: Path, name: str) -> None:
    source = CASES[name][0]
    other = {"in.parquet": "in.jsonl", "in.jsonl": "in.parquet"}[source]
    assert "not the input" in "".join(verify_job(name, [other])["problems"])
    write_parquet("in.parquet", prompt=texts(COUNT), id=IDS)
    write_jsonl("in.jsonl", [{"prompt": p, "id": i} for p, i in zip(texts(COUNT), IDS, strict=True)])
    summary = verify_job(name, [source])
    assert summary["exit_code"] == 1
    assert "not the input" in summary["error"]
    assert verify_job(name, ["nowhere.parquet"])["exit_code"] == 2


@pytest.mark.parametrize("name", CASES)
def test_bytes_that_changed_are_told(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = here / "o" / "part-00001.parquet" if name == "o/" else here / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    summary = verify_job(name)
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert f"{file.name} is not as it was written" in capsys.readouterr().err
    file.unlink()
    assert verify_job(name)["exit_code"] == 1


@pytest.mark.parametrize("id_column", ["id", None])
def test_rows_that_a_sealed_file_should_not_have_are_told(here: Path, id_column: str | None, model: Path) -> None:
    """As a run with a fault of its own would write them: everything is sealed, but the rows are wrong."""
    name = "w.parquet"
    assert score("in.parquet", name, model=model, id_column=id_column, limit=41)["exit_code"] == 0
    good = pq.read_table(name)
    shutil.rmtree(name + ".prefill")
    both = good.set_column(
        good.column_names.index("error"), good.schema.field("error"), pa.array(["null_prompt"] * 41)
    )
    above = good.set_column(good.column_names.index("score"), good.schema.field("score"), pc.add(good["score"], 1.0))
    swapped = good.take(pa.array([1, 0, *range(2, 41)]))
    doubled = good.take(pa.array([0, 0, *range(2, 41)]))
    for table, problem in (
        (both, "neither a score nor an error"),
        (above, "not between 0 and 1"),
        (swapped, "row 0 of the output is"),
        (doubled, "row 1 of the output is"),
        (good[:40], "fewer rows than the input"),
        (pa.concat_tables([good, good[40:]]), "more rows than the input"),
    ):
        with open(name, "w+b") as file:
            write_sealed(file, table.schema, [table])
        summary = verify_job(name, ["in.parquet"])
        assert summary["exit_code"] == 1
        assert any(problem in found for found in summary["problems"]), (problem, summary["problems"])
        if id_column is None and table in (swapped, doubled):
            assert "out of order" in "".join(verify_job(name)["problems"])


def test_an_output_of_an_object_store_is_verified_and_has_a_status(here: Path, model: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("memory://bucket/o.parquet", "memory://bucket/o/", "memory://bucket/o.jsonl"):
        assert score("in.parquet", name, model=model, id_column="id", limit=20, report="r.json")["exit_code"] == 0
        assert verify_job(name, ["in.parquet"])["problems"] == []
        assert status_job(name)["status"] == "complete"
        file = memory.find(name.rstrip("/"))[-1]
        memory.pipe_file(file, memory.cat_file(file)[:-1])
        assert verify_job(name)["exit_code"] == 1


def test_running_then_killed_then_complete(here: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    given = ["in.parquet", "-m", model, "--id-column", "id", "--pack-tokens", 64, "--max-error-rate", 1]
    command = Command("score", *given, "-o", "run.parquet", hold=Hold(ANSWER, 6))
    command.wait_until_held()
    command.wait_until(Path("run.parquet.prefill/heartbeat.json").exists)
    running = status_job("run.parquet")
    assert (running["status"], running["exit_code"]) == ("running", 0)
    assert running["rows"]["total"] == COUNT
    assert running["rows"]["done"] >= running["rows"]["saved"] > 0
    assert running["owner"].startswith("process ")
    assert verify_job("run.parquet")["exit_code"] == 1
    command.kill()
    stopped = status_job("run.parquet")
    assert stopped["status"] == "stopped"
    assert stopped["rows"]["done"] == stopped["rows"]["saved"] == running["rows"]["saved"] < COUNT
    assert "no output" in verify_job("run.parquet")["problems"][0]
    flags = {"model": model, "id_column": "id", "pack_tokens": 64, "max_error_rate": 1, "resume": True}
    assert score("in.parquet", "run.parquet", **flags)["exit_code"] == 0
    complete = status_job("run.parquet")
    rows = complete["rows"]
    assert (complete["status"], rows["done"], rows["saved"], rows["total"]) == ("complete", COUNT, COUNT, COUNT)
    assert not Path("run.parquet.prefill/heartbeat.json").exists()


def test_the_pace_and_the_expected_end_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "memory://bucket/pace.parquet"
    store = open_store(url + ".prefill")
    with Heartbeat(store, lambda: Pace(250.0, 1000, 12.5, 60.0), seconds=0.01):
        while store.names() != ["heartbeat.json"]:
            pass
        status = status_job(url)
        assert (status["status"], status["rows"]) == (
            "running",
            {"done": 250, "saved": 0, "errors": 0, "empty": 0, "total": 1000},
        )
        assert status["rows_per_second"] == 12.5
        assert status["expected_end"] > status["updated"]
        assert "250 of 1,000 rows (25.0%), 0 of them saved, 12.5 rows/s, to end about" in capsys.readouterr().err
    assert status_job(url)["status"] == "failed", "it came to its end, and nothing was written"


def test_a_heartbeat_that_cannot_be_written_ends_no_run(
    here: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> str:
        raise OSError("no")

    monkeypatch.setattr("prefillcli.runtime.clock.Progress.pace", lambda self: fails())
    assert score("in.parquet", "q.parquet", model=model, limit=5)["exit_code"] == 0


def test_the_commands_say_it_on_the_last_line_of_stdout(here: Path) -> None:
    for command, state in (("verify", "complete"), ("status", "complete")):
        result = CliRunner().invoke(app, [command, "o.parquet", "--quiet"])
        assert result.exit_code == 0
        assert result.stderr == ""
        assert json.loads(result.stdout)["status"] == state
    Path("o.parquet").write_bytes(b"")
    assert CliRunner().invoke(app, ["verify", "o.parquet"]).exit_code == 1
    unknown = CliRunner().invoke(app, ["status", "nowhere.parquet"])
    assert unknown.exit_code == 2
    assert "no run of prefill is known" in unknown.stderr
