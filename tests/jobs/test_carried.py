"""Rows of a user that a window's end cuts apart: the history is computed once, whatever stops the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefillcli.core.scorer import Granularity
from tests.jobs.jobs import Reference, assert_scored, read_output, read_report, score, write_parquet
from tests.jobs.processes import SMALL, Command, Hold, cut_small_windows

BLOCK = 16
ROWS = 66  # 11 of each user, in windows of 20
ANSWER = "prefillcli.engines.torch:TorchEngine.answer"


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch, block_tokens=BLOCK)


def prompts() -> list[str]:
    histories = [f"Posts of {user * 7919}: {'aBcDeF'[user] * 200}\n" for user in range(6)]
    return [f"{histories[row // 11]}{chr(65 + row % 11)}{row * 31 % 97}: Answer:" for row in range(ROWS)]


def make_input() -> Path:
    return write_parquet("in.parquet", prompt=prompts())


def flags(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": model, "pack_tokens": 300, "memory": "64MiB", **more}


def rows_of(path: str = "out.parquet") -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_output(path)]


def computed_tokens(monkeypatch: pytest.MonkeyPatch, granularity: Granularity, **more: Any) -> dict[str, int]:
    monkeypatch.setattr("tests.jobs.jobs.granularity", granularity)
    assert score("in.parquet", "other.parquet", overwrite=True, report="other.run.json", **more)["exit_code"] == 0
    tokens: dict[str, int] = read_report("other.run.json")["tokens"]
    return tokens


def test_shared_prefixes_are_computed_once_over_the_whole_file(
    model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_input()
    assert score("in.parquet", **flags(model))["exit_code"] == 0
    assert_scored(rows_of(), [reference.answer(prompt) for prompt in prompts()])
    tokens = read_report()["tokens"]
    whole = computed_tokens(monkeypatch, Granularity(), **flags(model))
    apart = computed_tokens(monkeypatch, replace(SMALL, block_tokens=10**6), **flags(model))
    assert round(tokens["computed"] / whole["unique"], 2) == 1.00
    assert round(tokens["computed"] / tokens["unique"], 2) == 1.00
    assert apart["computed"] / whole["unique"] > 1.1
    rows = rows_of()
    assert sum(row["computed_tokens"] for row in rows) == tokens["computed"]
    assert sum(row["shared_tokens"] for row in rows) == tokens["shared"]
    for row in (20, 40, 60):  # the first of a window, with the history of the row before
        assert rows[row]["shared_tokens"] > 50
        assert rows[row]["computed_tokens"] < 50


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run that nothing stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        cut_small_windows(patch, block_tokens=BLOCK)
        make_input()
        assert score("in.parquet", **flags(model))["exit_code"] == 0
        return rows_of()


def command(model: Path, *more: object, hold: Hold) -> Command:
    given = ["-m", model, "--pack-tokens", 300, "--memory", "64MiB", "-o", "out.parquet", *more]
    return Command("score", "in.parquet", *given, hold=hold, block_tokens=BLOCK)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", [1, 12, 27])
def test_resume_after_a_kill_writes_identical_rows(model: Path, whole: list[dict[str, Any]], call: int) -> None:
    make_input()
    held = command(model, hold=Hold(ANSWER, call))
    held.wait_until_held()
    held.kill()
    assert score("in.parquet", resume=True, **flags(model))["exit_code"] == 0
    assert rows_of() == whole


def test_a_window_whose_part_is_lost_is_scored_again_as_before(model: Path, whole: list[dict[str, Any]]) -> None:
    make_input()
    held = command(model, hold=Hold("prefillcli.rows.output.sink:Sink.finish"))
    held.wait_until_held()
    held.kill()
    for window in (1, 2):
        for path in Path("out.parquet.prefill").glob(f"part-{window:06d}-*.parquet"):
            path.unlink()
    assert score("in.parquet", resume=True, **flags(model))["exit_code"] == 0
    assert rows_of() == whole
    tokens = read_report()["tokens"]
    lost = sum(row["computed_tokens"] for row in whole[20:60])
    assert lost + 100 < tokens["computed"] < lost + 250  # and the history that window 1 was given


def test_a_dry_run_plans_what_the_run_computes(model: Path) -> None:
    make_input()
    more = flags(model)
    score("in.parquet", dry_run=True, **more)
    survey = read_report("out.dry-run.json")["survey"]
    own = survey["plan"]
    assert score("in.parquet", **more)["exit_code"] == 0
    report = read_report()
    assert survey["unique_tokens"] == report["tokens"]["unique"]
    assert (own["computed_tokens"], own["packs"]) == (report["tokens"]["computed"], report["packs"])


def test_workers_share_what_windows_hand_on(model: Path) -> None:
    """The same columns as of one process; each worker computes a history at most once more."""
    make_input()
    assert score("in.parquet", **flags(model))["exit_code"] == 0
    one = rows_of()
    assert score("in.parquet", "two.parquet", workers=2, **flags(model))["exit_code"] == 0
    for own, other in zip(rows_of("two.parquet"), one, strict=True):
        assert abs(own.pop("score") - other.pop("score")) < 1e-6
        for name in [name for name, value in other.items() if isinstance(value, float)]:
            assert abs(own.pop(name) - other.pop(name)) < 1e-5
        assert own == other
    alone, together = (read_report(name)["tokens"]["computed"] for name in ("out.run.json", "two.run.json"))
    assert alone <= together < 1.6 * alone


def test_a_star_keeps_all_columns(model: Path) -> None:
    write_parquet("in.parquet", prompt=["A fox", "A dog"], b=[1, 2], a=["x", "y"])
    assert score(Path("in.parquet"), model=model, keep_columns="a,*")["exit_code"] == 0
    (first, second) = read_output("out.parquet")
    assert list(first)[:4] == ["row", "a", "prompt", "b"]
    assert (second["prompt"], second["b"], second["a"]) == ("A dog", 2, "y")
