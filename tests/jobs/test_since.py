"""Rows that last night's output has are taken over as they are; only new and changed ones are scored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from prefillcli.engines.torch import TorchEngine
from prefillcli.errors import Interrupted
from prefillcli.rows.output.destination import Manifest, with_checksum
from prefillcli.rows.output.parts import DigestReader, RowDigests
from prefillcli.rows.output.store import open_store
from prefillcli.rows.records import Prompt
from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import (
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_shards import merge

ROWS = 50
CHANGED, NEW = "r7", ("new0", "new1")
RESULTS = ("score", "logprob_Yes", "logprob_No", "label_mass", "seconds", "shared_tokens", "computed_tokens", "method")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def flags(model: Path, **more: Any) -> dict[str, Any]:
    given = {"model": model, "id_column": "id", "keep_columns": ("night",), "pack_tokens": 64, "max_error_rate": 0.5}
    return given | {"memory": "64MiB"} | more


def nights() -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Prompts by id: of last night, and of tonight in another order, with new and changed rows, and without some."""
    first: dict[str, str | None] = dict(zip((f"r{i}" for i in range(ROWS)), texts(ROWS), strict=True))
    first["r9"] = None
    second: dict[str, str | None] = {NEW[0]: "new\nAnswer:"}
    second |= {name: first[name] for name in reversed(first) if name not in ("r3", "r4")}
    second |= {CHANGED: "changed\nAnswer:", NEW[1]: "new\nAnswer:", "r9": "mended\nAnswer:"}
    return first, second


def write_night(number: int, kind: str = "parquet") -> str:
    prompts = nights()[number]
    if kind == "jsonl":
        rows = [{"id": name, "prompt": prompt, "night": number} for name, prompt in prompts.items()]
        return str(write_jsonl(f"in{number}.jsonl", rows))
    named = {"id": list(prompts), "prompt": list(prompts.values()), "night": [number] * len(prompts)}
    return str(write_parquet(f"in{number}.parquet", **named))


def by_id(path: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read_output(path)}


