"""Shards of a job, scored apart and merged: the output is the one that one process writes, whatever is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from prefillcli.options.commands import MergeSettings
from prefillcli.options.load import load_settings
from prefillcli.rows.output.destination import Destination
from prefillcli.rows.output.shards import shards_beside
from prefillcli.rows.output.store import LOCK, open_store
from prefillcli.tools.merge import merge_job
from prefillcli.tools.status import status_job
from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows
from tests.unit.rows.test_partitions import write

ROWS = 70
ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
REPLACE = "prefillcli.runtime.file_calls:replace_file"
#: What may differ: a prefix that rows of two shards share is computed by both.
SHARED = ("seconds", "shared_tokens", "computed_tokens")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def make_input(kind: str = "parquet") -> str:
    """Rows of which some are errors, some equal, and one has the id of another."""
    prompts: list[str | None] = [*texts(ROWS - 5), None, *texts(2), "", "fox"]
    ids = [f"r{i}" if i != 60 else "r3" for i in range(ROWS)]
    if kind == "parquet":
        return str(write_parquet("in.parquet", prompt=prompts, id=ids, kept=list(range(ROWS))))
    rows = [{"prompt": p, "id": i, "kept": [i]} for p, i in zip(prompts, ids, strict=True)]
    return str(write_jsonl("in.jsonl", rows))


def flags(model: Path, **more: Any) -> dict[str, Any]:
    given = {"model": model, "id_column": "id", "keep_columns": ("kept",), "pack_tokens": 64, "max_error_rate": 0.5}
    return given | {"memory": "64MiB"} | more


def shards(inputs: str | Sequence[str], count: int, output: str = "out.parquet", **options: Any) -> list[dict]:
    done = [score(inputs, output, shard=f"{number + 1}/{count}", **options) for number in range(count)]
    assert {each["exit_code"] for each in done} == {0}
    return done


def merge(output: str = "out.parquet", **more: Any) -> dict[str, Any]:
    given = {"output": output, "quiet": True, "max_error_rate": 0.5, **more}
    return merge_job(load_settings(MergeSettings, given, environment={}))


def folder(number: int, count: int = 2, output: str = "out.parquet") -> Path:
    return Path(f"{output}.shard-{number}-of-{count}.prefill")


def left() -> list[str]:
    """Files and folders of shards, but for their reports."""
    return [path.name for path in Path().glob("*.shard-*") if not path.name.endswith((".run.json", ".run.html"))]


def assert_same(rows: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """The same rows in the same order, and the same scores."""
    assert len(rows) == len(whole) > 0
    for row, wanted in zip(rows, whole, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            if name not in SHARED:
                close = 1e-5 if name.startswith("logprob_") else 1e-6  # -6 in float32 has steps of 5e-7
                assert row[name] == (pytest.approx(value, abs=close) if isinstance(value, float) else value), name


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        cut_small_windows(patch)
        assert score(make_input(), **flags(model))["exit_code"] == 0
        return read_output("out.parquet")


# ------------------------------------------------------------------------------------------------- the same output


@pytest.mark.sampled(2)
@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl", "out.jsonl.gz", "parts/"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_shards_merged_are_the_output_of_one_process(model: Path, output: str, kind: str) -> None:
    path = make_input(kind)
    alone = f"alone{'/' if output == 'parts/' else output.removeprefix('out')}"
    assert score(path, alone, **flags(model))["exit_code"] == 0
    done = shards(path, 3, output, **flags(model))
    assert all(each["rows"]["total"] > 0 for each in done)
    assert sum(each["rows"]["total"] for each in done) == ROWS
    assert not Path(output).exists()
    merged = merge(output)
    assert merged["exit_code"] == 0, merged
    assert_same(read_output(output), read_output(alone))
    if output in ("out.parquet", "parts/"):
        assert ds.dataset(output).schema.equals(ds.dataset(alone).schema)
    assert left() == []

    report = read_report(merged["report"])
    before = read_report("alone.run.json")
    assert report["shards"] == 3
    assert report["fingerprint"] == before["fingerprint"]
    for key in ("rows", "methods", "histograms", "failed"):
        assert report[key] == before[key], key
    assert report["mean_score"] == pytest.approx(before["mean_score"])

    verified = verify_job(output, [path])
    assert (verified["exit_code"], verified["problems"]) == (0, [])
    again = score(path, output, resume=True, **flags(model))
    assert (again["exit_code"], again["rows"]) == (0, merged["rows"])
    assert read_report(again["report"])["tokens"]["prompt"] == 0


@pytest.mark.parametrize("count", [1, 5])
def test_any_number_of_shards_will_do(model: Path, whole: list[dict[str, Any]], count: int) -> None:
    shards(make_input(), count, **flags(model))
    assert merge()["exit_code"] == 0
    assert_same(read_output("out.parquet"), whole)


def test_more_shards_than_rows_leave_some_without_which_is_no_empty_night(model: Path) -> None:
    write_parquet("in.parquet", prompt=texts(3))
    done = shards("in.parquet", 5, model=model, skip_empty=True)
    assert sorted(each["rows"]["total"] for each in done) == [0, 0, 1, 1, 1]
    assert merge()["rows"]["scored"] == 3


def test_an_empty_input_is_an_empty_output_or_nothing_to_do(model: Path) -> None:
    write_parquet("in.parquet", prompt=pa.array([], pa.string()))
    for skip, code in ((False, 1), (True, 99)):
        for number in (1, 2):
            done = score("in.parquet", shard=f"{number}/2", model=model, resume=True, skip_empty=skip)
            assert done["exit_code"] == code
    assert "the input has no rows" in merge()["error"]
    merged = merge(skip_empty=True)
    assert (merged["exit_code"], merged["rows"]["total"]) == (99, 0)
    assert pq.read_schema("out.parquet").names[:2] == ["row", "score"]


@pytest.mark.parametrize("choice", [{"limit": 33}, {"sample": 25, "seed": 4}])
def test_a_choice_of_rows_is_dealt(model: Path, choice: dict[str, int]) -> None:
    path = make_input()
    assert score(path, "alone.parquet", **flags(model, **choice))["exit_code"] == 0
    shards(path, 2, **flags(model, **choice))
    assert merge()["exit_code"] == 0
    assert_same(read_output("out.parquet"), read_output("alone.parquet"))
    assert verify_job("out.parquet", [path])["problems"] == []


def test_partitioned_folders_come_back(model: Path) -> None:
    write(Path("in"), "parquet", [("day=1",), ("day=2", "x=a"), ("day=10",)])
    options: dict[str, Any] = {"model": model, "partition": True}
    assert score("in", "alone/", **options)["exit_code"] == 0
    shards("in", 2, "out/", **options)
    assert merge("out/")["exit_code"] == 0
    alone, merged = (
        ds.dataset(name, format="parquet", partitioning="hive").to_table().sort_by("row").to_pylist()
        for name in ("alone", "out")
    )
    assert_same(merged, alone)
    files = [{str(path.relative_to(name)) for path in Path(name).rglob("*.parquet")} for name in ("alone", "out")]
    assert files[0] == files[1]


def test_objects_of_a_store_are_merged(model: Path, whole: list[dict[str, Any]]) -> None:
    output = "memory://shards/out.parquet"
    path = make_input()
    shards(path, 2, output, **flags(model, report="run.json"))
    assert Path("run.shard-1-of-2.json").exists()
    assert merge(output, report="run.json")["exit_code"] == 0
    with open_store("memory://shards").read("out.parquet") as file:
        assert_same(pq.read_table(pa.BufferReader(file.read())).to_pylist(), whole)
    assert shards_beside(Destination.parse(output)) == []
    assert merge(output, report="run.json")["exit_code"] == 0


@pytest.mark.parametrize("text", ["0/2", "3/2", "a/b"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="must be I/N"):
        score("in.parquet", shard=text)


# ------------------------------------------------------------------------------------------------------ shard runs


def arguments(model: Path, shard: str, *more: str) -> list[object]:
    given = ["--id-column", "id", "--keep-columns", "kept", "--pack-tokens", 64, "--memory", "64MiB"]
    return ["score", "in.parquet", "-m", model, *given, "-o", "out.parquet", "--shard", shard, *more]


#: Where a shard is killed.
KILLED = {
    "before the first pack": Hold(ANSWER, 1),
    "later": Hold(ANSWER, 7),
    "a part half written": Hold(REPLACE, 3, ".parquet"),
    "before the end": Hold("prefillcli.rows.output.shards:ShardSink.finish"),
    "at the end": Hold(REPLACE, 3, "manifest.json"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hold", KILLED.values(), ids=KILLED)
def test_a_killed_shard_goes_on_and_loses_no_row(model: Path, whole: list[dict[str, Any]], hold: Hold) -> None:
    make_input()
    held = Command(*arguments(model, "1/2"), hold=hold)
    held.wait_until_held()
    assert merge()["exit_code"] in (1, 2)  # the second is not there
    score("in.parquet", shard="2/2", **flags(model))
    assert merge()["exit_code"] == 5  # the first is running
    held.kill()
    refused = merge()
    assert refused["exit_code"] == 1
    assert "shard 1 of 2 of" in refused["error"]
    assert score("in.parquet", shard="1/2", resume=True, **flags(model))["exit_code"] == 0
    assert merge()["exit_code"] == 0
    assert_same(read_output("out.parquet"), whole)


def test_a_shard_is_begun_gone_on_with_or_begun_anew_as_a_job_is(model: Path) -> None:
    path = make_input()
    first = shards(path, 2, **flags(model))[0]
    assert score(path, shard="1/2", **flags(model))["exit_code"] == 2
    again = score(path, shard="1/2", resume=True, **flags(model))
    assert (again["exit_code"], again["rows"]) == (0, first["rows"])
    assert read_report("out.shard-1-of-2.run.json")["tokens"]["prompt"] == 0
    other = flags(model, temperature=2.0)
    assert score(path, shard="1/2", resume=True, **other)["exit_code"] == 4
    assert score(path, shard="1/2", overwrite=True, **other)["exit_code"] == 0
    refused = merge()
    assert refused["exit_code"] == 4
    assert "different settings" in refused["error"]
    assert refused["report"] == "out.run.json", "there is no output that another one tells of"


def test_when_the_shards_are_merged_their_lines_find_the_job_complete(model: Path) -> None:
    path = make_input()
    shards(path, 2, **flags(model))
    merged = merge()
    for number in (1, 2):
        again = score(path, shard=f"{number}/2", resume=True, **flags(model))
        assert (again["exit_code"], again["output"], again["rows"]) == (0, "out.parquet", merged["rows"])
        assert score(path, shard=f"{number}/2", **flags(model))["exit_code"] == 2
        assert score(path, shard=f"{number}/2", resume=True, **flags(model, temperature=2.0))["exit_code"] == 4
    again = merge()
    assert (again["exit_code"], again["rows"]) == (0, merged["rows"])
    assert left() == []
    data = bytearray(Path("out.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    Path("out.parquet").write_bytes(data)
    assert merge()["exit_code"] == 4
    assert score(path, shard="1/2", resume=True, **flags(model))["exit_code"] == 4


def test_a_part_that_is_lost_or_damaged_is_scored_again(model: Path, whole: list[dict[str, Any]]) -> None:
    path = make_input()
    shards(path, 2, **flags(model))
    lost, damaged = sorted(folder(1).glob("part-*"))[0], sorted(folder(2).glob("part-*"))[1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    refused = merge()
    assert refused["exit_code"] == 1
    assert "--shard 2/2 --resume" in refused["error"]
    lost.unlink()
    assert "every row of window 0" in merge()["error"]
    assert not Path("out.parquet").exists()
    for number in (1, 2):
        assert score(path, shard=f"{number}/2", resume=True, **flags(model))["exit_code"] == 0
        assert read_report(f"out.shard-{number}-of-2.run.json")["tokens"]["prompt"] > 0
    assert merge()["exit_code"] == 0
    assert_same(read_output("out.parquet"), whole)


def test_a_manifest_that_is_damaged_is_made_again(model: Path, whole: list[dict[str, Any]]) -> None:
    path = make_input()
    shards(path, 2, **flags(model))
    (folder(1) / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in merge()["error"]
    assert score(path, shard="1/2", resume=True, **flags(model))["exit_code"] == 0
    assert read_report("out.shard-1-of-2.run.json")["tokens"]["prompt"] == 0
    assert merge()["exit_code"] == 0
    assert_same(read_output("out.parquet"), whole)


def test_a_shards_part_in_another_shards_folder_is_not_taken(model: Path, whole: list[dict[str, Any]]) -> None:
    path = make_input()
    shards(path, 2, **flags(model))
    for part in folder(1).glob("part-000001-*"):
        shutil.copy(part, folder(2) / part.name)
    refused = merge()
    assert "belongs to another job or shard" in refused["error"]
    assert score(path, shard="2/2", resume=True, **flags(model))["exit_code"] == 0
    assert merge()["exit_code"] == 0
    assert_same(read_output("out.parquet"), whole)


def test_error_rows_are_judged_for_the_whole(model: Path) -> None:
    path = make_input()
    options = flags(model, max_error_rate=0.0)
    shards(path, 2, **options)
    merged = merge(max_error_rate=0.0)
    assert (merged["exit_code"], merged["rows"]["errors"], merged["rows"]["empty"]) == (3, 1, 2)
    assert merge(max_error_rate=0.05)["exit_code"] == 0


def test_a_merge_that_is_not_told_otherwise_allows_the_errors_that_its_shards_allow(model: Path) -> None:
    path = make_input()
    shards(path, 2, **flags(model, max_error_rate=0.05))
    told_nothing = load_settings(MergeSettings, {"output": "out.parquet", "quiet": True}, environment={})
    assert merge_job(told_nothing)["exit_code"] == 0
    assert merge_job(told_nothing)["exit_code"] == 0, "the merge that was made before"
    assert merge(max_error_rate=0.0)["exit_code"] == 3


# ------------------------------------------------------------------------------------------------------------ merge


def test_what_is_missing_or_doubled_is_refused(model: Path) -> None:
    path = make_input()
    assert merge()["exit_code"] == 2
    assert "no shards of" in merge()["error"]
    shards(path, 3, **flags(model))
    shutil.move(folder(2, 3), "elsewhere")
    refused = merge()
    assert refused["exit_code"] == 1
    assert "shard 2 of 3 of" in refused["error"]
    shutil.copytree(folder(3, 3), folder(2, 3))
    assert "is a copy of shard 3/3" in merge()["error"]
    shutil.rmtree(folder(2, 3))
    shutil.move("elsewhere", folder(2, 3))
    score(path, shard="1/2", **flags(model))
    refused = merge()
    assert refused["exit_code"] == 2
    assert "shards of 2 and 3" in refused["error"]
    shutil.rmtree(folder(1, 2))
    assert not Path("out.parquet").exists()
    assert merge()["exit_code"] == 0


def test_an_output_that_is_there_is_replaced_only_when_asked(model: Path, whole: list[dict[str, Any]]) -> None:
    path = make_input()
    assert score(path, **flags(model))["exit_code"] == 0
    shards(path, 2, overwrite=True, **flags(model))
    refused = merge()
    assert (refused["exit_code"], refused["report"]) == (2, None)
    assert merge(overwrite=True)["exit_code"] == 0
    assert_same(read_output("out.parquet"), whole)
    assert score(path, overwrite=True, **flags(model, temperature=2.0))["exit_code"] == 0
    shards(path, 2, overwrite=True, **flags(model))
    assert merge()["exit_code"] == 4
    assert merge(overwrite=True)["exit_code"] == 0
    assert_same(read_output("out.parquet"), whole)


def test_shards_that_were_scored_again_are_not_taken_for_those_that_were_merged(model: Path) -> None:
    path = make_input()
    shards(path, 2, **flags(model))
    assert merge()["exit_code"] == 0
    shards(path, 2, overwrite=True, **flags(model))
    assert merge()["exit_code"] == 2
    assert len(left()) == 2
    assert merge(overwrite=True)["exit_code"] == 0


#: Where a merge is killed.
KILLED_MERGE = {
    "before anything is written": Hold("prefillcli.rows.output.shards:JoinedShards.check"),
    "the output half written": Hold(REPLACE, 1, "/out.parquet"),
    "the output there, but not marked": Hold("prefillcli.rows.output.sink:Manifest.save", 2),
    "before the shards are removed": Hold("prefillcli.rows.output.shards:ShardFolder.delete", 1),
    "one shard removed": Hold("prefillcli.rows.output.shards:ShardFolder.delete", 2),
    "before a part is removed": Hold("prefillcli.runtime.file_calls:remove_file", 1, ".parquet"),
    "the second shard without parts": Hold("prefillcli.runtime.file_calls:remove_file", 2, "manifest.json"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hold", KILLED_MERGE.values(), ids=KILLED_MERGE)
def test_a_killed_merge_is_merged_again(model: Path, whole: list[dict[str, Any]], hold: Hold) -> None:
    shards(make_input(), 2, **flags(model))
    held = Command("merge", "out.parquet", "--max-error-rate", 0.5, hold=hold)
    held.wait_until_held()
    busy = merge()
    assert busy["exit_code"] == 5
    assert busy["report"] is None
    held.kill()
    merged = merge()
    assert merged["exit_code"] == 0, merged
    assert_same(read_output("out.parquet"), whole)
    assert left() == []
    assert not list(Path().rglob("*.prefill-tmp"))
    assert verify_job("out.parquet", ["in.parquet"])["problems"] == []


def test_a_folder_killed_while_it_is_published_is_merged_again(model: Path) -> None:
    path = make_input()
    shards(path, 2, "out/", **flags(model))
    held = Command("merge", "out/", hold=Hold("prefillcli.rows.output.publication:os.rename", 1))
    held.wait_until_held()
    held.kill()
    assert merge("out/")["exit_code"] == 0
    assert verify_job("out/", [path])["problems"] == []
    assert left() == []


def test_a_part_that_changes_after_the_check_ends_the_merge(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.rows.output.shards import JoinedShards

    shards(make_input(), 2, **flags(model))
    check = JoinedShards.check

    def then_changed(joined: JoinedShards) -> None:
        check(joined)
        part, others = (min(folder(number).glob("part-*")) for number in (2, 1))
        part.write_bytes(others.read_bytes())  # whole, but it holds other rows

    monkeypatch.setattr(JoinedShards, "check", then_changed)
    assert merge()["exit_code"] == 1
    assert not Path("out.parquet").exists()


def test_the_lock_of_a_folder_that_was_removed_is_taken_anew(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "work"))
    first = store.lock()
    handle = os.open(tmp_path / "work" / LOCK, os.O_RDWR)  # as another process that waits
    store.remove()
    first.release()
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = store.lock()
    assert second.stands
    second.release()
    os.close(handle)


# ----------------------------------------------------------------------------------------------- reports and status


def test_the_report_of_a_shard_is_of_its_rows(model: Path) -> None:
    path = make_input()
    done = shards(path, 2, **flags(model))
    for number, summary in enumerate(done, 1):
        report = read_report(f"out.shard-{number}-of-2.run.json")
        assert report["shard"] == f"{number}/2"
        assert report["output"] == summary["output"] == str(folder(number).absolute())
        assert report["rows"] == summary["rows"]
        assert Path(f"out.shard-{number}-of-2.run.html").exists()
    assert not Path("out.run.json").exists()


def test_status_knows_every_shard(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_input()
    assert status_job("out.parquet")["exit_code"] == 2
    score("in.parquet", shard="2/2", **flags(model))
    held = Command(*arguments(model, "1/2"), hold=Hold(ANSWER, 7))
    held.wait_until_held()
    found = status_job("out.parquet")
    assert (found["status"], [each["status"] for each in found["shards"]]) == ("running", ["running", "complete"])
    held.kill()
    found = status_job("out.parquet")
    assert found["status"] == "stopped"
    assert found["rows"]["done"] == sum(each["rows"]["done"] for each in found["shards"]) > 0
    score("in.parquet", shard="1/2", resume=True, **flags(model))
    found = status_job("out.parquet")
    assert (found["status"], found["rows"]) == (
        "unmerged",
        {"done": ROWS, "saved": ROWS, "errors": 1, "empty": 2, "total": ROWS},
    )
    said = capsys.readouterr().err
    assert "are to be joined with prefill merge" in said
    assert "\nshard 1/2 is complete: " in said
    merge()
    found = status_job("out.parquet")
    assert (found["status"], found["shards"], found["rows"]["total"]) == ("complete", [], ROWS)


def test_a_dry_run_plans_what_the_shard_computes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_input()
    for number in (1, 2):
        options = flags(model, shard=f"{number}/2")
        done = score(path, dry_run=True, **options)
        assert done["exit_code"] == 0
        survey = read_report(f"out.shard-{number}-of-2.dry-run.json")["survey"]
        own = survey["plan"]
        assert score(path, **options)["exit_code"] == 0
        report = read_report(f"out.shard-{number}-of-2.run.json")
        assert (own["computed_tokens"], own["packs"]) == (report["tokens"]["computed"], report["packs"])
        assert survey["rows"]["total"] == report["rows"]["total"]
