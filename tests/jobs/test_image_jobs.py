"""Jobs over rows with images have the answers of transformers' whole forward, however they run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.image_rows import BROKEN, COLUMNS, LABELS, ROWS, Whole, write_rows
from tests.jobs.jobs import TOLERANCE, read_output, read_report, score
from tests.jobs.processes import Command, Hold, cut_small_windows
from tests.jobs.test_shards import assert_same, merge

ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
#: One whose images are read in tiles, and with positions in three axes, features in early layers, and attention both ways.
FAMILIES = ("smolvlm", "qwen2_vl", "qwen3_vl", "gemma3")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


@pytest.fixture(
    scope="module",
    params=[each if each == "smolvlm" else pytest.param(each, marks=pytest.mark.nightly) for each in FAMILIES],
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole("smolvlm", tmp_path_factory.mktemp("models") / "smolvlm")


def flags(whole: Whole, **more: Any) -> dict[str, Any]:
    given = {"model": whole.folder, "id_column": "id", "image_column": COLUMNS, "labels": ",".join(LABELS)}
    return given | {"max_error_rate": 0.5, "memory": "256MiB"} | more


def words(whole: Whole, *more: object) -> list[object]:
    """The same for a command."""
    columns = [f"--image-column={name}" for name in COLUMNS]
    given = ["--id-column", "id", *columns, "--labels", ",".join(LABELS), "--max-error-rate", 0.5]
    return ["score", "in.parquet", "-m", whole.folder, *given, "--pack-tokens", 200, "-o", "out.parquet", *more]


def assert_answered(rows: Sequence[dict[str, Any]], whole: Whole, tolerance: float = TOLERANCE) -> None:
    """All rows have the reference's answers, but for those that are broken."""
    assert sorted(row["id"] for row in rows) == sorted(f"r{row}" for row in range(ROWS))
    for row in rows:
        broken = BROKEN.get(int(row["id"][1:]))
        if broken is not None:
            assert row["error"] == "invalid_image"
            assert f"column {broken}: " in row["error_detail"]
            continue
        assert row["error"] is None, row["error_detail"]
        answer = whole.answers[row["id"]]
        assert row["score"] == pytest.approx(answer.score, abs=tolerance)
        assert row["label_mass"] == pytest.approx(answer.label_mass, abs=tolerance)
        assert row["prompt_tokens"] == answer.prompt_tokens
    spread = [answer.score for answer in whole.answers.values()]
    assert max(spread) - min(spread) > 0.05


def test_a_job_has_the_answers_of_the_whole_model(whole: Whole) -> None:
    assert score(write_rows(), **flags(whole))["exit_code"] == 0
    assert_answered(read_output("out.parquet"), whole)
    report = read_report()
    assert report["rows"]["errors_by_code"] == {"invalid_image": len(BROKEN)}
    assert report["tokens"]["computed"] < report["tokens"]["prompt"]


def merged(whole: Whole) -> list[dict[str, Any]]:
    for number in (1, 2):
        assert score("in.parquet", "shards.parquet", shard=f"{number}/2", **flags(whole))["exit_code"] == 0
    assert merge("shards.parquet")["exit_code"] == 0
    return read_output("shards.parquet")


def stopped(signum: int, *more: object, **options: Any) -> Callable[[Whole], list[dict[str, Any]]]:
    """A job that is ended by a signal in its third pack, and goes on."""

    def run(whole: Whole) -> list[dict[str, Any]]:
        command = Command(*words(whole, *more), hold=Hold(ANSWER, 3), grace_seconds=0.2)
        command.wait_until_held()
        if signum == signal.SIGKILL:
            command.kill()
        else:
            command.send(signum)
            assert command.end() == 128 + signum, command.stderr
        assert score("in.parquet", resume=True, **flags(whole, pack_tokens=200, **options))["exit_code"] == 0
        return read_output("out.parquet")

    return run


def job(**more: Any) -> Callable[[Whole], list[dict[str, Any]]]:
    def run(whole: Whole) -> list[dict[str, Any]]:
        summary = score("in.parquet", **flags(whole, **more))
        assert summary["exit_code"] == 0, summary
        return read_output("out.parquet")

    return run


WAYS: dict[str, Callable[[Whole], list[dict[str, Any]]]] = {
    "small packs": job(pack_tokens=150, chunk_tokens=16),
    "two workers": job(workers=2, pack_tokens=200),
    "no prefix is kept": job(pack_tokens=150, prefix_kv="discard"),
    "prefixes in host memory": job(pack_tokens=150, prefix_kv="offload"),
    "deterministic": job(deterministic=True, pack_tokens=200),
    "two shards": merged,
    "killed and resumed": stopped(signal.SIGKILL),
    "stopped and resumed": stopped(signal.SIGTERM),
}
OFTEN = ("small packs",)


@pytest.mark.parametrize(
    "way", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.nightly) for each in WAYS]
)
def test_a_job_has_these_answers_however_it_runs(whole: Whole, way: str) -> None:
    write_rows()
    assert_answered(WAYS[way](whole), whole)