@pytest.fixture(scope="module")
def last(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with last night's output."""
    folder = tmp_path_factory.mktemp("last")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cut_small_windows(patch)
        assert score(write_night(0), "last.parquet", **flags(model))["exit_code"] == 0
    return folder


@pytest.fixture
def since(last: Path, tmp_path: Path) -> str:
    """Last night's output, in the folder of the test."""
    shutil.copytree(last, tmp_path, dirs_exist_ok=True)
    return "last.parquet"


@pytest.fixture
def read_prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prompts that the engine reads, as it goes."""
    answer, read = TorchEngine.answer, []

    def noting(self: TorchEngine, pack: Any, *rest: Any) -> Any:
        read.extend(len(pack.prompts) * [len(pack.tokens)])
        return answer(self, pack, *rest)

    monkeypatch.setattr(TorchEngine, "answer", noting)
    return read


def assert_second_night(output: str, reference: Reference) -> None:
    """Tonight's rows in tonight's order: those of last night bit for bit, and the others as the model scores them."""
    before, rows = by_id("last.parquet"), by_id(output)
    prompts = nights()[1]
    assert list(rows) == list(prompts)
    scored_now = [CHANGED, *NEW, "r9"]
    for name, row in rows.items():
        assert row["night"] == 1
        if name not in scored_now:
            assert {each: row[each] for each in RESULTS} == {each: before[name][each] for each in RESULTS}
    assert_scored([rows[name] for name in scored_now], [reference.answer(prompts[name] or "") for name in scored_now])


# ------------------------------------------------------------------------------------------------------ what is scored


@pytest.mark.parametrize(("kind", "output"), [("parquet", "out.parquet"), ("jsonl", "out.jsonl"), ("parquet", "out/")])
def test_only_new_and_changed_rows_are_scored(
    model: Path, reference: Reference, since: str, read_prompts: list[int], kind: str, output: str
) -> None:
    summary = score(write_night(1, kind), output, since=since, **flags(model))
    assert summary["exit_code"] == 0
    assert summary["since"] == {"rows": len(nights()[1]) - 4}
    assert_second_night(output, reference)
    assert len(read_prompts) == 4
    assert read_report()["since"] == {"output": since, "rows": len(nights()[1]) - 4, "reason": None}
    assert read_report()["tokens"]["prompt"] == sum(
        row["prompt_tokens"] for name, row in by_id(output).items() if name in (CHANGED, *NEW, "r9")
    )
    assert verify_job(output, [write_night(1, kind)], quiet=True)["exit_code"] == 0


@pytest.mark.parametrize("output", ["between.jsonl.gz", "folder/", "memory://since/last.parquet"])
def test_the_earlier_output_may_have_any_format_and_each_night_follows_the_one_before(
    model: Path, reference: Reference, since: str, read_prompts: list[int], output: str
) -> None:
    assert score(write_night(0), output, since=since, **flags(model))["since"]["rows"] == ROWS - 1
    assert read_prompts == []
    assert score(write_night(1), since=output, **flags(model))["since"]["rows"] == len(nights()[1]) - 4
    assert_second_night("out.parquet", reference)


def test_a_night_without_changes_loads_no_model(model: Path, since: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("prefillcli.scoring.scorer.load_models", load)
    summary = score("in0.parquet", since=since, **flags(model))
    assert summary["exit_code"] == 0
    assert pq.read_table("out.parquet").equals(pq.read_table(since))


def test_rows_without_ids_go_by_their_number(model: Path) -> None:
    plain = flags(model, id_column=None, keep_columns=())
    write_parquet("a.parquet", prompt=texts(10))
    write_parquet("b.parquet", prompt=[*texts(5), *texts(12)[6:]])  # the sixth is gone: the others move up
    assert score("a.parquet", "a.scores.parquet", **plain)["exit_code"] == 0
    assert score("b.parquet", since="a.scores.parquet", **plain)["since"] == {"rows": 5}


def test_what_a_row_says_of_itself_beside_its_prompt_counts_too(model: Path, draft: Path) -> None:
    given = {"draft": draft, "keep": 0.5, "compress_above": 4, "compress_per_row": True, "keep_private": False}
    given |= {"keep_last": 4, "select_chunk": 4, "lookahead": 1}
    columns = {"id": list("abc"), "prompt": texts(3), "night": [0, 0, 0]}
    write_parquet("a.parquet", **columns, keep=[None, 0.5, 0.5])
    write_parquet("b.parquet", **columns, keep=[None, 0.5, 1.0])
    assert score("a.parquet", "a.scores.parquet", **flags(model, **given))["exit_code"] == 0
    assert score("b.parquet", since="a.scores.parquet", **flags(model, **given))["since"] == {"rows": 2}


def test_a_kept_column_by_which_rows_are_chosen_counts_too(model: Path) -> None:
    given = {"rationale": 2, "rationale_when": "night == 1"}
    columns = {"id": list("abc"), "prompt": texts(3)}
    write_parquet("a.parquet", **columns, night=[0, 1, 1])
    write_parquet("b.parquet", **columns, night=[1, 1, 0])
    assert score("a.parquet", "a.scores.parquet", **flags(model, **given))["exit_code"] == 0
    assert score("b.parquet", since="a.scores.parquet", **flags(model, **given))["since"] == {"rows": 1}
    rows, before = by_id("out.parquet"), by_id("a.scores.parquet")
    assert [rows[name]["finish_reason"] is not None for name in "abc"] == [True, True, False]
    assert rows["b"] == before["b"]


# ------------------------------------------------------------------------------------------- stopped, shared, replaced


def stop_at_pack(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The engine is interrupted at its `number`th pack."""
    answer, packs = TorchEngine.answer, []

    def stopping(self: TorchEngine, pack: Any, *rest: Any) -> Any:
        packs.append(pack)
        if len(packs) == number:
            raise Interrupted(15)
        return answer(self, pack, *rest)

    monkeypatch.setattr(TorchEngine, "answer", stopping)


def test_a_stopped_night_goes_on_with_and_without_last_nights_rows(
    model: Path, reference: Reference, since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = flags(model, threads=1)
    assert score(write_night(1), "whole.parquet", since=since, **given)["exit_code"] == 0
    for output, again in (("with.parquet", {"since": since}), ("without.parquet", {})):
        with monkeypatch.context() as patch:
            stop_at_pack(patch, 2)
            assert score("in1.parquet", output, since=since, **given)["exit_code"] == 143
        summary = score("in1.parquet", output, resume=True, **again, **given)
        assert summary["exit_code"] == 0
        assert_second_night(output, reference) if again else None
    whole = [{**row, "seconds": None} for row in read_output("whole.parquet") if row["id"] in (CHANGED, *NEW, "r9")]
    found = by_id("with.parquet")
    assert [{**found[row["id"]], "seconds": None} for row in whole] == whole
    alone = by_id("without.parquet")
    assert list(alone) == list(nights()[1])
    for row in read_output("whole.parquet"):
        assert alone[row["id"]]["score"] == pytest.approx(row["score"], abs=1e-5)


def test_shards_take_rows_over_and_the_merge_counts_them(model: Path, reference: Reference, since: str) -> None:
    night = write_night(1)
    done = [score(night, shard=f"{number}/2", since=since, **flags(model)) for number in (1, 2)]
    summary = merge()
    assert summary["exit_code"] == 0
    assert summary["since"]["rows"] == sum(each["since"]["rows"] for each in done) == len(nights()[1]) - 4
    assert_second_night("out.parquet", reference)
    assert score("in0.parquet", "next.parquet", since="out.parquet", **flags(model))["since"]["rows"] > ROWS - 8


def test_an_output_may_replace_itself_and_a_stopped_run_still_finds_it(
    model: Path, reference: Reference, since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_night(1)
    shutil.copytree("last.parquet.prefill", "rolling.parquet.prefill")
    shutil.copy(since, "rolling.parquet")
    manifest = Path("rolling.parquet.prefill/manifest.json")
    text = json.loads(manifest.read_text())
    text["files"] = {"rolling.parquet": text["files"]["last.parquet"]}
    del text["checksum"]
    manifest.write_bytes(with_checksum(text))
    given = flags(model, since="rolling.parquet")
    with monkeypatch.context() as patch:
        stop_at_pack(patch, 1)
        assert score("in1.parquet", "rolling.parquet", overwrite=True, **given)["exit_code"] == 143
    summary = score("in1.parquet", "rolling.parquet", resume=True, **given)
    assert (summary["exit_code"], summary["since"]["rows"]) == (0, len(nights()[1]) - 4)
    assert_second_night("rolling.parquet", reference)


# ----------------------------------------------------------------------------------------------------- what is refused


def test_an_output_that_is_not_there_is_no_error_on_the_first_night(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = score(write_night(0), since="nowhere.parquet", **flags(model))
    assert (summary["exit_code"], summary["since"]) == (0, {"rows": 0})
    assert "nowhere.parquet: there is no such output; all rows are scored" in capfd.readouterr().err
    assert read_report()["since"]["reason"] == "there is no such output"
    shutil.rmtree("out.parquet.prefill")
    assert score(write_night(0), "next.parquet", since="out.parquet", **flags(model))["since"] == {"rows": 0}
    assert ", which has the digests of its rows, is missing" in capfd.readouterr().err
    store = open_store("next.parquet.prefill")
    manifest = Manifest.load(store)
    assert manifest is not None
    manifest.digests = None
    manifest.save(store)
    assert score(write_night(0), "third.parquet", since="next.parquet", **flags(model))["since"] == {"rows": 0}
    assert "its work folder was lost, and with it the digests of its rows" in capfd.readouterr().err


@pytest.mark.parametrize("other", ["model", "labels"])
def test_an_output_of_another_job_is_refused_before_anything_is_written(
    model: Path, draft: Path, since: str, other: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"labels": "Yes,No,Maybe"} if other == "labels" else {"model": draft}
    assert score(write_night(1), since=since, **(flags(model) | given))["exit_code"] == 4
    assert f"last.parquet was written by another job: different {other}" in capfd.readouterr().err
    assert not list(Path().glob("out.parquet*"))


@pytest.mark.parametrize("name", ["last.parquet", "last.parquet.prefill/row-digests.bin"])
def test_an_output_that_was_changed_is_refused(
    model: Path, since: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(Path(name).read_bytes())
    content[len(content) // 2] ^= 1
    Path(name).write_bytes(content)
    assert score(write_night(1), since=since, **flags(model))["exit_code"] == 4
    assert f"{name} is not as it was written" in capfd.readouterr().err


def test_an_output_that_another_run_replaces_while_it_is_read_is_refused(
    model: Path, since: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    finish = DigestReader.finish

    def finishing(self: DigestReader, digest: str) -> None:
        finish(self, digest)
        store = open_store("last.parquet.prefill")
        manifest = Manifest.load(store)
        assert manifest is not None
        Manifest(manifest.job, {}).save(store)  # as a run with --overwrite begins

    monkeypatch.setattr(DigestReader, "finish", finishing)
    assert score(write_night(1), since=since, **flags(model))["exit_code"] == 4
    assert "another run has replaced it" in capfd.readouterr().err


def test_digests_that_collide_take_over_no_wrong_row(
    model: Path, reference: Reference, since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a digest finds a row; the whole one decides."""
    digest = RowDigests._of

    def changed(self: RowDigests, prompt: Prompt, own: Any) -> bytes:
        found = digest(self, prompt, own)
        return found if prompt.row else found[:8] + bytes(8)

    monkeypatch.setattr(RowDigests, "_of", changed)
    summary = score("in0.parquet", since=since, **flags(model))
    assert summary["since"]["rows"] == ROWS - 2  # the first row, and the one without a prompt
    assert_scored([by_id("out.parquet")["r0"]], [reference.answer(nights()[0]["r0"] or "")])
