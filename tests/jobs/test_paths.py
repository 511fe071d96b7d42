"""What a run writes has a path of its own, and replaces only what it may."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import UsageError
from prefillcli.options.commands import COMMANDS
from prefillcli.options.load import load_settings
from prefillcli.options.option import Settings
from prefillcli.rows import filesystems
from prefillcli.scoring.path_table import require_apart
from tests.jobs.jobs import read_output, read_report, score, texts, write_parquet

ROWS = 12


def contents() -> dict[str, bytes]:
    """All files here, by name."""
    return {str(each): each.read_bytes() for each in Path().rglob("*") if each.is_file() and not each.is_symlink()}


@pytest.fixture(scope="module")
def earlier(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an input, a model, and what a job before has written."""
    folder = tmp_path_factory.mktemp("earlier")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copytree(model, "model")
        prompts = [*texts(ROWS - 1), None]
        write_parquet("in.parquet", id=list(range(ROWS)), prompt=prompts)
        Path("template.jinja").write_text("{{ prompt }}")
        Path("recipe.yaml").write_text("temperature: 1.0\n")
        made = score("in.parquet", "last.parquet", **flags(rejects="bad.jsonl", metrics_file="run.prom"))
        assert made["exit_code"] == 0
    return folder


@pytest.fixture(autouse=True)
def _there(earlier: Path, tmp_path: Path) -> None:
    shutil.copytree(earlier, tmp_path, dirs_exist_ok=True)


def flags(**more: Any) -> dict[str, Any]:
    return {"model": "model", "id_column": "id", "memory": "64MiB", "max_error_rate": 0.5} | more


def settings_of(command: str, recipe: str | None = None, **given: Any) -> Settings:
    return load_settings(COMMANDS[command], given, recipe=recipe, environment={})


def refusal(command: str, recipe: str | None = None, **given: Any) -> str:
    """Why a run with these options is refused, having changed nothing."""
    before = contents()
    with pytest.raises(UsageError) as refused:
        require_apart(settings_of(command, recipe, **given))
    assert contents() == before
    assert len(str(refused.value).splitlines()) <= 3
    return str(refused.value)


# ---------------------------------------------------------------------------------------------------- one path for two

READ = (
    "in.parquet",
    "model/model.safetensors",
    "model/config.json",
    "model/generation_config.json",
    "template.jinja",
    "recipe.yaml",
    "last.parquet",
    "last.parquet.prefill/manifest.json",
)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("option", ["metrics_file", "report", "rejects"])
def test_what_a_run_reads_it_does_not_write(option: str, overwrite: bool) -> None:
    given = flags(inputs=["in.parquet"], output="out.parquet", template="template.jinja", since="last.parquet")
    for path in READ:
        said = refusal("score", "recipe.yaml", **given | {option: path, "overwrite": overwrite})
        assert f"--{option.replace('_', '-')} {path}" in said


