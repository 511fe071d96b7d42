"""Another model or another input under a known name is refused, also when it changes while the job runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from tests.jobs.jobs import read_output, score, texts, write_jsonl
from tests.jobs.processes import cut_small_windows

ROWS = 70
WORK = "out.parquet.prefill"


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch, flush_seconds=0.0)


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    return Path(shutil.copytree(model, tmp_path / "own"))


def write_input() -> None:
    """A folder of two uncompressed Parquet files; the last rows of both are read long after the first ones."""
    Path("in").mkdir()
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False, "row_group_size": 10}
    pq.write_table(pa.table({"prompt": texts(ROWS)[:60]}), "in/a.parquet", **plain)
    pq.write_table(pa.table({"prompt": texts(ROWS)[60:]}), "in/b.parquet", **plain)


def flags(model: Path) -> dict[str, Any]:
    return {"model": model, "pack_tokens": 64}


def edit_text(path: str) -> None:
    """Another letter in the last text, in place; sizes, offsets, footer and time of modification stay."""
    before, at = Path(path).stat(), Path(path).read_bytes().rindex(b"number")
    with Path(path).open("r+b") as file:
        file.seek(at)
        file.write(b"N")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "Number" in pq.read_table(path)["prompt"][-1].as_py()


def change_norm(model: Path) -> None:
    """Other weights of one norm."""
    file = model / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "layernorm" in name)
    weights[name] = weights[name] * 3
    save_file(weights, file, metadata={"format": "pt"})


def without_seconds() -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_output("out.parquet")]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda own: change_norm(own), "model"),
        (lambda own: edit_text("in/a.parquet"), "input"),
        (lambda own: (own / "chat_template.jinja").write_text("{{ messages }}"), "tokenizer"),
        (lambda own: (own / "config.json").write_text((own / "config.json").read_text() + " "), "model"),
    ],
    ids=["one norm", "one letter in a Parquet file", "chat template", "config"],
)
def test_other_contents_under_the_same_names_are_another_job(
    own: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], Any], named: str
) -> None:
    write_input()
    assert score("in", **flags(own), chat=False)["exit_code"] == 0
    before = Path("out.parquet").read_bytes()
    change(own)
    summary = score("in", **flags(own), chat=False, resume=True)
    assert summary["exit_code"] == 4
    assert f"different {named}" in capsys.readouterr().err
    assert Path("out.parquet").read_bytes() == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda own: edit_text("in/b.parquet"),
        lambda own: edit_text("in/a.parquet"),
        lambda own: os.replace(shutil.copy("in/a.parquet", "other.parquet"), "in/b.parquet"),
        lambda own: shutil.copy("in/a.parquet", "in/z.parquet"),
        lambda own: Path("in/b.parquet").unlink(),
        lambda own: change_norm(own),
        lambda own: shutil.copy(own / "model.safetensors", own / "model-2.safetensors"),
    ],
    ids=[
        "a file to come is edited",
        "the file that is being read is edited",
        "a file is replaced",
        "a file more",
        "a file less",
        "weights",
        "a weight file more",
    ],
)
def test_what_changes_while_the_job_runs_is_not_written(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Callable[[Path], Any]
) -> None:
    from prefillcli.engines.torch import TorchEngine

    write_input()
    assert score("in", **flags(own))["exit_code"] == 0
    wanted = without_seconds()
    shutil.copytree("in", "kept")
    shutil.copytree(own, "kept model")
    answer, calls = TorchEngine.answer, 0

    def changing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            change(own)
        return answer(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "answer", changing)
        summary = score("in", **flags(own), overwrite=True)
    assert (summary["exit_code"], summary["status"]) == (4, "failed")
    assert "while the job ran" in capsys.readouterr().err
    assert list(Path(WORK).glob("part-*.parquet")), "finished parts stay"
    for folder, kept in (("in", "kept"), (str(own), "kept model")):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    assert score("in", **flags(own), resume=True)["exit_code"] == 0
    assert without_seconds() == wanted, "no part is of what changed"


def test_lines_appended_after_the_fingerprint_are_noticed_before_the_output(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefillcli.rows.output.sink import Sink

    write_jsonl("in.jsonl", [{"prompt": text} for text in texts(10)])
    cut_small_windows(monkeypatch, flush_seconds=1e9)  # all rows are written at once
    write = Sink.write

    def appending(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        with Path("in.jsonl").open("a") as file:
            file.write('{"prompt": "late"}\n')

    monkeypatch.setattr(Sink, "write", appending)
    assert score("in.jsonl", model=model)["exit_code"] == 4
    assert "in.jsonl changed" in capsys.readouterr().err
    assert not Path("out.parquet").exists()


def test_a_model_that_changes_between_hashing_and_loading_is_noticed(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefillcli.models import load as loading

    write_input()
    load = loading.load_model

    def late(*arguments: Any, **options: Any) -> Any:
        change_norm(own)
        return load(*arguments, **options)

    monkeypatch.setattr(loading, "load_model", late)
    assert score("in", **flags(own))["exit_code"] == 4
    assert "model.safetensors changed" in capsys.readouterr().err
    assert not list(Path(WORK).glob("part-*.parquet"))
