"""Pairs of path options that meet: nothing changes that a run was not told to write."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.command import Run, prefill
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.workplace import Workplace

Contents = dict[str, bytes | str]
_READ = {
    "score": ("template", "calibration", "profile", "since", "drift-from", "exit-profile", "adapter", "recipe"),
    "merge": ("drift-from", "recipe"),
    "calibrate": ("truth-from", "recipe"),
    "inspect": ("template", "exit-profile", "recipe"),
}
_WRITTEN = {
    "score": ("output", "report", "metrics-file", "rejects", "review"),
    "merge": ("report", "metrics-file"),
    "calibrate": ("output",),
    "inspect": ("html",),
}
_BESIDE = {"template": [], "calibration": [], "drift-from": ["--max-drift=1"], "exit-profile": ["--exit"]}
"""What some options need beside them."""
_PLACES = (
    "in.parquet",
    "in.jsonl",
    "folder/in.parquet",
    "folder/part-00000.parquet",
    "folder",
    "done.parquet",
    "done.parquet.prefill/manifest.json",
    "done.parquet.prefill",
    "done.run.json",
    "done.run.html",
    "parts",
    "parts/part-00000.parquet",
    "parts/_SUCCESS",
    "parts.run.json",
    "split.parquet",
    "split.parquet.shard-1-of-2.prefill",
    "model",
    "model/model.safetensors",
    "model/config.json",
    "model/tokenizer.json",
    "model/new.json",
    "template.jinja",
    "recipe.yaml",
    "calibration.json",
    "bad.jsonl",
    "run.prom",
    "notes.txt",
    "empty",
    "new.parquet",
    "new.jsonl",
    "new.json",
    "new.prom",
    "new",
    "new/deep/x.parquet",
    "new.parquet/x.json",
    "dangling",
    "linked.parquet",
    "linked",
    "hard.parquet",
    "hard.bin",
    ".",
    "..",
    "",
    "~",
    "/",
    "//",
    "file://",
    "file:///",
    "memory://",
    "/dev/null",
    "/dev/zero",
    "C:\\x.parquet",
    "c:/x.parquet",
    "s3:/bucket/x.parquet",
    "new.parquet.prefill",
    "new.run.json",
    "new.run.html",
)
_SPELT = (
    "{}",
    "{}",
    "./{}",
    "{}/",
    "{}//",
    "{}/.",
    "folder/../{}",
    "linked/../{}",
    "//{here}/{}",
    "{here}/{}",
    "file://{here}/{}",
    "file://{}",
    "~/{}",
    "memory://fuzz/{}",
    "memory:///fuzz/{}/",
)


@st.composite
def _examples(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(["score"] * 6 + ["merge", "calibrate", "inspect"]))
    places = draw(st.lists(st.sampled_from(_PLACES), min_size=1, max_size=2))
    spelt = st.builds(str.replace, st.sampled_from(_SPELT), st.just("{}"), st.sampled_from(places))
    options = draw(
        st.lists(st.sampled_from(_WRITTEN[command] * 2 + _READ[command]), min_size=1, max_size=3, unique=True)
    )
    words = [command]
    if command == "calibrate":
        words += [draw(st.one_of(st.just("done.parquet"), spelt)), "--truth=truth"]
    elif command == "merge":
        words += [draw(st.one_of(st.just("split.parquet"), spelt))]
    else:
        words += [draw(st.one_of(st.just("in.parquet"), st.sampled_from(["in.jsonl", "folder", "*.parquet"]), spelt))]
    for name in options:
        words += [f"--{name}={draw(spelt)}", *_BESIDE.get(name, [])]
    flags = {"score": ["--overwrite", "--resume", "--dry-run"], "merge": ["--overwrite"]}.get(command, [])
    return words + draw(st.lists(st.sampled_from(flags), max_size=1) if flags else st.just([]))


def _check_paths(words: list[str], place: Workplace) -> None:
    here = _prepare(place)
    words = [word.replace("{here}", str(here).lstrip("/")) if "//{here}" in word else word for word in words]
    words = [word.replace("{here}", str(here)) for word in words]
    if words[0] in ("score", "inspect"):
        words += ["--model=model", "--quiet", *(["--row=0"] if words[0] == "inspect" else [])]
    before, outside = _contents(here), _contents(here.parent / "around")
    run = prefill(
        *words, environment={"HOME": str(here.parent / "around"), "PREFILL_LABELS": "Yes,No"}, may_exhaust=True
    )
    after = _contents(here)
    told = _told(words, run, here)
    for name, content in before.items():
        changed = name not in after or after[name] != content
        assert not changed or _is_told(name, told), f"{name} has changed or is gone"
    if "--overwrite" not in words:
        for name in ("folder/part-00000.parquet", "notes.txt", "in.parquet", "in.jsonl", "template.jinja"):
            assert after.get(name) == before[name], f"{name} is replaced without --overwrite"
    if words[0] in ("score", "inspect"):
        for name, content in before.items():
            read = name == words[1] or name.startswith("model/")
            assert not read or after.get(name) == content, f"{name} has changed, and the run reads it"
    assert outside.items() <= _contents(here.parent / "around").items()
    if words[0] == "score" and "--dry-run" not in words:
        inputs = words[1]
        if run.exit_code == 0:
            _require_complete(run, inputs)


def _require_complete(run: Run, inputs: str) -> None:
    """The scores, the report, its page and the metrics are all there, each of its own kind."""
    output = run.summary["output"]
    named = output + inputs + run.summary["report"]
    plain = "://" not in named and "~" not in named
    if plain and output.endswith((".parquet", ".jsonl")) and Path(output).is_file():
        require_all_rows(run, inputs)
    for name in ("report", "page"):
        path = run.summary[name]
        if path is not None and "://" not in path:
            content = Path(path.replace("~", "../around", 1)).read_bytes()
            assert (b'"schema_version"' if name == "report" else b"<!doctype html>") in content[:4000], path


def _told(words: list[str], run: Run, here: Path) -> list[str]:
    """The real paths that the options say may be written: those of written options, and what lies beside them."""
    found = []
    for word in words[1:]:
        name, _, value = word.removeprefix("--").partition("=")
        if name in _WRITTEN[words[0]] and word.startswith("--"):
            found.append(value)
    if words[0] == "merge" or not any(word.startswith("--output=") for word in words):
        found.append(words[1])
    found += [run.summary.get(name) or "" for name in ("output", "report", "page")]
    real = []
    for value in filter(None, found):
        path = os.path.join(here, os.path.expanduser(value.removeprefix("file://").rstrip("/")))
        real += [os.path.realpath(path), os.path.normpath(path)]
    return real


def _is_told(name: str, told: list[str]) -> bool:
    path = os.path.realpath(name)
    for each in told:
        stem = each.removesuffix(".parquet").removesuffix(".jsonl").removesuffix(".json").removesuffix(".run")
        if path == each or path.startswith((f"{each}.prefill", f"{each}.shard-", f"{stem}.")):
            return True
        part = os.path.basename(path)
        if os.path.dirname(path) == each and (part.startswith("part-") or part == "_SUCCESS"):
            return True
    return False


def _contents(root: Path) -> Contents:
    found: Contents = {}
    for folder, folders, names in os.walk(root):
        for name in (*names, *folders):
            path = Path(folder, name)
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = os.readlink(path)
            elif path.is_file():
                found[key] = path.read_bytes()
    return found


def _prepare(place: Workplace) -> Path:
    """A folder with an input, a model, and what earlier runs have written; this process works in it."""
    source, here, around = place.folder / "met", Path.cwd() / "here", Path.cwd() / "around"
    if not source.exists():
        _make(source, place.model)
    shutil.copytree(source, here, symlinks=True)
    os.link(here / "in.parquet", here / "hard.parquet")
    os.link(here / "model" / "model.safetensors", here / "hard.bin")
    around.mkdir()
    (around / "notes.txt").write_text("mine")
    os.chdir(here)
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return here


def _make(source: Path, model: str) -> None:
    source.mkdir()
    shutil.copytree(model, source / "model")
    rows = [{"prompt": f"The fox {'ran ' * row}. Answer:", "truth": ["Yes", "No"][row % 2]} for row in range(24)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, source / "in.parquet")
    (source / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (source / "folder").mkdir()
    pq.write_table(table, source / "folder" / "in.parquet")
    pq.write_table(table.slice(0, 3), source / "folder" / "part-00000.parquet")
    os.chdir(source)
    given = ("score", "in.parquet", "-m", "model", "--quiet", "--truth", "truth")
    for output in ("done.parquet", "parts/"):
        assert prefill(*given, "-o", output).exit_code == 0
    bad = ("--max-length", "8", "--rejects", "bad.jsonl", "--metrics-file", "run.prom", "--max-error-rate", "1")
    assert prefill(*given, *bad, "-o", "spare.parquet").exit_code == 0
    for shard in ("1/2", "2/2"):
        assert prefill(*given, "-o", "split.parquet", "--shard", shard).exit_code == 0
    assert prefill("calibrate", "done.parquet", "--truth", "truth").exit_code == 0
    (source / "template.jinja").write_text("{{ prompt }}")
    (source / "recipe.yaml").write_text("quiet: true\n")
    (source / "notes.txt").write_text("mine")
    (source / "empty").touch()
    (source / "dangling").symlink_to("new.parquet")
    (source / "linked.parquet").symlink_to("in.parquet")
    (source / "linked").symlink_to("model")


PATHS = Fuzzer("paths", _examples(), _check_paths, per_round=40)