@pytest.mark.parametrize("option", ["output", "metrics_file"])
@pytest.mark.parametrize(
    "spelt",
    [
        "{here}/in.parquet",
        "/{here}/in.parquet",
        "file://{here}/in.parquet",
        "model/../in.parquet",
        "link/in.parquet",
        "to-input.parquet",
        "hard.parquet",
        "to-model/../in.parquet",
    ],
)
def test_a_path_is_the_same_however_it_is_spelt_or_linked(option: str, spelt: str, tmp_path: Path) -> None:
    Path("link").symlink_to(tmp_path)
    Path("to-input.parquet").symlink_to("in.parquet")
    Path("to-model").symlink_to("model")
    os.link("in.parquet", "hard.parquet")
    assert "would be written over the input" in refusal(
        "score", inputs=["in.parquet"], overwrite=True, **{option: spelt.format(here=tmp_path)}
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"report": "a.jsonl", "rejects": "a.jsonl"}, "would be one file"),
        (
            {"report": "a.json", "metrics_file": "a.html"},
            "the page of --report, a.html and --metrics-file a.html",
        ),
        ({"output": "a.parquet", "rejects": "a.parquet"}, "would be one file"),
        ({"output": "a.parquet", "metrics_file": "nowhere"}, "would be one file"),
        ({"output": "a.parquet", "metrics_file": "A.Parquet"}, "would be one file"),
        ({"output": "a.parquet", "report": "a.parquet.prefill/r.json"}, "lies where"),
        ({"output": "a.parquet", "report": "a.parquet/r.json"}, "lies where"),
        ({"output": "a/", "rejects": "a/part-00003.parquet"}, "lies where"),
        ({"output": "memory://x/a.parquet", "rejects": "memory:///x/a.parquet"}, "would be one file"),
        ({"metrics_file": "in.parquet/m.prom"}, "lies where"),
        ({"output": "model"}, "written over --model"),
    ],
)
def test_what_a_run_writes_has_a_path_of_its_own(given: dict[str, Any], said: str) -> None:
    Path("nowhere").symlink_to("a.parquet")
    assert said in refusal("score", inputs=["in.parquet"], model="model", overwrite=True, **given)


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("merge", {"output": "out.parquet", "metrics_file": "out.parquet.prefill"}),
        ("merge", {"output": "out.parquet", "report": "out.parquet.shard-1-of-2.prefill/manifest.json"}),
        ("calibrate", {"scores": "last.parquet", "truth": "truth", "output": "last.parquet.prefill/manifest.json"}),
        ("inspect", {"inputs": ["in.parquet"], "row": "0", "html": "in.parquet"}),
        ("inspect", {"inputs": ["in.parquet"], "row": "0", "html": "model/vocab.json", "model": "model"}),
        ("bench", {"output": "model/config.json", "model": "model"}),
        ("profile", {"output": "model/tokenizer.json", "model": "model"}),
    ],
)
def test_every_command_has_the_table(command: str, given: dict[str, Any]) -> None:
    shutil.copytree("last.parquet.prefill", "out.parquet.shard-1-of-2.prefill")
    assert "choose another path" in refusal(command, **given)


def test_a_run_that_is_refused_writes_nothing_at_all() -> None:
    before = contents()
    given = flags(metrics_file="model/model.safetensors", overwrite=True)
    assert score("in.parquet", "out.parquet", **given)["exit_code"] == 2
    assert contents() == before


def test_paths_that_may_meet_do() -> None:
    """An output may replace itself, and its report the one that it is compared with."""
    given = flags(since="last.parquet", drift_from="last.run.json", max_drift=0.5, rejects="bad.jsonl", overwrite=True)
    summary = score("in.parquet", "last.parquet", report="last.run.json", metrics_file="run.prom", **given)
    assert (summary["exit_code"], summary["since"]["rows"]) == (0, ROWS - 1)
    Path("nightly").mkdir()
    Path("model/README.md").write_text("of the model")
    inside = flags(report="nightly/run.json", metrics_file="model/run.prom", rejects="nightly/bad.jsonl")
    assert score("in.parquet", "nightly/", **inside)["exit_code"] == 0
    assert len(read_output("nightly")) == ROWS
    assert score("in.parquet", "nightly/", **inside, overwrite=True)["exit_code"] == 0


# --------------------------------------------------------------------------------------------------- only its own kind


KINDS = {
    "run.json": ("score", {"inputs": ["in.parquet"], "output": "out.parquet", "report": "run.json"}),
    "out.dry-run.json": ("score", {"inputs": ["in.parquet"], "output": "out.parquet", "dry_run": True}),
    "out.run.html": ("score", {"inputs": ["in.parquet"], "output": "out.parquet"}),
    "run.prom": ("score", {"inputs": ["in.parquet"], "output": "out.parquet", "metrics_file": "run.prom"}),
    "bad.jsonl": ("score", {"inputs": ["in.parquet"], "output": "out.parquet", "rejects": "bad.jsonl"}),
    "out.exit.json": ("score", {"inputs": ["in.parquet"], "output": "out.parquet", "exit": True}),
    "merged.run.json": ("merge", {"output": "merged.parquet"}),
    "calibration.json": ("calibrate", {"scores": "last.parquet", "truth": "truth"}),
    "page.html": ("inspect", {"inputs": ["in.parquet"], "row": "0", "html": "page.html"}),
    "bench.json": ("bench", {}),
    "profile.html": ("profile", {}),
}
FOREIGN = ("in.parquet", "last.parquet", "template.jinja", "model/config.json", "README.html")


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_another_kind_is_not_replaced(name: str) -> None:
    command, given = KINDS[name]
    Path("README.html").write_text("<!doctype html>\n<title>prefill score for us</title>")
    for foreign in FOREIGN:
        shutil.copy(foreign, name)
        said = refusal(command, **given)
        assert "a file is there that is not" in said
        if "overwrite" in COMMANDS[command].options():
            require_apart(settings_of(command, **given, overwrite=True))
    for nothing in ("", None):
        Path(name).unlink()
        if nothing is not None:
            Path(name).write_text(nothing)
        require_apart(settings_of(command, **given))


