"""Files, directories, globs and URLs to the list of files that are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import UsageError
from prefillcli.rows.input.discovery import discover, would_find
from prefillcli.rows.proof import ModelContents


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}\n")


def names(root: Path, *inputs: str) -> list[str]:
    found, _ = discover([str(root / name) for name in inputs])
    return [str(Path(file.path).relative_to(root)) for file in found]


def test_a_directory_is_read_recursively_in_sorted_order(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a/z.jsonl", "a/b/c.ndjson.gz", "c.json.zst", "a.jsonl")
    assert names(tmp_path, "") == ["a.jsonl", "a/b/c.ndjson.gz", "a/z.jsonl", "b.jsonl", "c.json.zst"]


def test_hidden_underscore_and_work_folders_are_left_out(tmp_path: Path) -> None:
    touch(tmp_path, "_SUCCESS", "_old/a.jsonl", ".hidden/a.jsonl", ".a.jsonl", "x.jsonl", "out.prefill/p.jsonl")
    assert names(tmp_path, "") == ["x.jsonl"]
    assert names(tmp_path, "*") == ["x.jsonl"]


def test_files_with_other_endings_in_a_directory_are_reported(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl.bz2", "README.md")
    found, left_out = discover([str(tmp_path)])
    assert [Path(file.path).name for file in found] == ["a.jsonl"]
    assert [Path(path).name for path in left_out] == ["README.md", "b.jsonl.bz2"]


def test_inputs_keep_the_order_given(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl", "d/1.jsonl", "d/2.jsonl")
    assert names(tmp_path, "b.jsonl", "d", "a.jsonl") == ["b.jsonl", "d/1.jsonl", "d/2.jsonl", "a.jsonl"]


def test_a_glob_takes_matching_files_sorted_and_walks_matching_directories(tmp_path: Path) -> None:
    touch(tmp_path, "day=2/a.jsonl", "day=1/b.jsonl", "day=1/a.jsonl", "other/a.jsonl")
    assert names(tmp_path, "day=*") == ["day=1/a.jsonl", "day=1/b.jsonl", "day=2/a.jsonl"]
    assert names(tmp_path, "**/a.jsonl") == ["day=1/a.jsonl", "day=2/a.jsonl", "other/a.jsonl"]


@pytest.mark.parametrize("name", ["a[1].jsonl", "what?.jsonl", "a::b.jsonl", "x#y z.jsonl"])
def test_a_file_that_exists_is_no_pattern(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name, "a1.jsonl")
    assert names(tmp_path, name) == [name]


def test_a_loop_of_symbolic_links_ends_and_a_linked_directory_is_read(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.jsonl", "elsewhere/b.jsonl")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/more").symlink_to(tmp_path / "elsewhere")
    assert names(tmp_path, "in") == ["in/a.jsonl", "in/more/b.jsonl"]


@pytest.mark.parametrize("link", ["b.jsonl", "share", "day=2", "x/share"])
@pytest.mark.parametrize("given", ["in", "in/*", "in/**/*.jsonl", "i*/*", "i*/**"])
def test_a_link_that_leads_nowhere_is_refused_by_its_name(tmp_path: Path, link: str, given: str) -> None:
    touch(tmp_path, "in/a.jsonl", "in/x/c.jsonl", "in/x/y/d.jsonl")
    (tmp_path / "in" / link).symlink_to(tmp_path / "mnt" / "unmounted")
    with pytest.raises(UsageError) as refused:
        names(tmp_path, given)
    assert str(tmp_path / "in" / link) in str(refused.value)
    assert "unmounted" in str(refused.value)
    touch(tmp_path / "mnt/unmounted", "new.jsonl")  # mounted
    if link != "b.jsonl":
        assert {"in/x/c.jsonl", f"in/{link}/new.jsonl"} <= set(names(tmp_path, given))


def test_a_link_that_no_input_asks_for_may_lead_anywhere(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.jsonl", "in/x/c.jsonl")
    for name in ("in/.#a.jsonl", "in/_old", "in/other.txt", "in/x/z.csv"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    assert names(tmp_path, "in/a*", "in/x/*.jsonl") == ["in/a.jsonl", "in/x/c.jsonl"]


@pytest.mark.parametrize("given", ["in", "in/*", "in/*/*.jsonl", "in/**"])
def test_a_folder_that_cannot_be_listed_is_refused_by_its_name(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "in/x/a.jsonl", "in/y/a.jsonl")
    closed, listdir, scandir = str(tmp_path / "in/y"), os.listdir, os.scandir

    def refuse(real: Any) -> Any:  # as for other users than root
        def listed(path: Any = ".") -> Any:
            if str(path) == closed:
                raise PermissionError(13, "Permission denied", closed)
            return real(path)

        return listed

    monkeypatch.setattr(os, "listdir", refuse(listdir))
    monkeypatch.setattr(os, "scandir", refuse(scandir))
    with pytest.raises(UsageError) as refused:
        names(tmp_path, given)
    assert f"cannot read {closed}: Permission denied" in str(refused.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "model-00002-of-00002.safetensors", "generation_config.json"])
def test_a_model_with_a_file_that_leads_nowhere_is_refused(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "config.json", "model-00001-of-00002.safetensors", "notes.txt")
    (tmp_path / "blobs").symlink_to(tmp_path / "nowhere")
    assert len(ModelContents(tmp_path).paths) == 2
    (tmp_path / name).symlink_to(tmp_path / "blobs/4711")
    with pytest.raises(UsageError, match=f"{name}: a link to .*4711"):
        ModelContents(tmp_path)


def test_a_relative_path_is_shown_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "d/a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert [file.path for file in discover(["d"])[0]] == ["d/a.jsonl"]


def test_remote_files_directories_and_globs_are_found(memory: Any) -> None:
    for name in ("in/b.jsonl", "in/a.jsonl", "in/_tmp/c.jsonl"):
        memory.pipe_file(f"/bucket/{name}", b"{}\n")
    assert [file.path for file in discover(["memory://bucket/in"])[0]] == [
        "memory:///bucket/in/a.jsonl",
        "memory:///bucket/in/b.jsonl",
    ]
    assert len(discover(["memory://bucket/in/*.jsonl"])[0]) == 2
    assert discover(["memory://bucket/in/a.jsonl"])[0][0].stamp.size == 3


def test_reports_of_earlier_runs_are_not_read(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.jsonl", "in/a.scores.run.json", "in/a.scores.run.html", "in/a.scores.dry-run.json")
    touch(tmp_path, "in/run.json", "in/nightly.prom", "in/a.scores.parquet.prefill/heartbeat.json", "in/notes.txt")
    found, left_out = discover([str(tmp_path / "in")])
    assert [Path(file.path).name for file in found] == ["a.jsonl"]
    assert [Path(path).name for path in left_out] == ["notes.txt"]
    assert len(discover([str(tmp_path / "in/*.json*")])[0]) == 1
    assert len(discover([str(tmp_path / "in/a.scores.run.json")])[0]) == 1, "unless it is named"


@pytest.mark.parametrize(
    ("given", "path", "found"),
    [
        ("in", "in/out.parquet", True),
        ("in", "in/deep/out.parquet", True),
        ("in", "in/", True),
        ("in", "in/scores/", True),
        ("in", "link/out.parquet", True),
        ("link", "in/out.parquet", True),
        ("in/", "./in/../in/out.parquet", True),
        ("in/*.parquet", "in/out.parquet", True),
        ("in/**/*.parquet", "in/a/b/out.parquet", True),
        ("*", "in/out.parquet", True),
        ("memory://b/in", "memory://b/in/out.parquet", True),
        ("in", "in/_scores/out.parquet", False),
        ("in", "in.scores.parquet", False),
        ("in", "in.parquet.prefill", False),
        ("in/a.parquet", "in/a.scores.parquet", False),
        ("in/*.parquet", "in/out.jsonl", False),
        ("in/*.parquet", "in/deep/out.parquet", False),
        ("memory://b/in", "in/out.parquet", False),
        ("memory://b/in", "memory://b/out.parquet", False),
    ],
)
def test_whether_an_output_would_be_found_as_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any, given: str, path: str, found: bool
) -> None:
    """Told before it is there; `discover` says the same when it is."""
    touch(tmp_path, "in/a.parquet", "in/deep/a.parquet")
    (tmp_path / "link").symlink_to("in")
    memory.pipe_file("/b/in/a.parquet", b"")
    monkeypatch.chdir(tmp_path)
    assert would_find(given, path, folder=not path.endswith((".parquet", ".jsonl"))) is found
    written = path + ("part-00000.parquet" if path.endswith("/") else "")
    before = len(discover([given])[0])
    if path.startswith("memory"):
        memory.pipe_file(written.removeprefix("memory:/"), b"")
    else:
        touch(tmp_path, written)
    assert (len(discover([given])[0]) > before) is found


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "jsonl.gz"])
def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"in.{ending}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4000000\n")
    with pytest.raises(UsageError, match=r"a Git LFS pointer.*\n.*git lfs pull"):
        discover([str(path)])