def test_what_an_earlier_run_wrote_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    before = contents()
    given = flags(report="last.run.json", rejects="bad.jsonl", metrics_file="run.prom", temperature=2.0)
    assert score("in.parquet", "out.parquet", **given)["exit_code"] == 0, capfd.readouterr().err
    after = contents()
    for name in ("last.run.json", "last.run.html", "run.prom"):
        assert after[name] != before[name]
    assert score("in.parquet", "out.parquet", **flags(rejects="bad.parquet", resume=True, temperature=2.0))
    for rejects in ("last.parquet", "last.jsonl"):  # scores are no rejects, in any format
        score("in.parquet", rejects, **flags(overwrite=True, id_column=None))
        assert "is not rejects" in refusal("score", inputs=["in.parquet"], output="new.parquet", rejects=rejects)
    require_apart(settings_of("score", inputs=["in.parquet"], output="new.parquet", rejects="bad.parquet"))


@pytest.mark.parametrize("path", ["model", "new/", "/dev/null", "in.parquet/x", "pipe"])
def test_a_folder_a_device_or_a_pipe_is_not_replaced_by_a_file(path: str) -> None:
    os.mkfifo("pipe")
    said = refusal("score", inputs=["in.parquet"], output="out.parquet", metrics_file=path, overwrite=True)
    assert f"--metrics-file {path}" in said


def test_a_report_that_is_a_symbolic_link_is_written_where_it_leads() -> None:
    Path("there").mkdir()
    Path("bad.jsonl").unlink()
    for name in ("run.json", "bad.jsonl"):
        Path(name).symlink_to(f"there/{name}")
    assert score("in.parquet", "out.parquet", **flags(report="run.json", rejects="bad.jsonl"))["exit_code"] == 0
    assert sorted(os.listdir("there")) == ["bad.jsonl", "run.json"]
    assert Path("run.json").is_symlink()
    assert read_report("run.json")["rows"]["total"] == ROWS


# ---------------------------------------------------------------------------------------------- what a name stands for


@pytest.mark.parametrize(
    "output",
    [
        "",
        " ",
        "/",
        "/nowhere/../",
        "to-root",
        "file:///",
        "file://machine/out.parquet",
        "memory://",
        "C:\\out.parquet",
        "c:/out.parquet",
        "s3:/bucket/out.parquet",
        "~nobody-has-this-name/out.parquet",
    ],
)
def test_an_output_that_names_nothing_of_its_own_is_refused(output: str) -> None:
    Path("part-00000.parquet").write_text("mine")
    Path("to-root").symlink_to("/")
    before = contents()
    for overwrite in (False, True):
        summary = score("in.parquet", output, **flags(overwrite=overwrite))
        assert summary["exit_code"] == 2
        assert f"--output {output!r}" in summary["error"] or f"--output {output}" in summary["error"]
    assert contents() == before


@pytest.mark.parametrize(
    ("output", "folder"),
    [
        (".", "."),
        ("{work}/", "."),
        ("~", "home"),
        ("~/o/.", "home/o"),
        ("file://{work}/o/", "o"),
        ("/{work}/o/", "o"),
        ("to-home/../o/", "elsewhere/o"),
    ],
)
def test_an_output_is_where_its_name_says(
    output: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    for each in ("home", "elsewhere/home"):
        (work / each).mkdir(parents=True)
    (work / "to-home").symlink_to("elsewhere/home")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(work / "home"))
    summary = score(tmp_path / "in.parquet", output.format(work=work), **flags(model=tmp_path / "model"))
    assert summary["exit_code"] == 0, summary["error"]
    assert {"_SUCCESS", "part-00000.parquet"} <= set(os.listdir(work / folder))
    assert os.path.samefile(work, "."), "the folder that a shell is in stays the same one"
    assert [row["id"] for row in read_output(work / folder)] == list(range(ROWS))
    assert Path(summary["report"]).expanduser().is_file()


def test_the_folder_that_a_shell_is_in_stays_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    for output in (".", f"{tmp_path}/empty/"):
        given = flags(model="../model", report="../run.json", overwrite=True)
        assert score("../in.parquet", output, **given)["exit_code"] == 0
        assert os.path.samefile(tmp_path / "empty", ".")
    assert len(read_output(".")) == ROWS


@pytest.mark.parametrize("foreign", ["part-00000.parquet", "_SUCCESS", "day=1/part-00007.parquet"])
def test_parts_of_others_are_not_replaced(foreign: str) -> None:
    path = Path("folder", foreign)
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = contents()
    assert score("in.parquet", "folder", **flags())["exit_code"] == 4
    assert contents().items() >= before.items()
    assert score("in.parquet", "folder", **flags(overwrite=True))["exit_code"] == 0


# ---------------------------------------------------------------------------------------------------- small files


SMALL: dict[str, dict[str, Any]] = {
    "template": {},
    "calibration": {},
    "exit_profile": {"exit": True},
    "drift_from": {"max_drift": 0.5},
    "profile": {},
}
NOT_SMALL = ("/dev/zero", "model", "large")


@pytest.mark.parametrize(
    ("option", "path"), [*((option, "endless") for option in SMALL), *(("template", path) for path in NOT_SMALL)]
)
def test_a_small_file_has_an_end(option: str, path: str) -> None:
    with Path("large").open("wb") as file:
        file.truncate(1 << 40)
    with endless() as pipe:
        given = flags(**SMALL[option], **{option: pipe if path == "endless" else path})
        summary = score("in.parquet", "out.parquet", **given)
    assert summary["exit_code"] == 2
    assert f"--{option.replace('_', '-')}" in summary["error"]
    assert not Path("out.parquet").exists()


@pytest.mark.parametrize("path", [*NOT_SMALL, "endless"])
def test_a_recipe_has_an_end(path: str) -> None:
    with Path("large").open("wb") as file:
        file.truncate(1 << 40)
    with endless() as pipe, pytest.raises(UsageError, match="--recipe"):
        settings_of("score", pipe if path == "endless" else path, inputs=["in.parquet"])


def test_a_recipe_and_a_template_may_come_from_a_pipe() -> None:
    with written_by(lambda pipe: os.write(pipe, b"temperature: 2.0\n")) as recipe:
        assert settings_of("score", recipe, inputs=["in.parquet"]).value("temperature") == 2.0
    with written_by(lambda pipe: os.write(pipe, b"{{ prompt }}")) as template:
        assert score("in.parquet", "out.parquet", **flags(template=template))["exit_code"] == 0
    assert settings_of("score", os.devnull, inputs=["in.parquet"]).given == {"inputs"}


@contextmanager
def written_by(write: Callable[[int], object]) -> Iterator[str]:
    """The path of a pipe that a thread writes, as a shell's `<(...)` names one."""
    read, end = os.pipe()

    def run() -> None:
        with suppress(BrokenPipeError):
            write(end)
        os.close(end)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"/dev/fd/{read}"
    finally:
        os.close(read)
        thread.join()


def endless() -> AbstractContextManager[str]:
    def write(pipe: int) -> None:
        while True:
            os.write(pipe, b" " * (1 << 16))

    return written_by(write)


# ----------------------------------------------------------------------------------------------------- renamed outputs


@pytest.mark.parametrize("name", ["last.parquet", "last/"])
def test_an_output_that_was_renamed_with_its_work_folder_is_taken_over(name: str) -> None:
    if name != "last.parquet":
        assert score("in.parquet", name, **flags())["exit_code"] == 0
    old, new = name.rstrip("/"), f"older{Path(name).suffix}"
    os.rename(old, new)
    os.rename(f"{old}.prefill", f"{new}.prefill")
    summary = score("in.parquet", "out.parquet", **flags(since=new, rejects="bad.jsonl"))
    assert (summary["exit_code"], summary["since"]["rows"]) == (0, ROWS - 1)
    assert score("in.parquet", new, **flags(resume=True))["exit_code"] == 0
    assert json.loads(Path(f"{new}.prefill/manifest.json").read_text())["state"] == "complete"


def test_an_earlier_output_at_a_host_that_does_not_answer_is_told_of_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/out.parquet"
        summary = score("in.parquet", "out.parquet", **flags(since=url))
    assert summary["exit_code"] == 1
    assert summary["error"].startswith(f"--since {url}: no answer within 1 seconds\n")


def test_an_output_that_was_renamed_alone_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    os.rename("last.parquet", "older.parquet")
    assert score("in.parquet", "out.parquet", **flags(since="older.parquet"))["exit_code"] == 0
    assert "renamed together with its work folder" in capfd.readouterr().err
