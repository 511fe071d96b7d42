"""Command lines with any options and values."""

from __future__ import annotations

import shutil
from typing import Literal, get_args, get_origin

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from prefillcli.options.commands import COMMANDS
from prefillcli.options.option import as_typed, details_of
from tests.fuzz.command import prefill
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.texts import numbers, texts
from tests.fuzz.workplace import Workplace

_COLUMNS = ("prompt", "id", "x", "truth", "none", "")
_PATHS = (
    "in.parquet",
    "done.parquet",
    "done.run.json",
    "out.parquet",
    "in",
    ".",
    "new/",
    "c.json",
    "gone.json",
    "",
    "\x00",
    "x" * 300,
    "http://[::1",
    "a:b",
)
WORDS = (
    *_COLUMNS,
    *_PATHS,
    "auto",
    "1",
    "0",
    "-1",
    "0.5",
    "nan",
    "1e400",
    "Yes,No",
    "Yes=",
    "=",
    ",",
    "{",
    "a=b",
    "8GiB",
)
NUMBERS = st.one_of(numbers.map(str), st.sampled_from(["1", "2", "3", "0.5", "0.01", "100", "auto", "1_000", "٣", ""]))
_SIZES = st.sampled_from(["1", "8MiB", "1GiB", "0", "-1B", "1e30GiB", "8gb", "GiB", "inf", "nanMB", "9" * 400])
_CHOICES: dict[str, st.SearchStrategy[str]] = {
    "device": st.sampled_from(["cpu", "auto", "cuda", "cuda:99", "meta", "cpu:1", "xla", "", "\x00"]),
    "workers": st.sampled_from(["0", "1", "-1", "x"]),
    "threads": st.sampled_from(["1", "2", "0", "auto", "-1", "many", "99999999999999999999"]),
    "engine": st.sampled_from(["torch", "hf", "vllm", "", "x"]),
    "model": st.sampled_from(
        ["MODEL", "CHAT", "none/model", "in.parquet", "", ".", "\x00", "x" * 300, "a/b/c", "a b"]
    ),
    "draft": st.sampled_from(["self", "MODEL", "CHAT", "none/model", ""]),
    "labels": st.sampled_from(
        ["Yes,No", "Yes= Yes|yes,No", "a,b,c", "x" * 500, ",", "1,0", "Yes,", "Yes,No,Yes", "|"]
    ),
    "rationale_when": st.sampled_from(
        ["score > 0.4", "score", "1 +", "x.__class__", "error is none", "score > '1'", ""]
    ),
    "adapter": st.sampled_from(["MODEL", "a=", "=b", "none", "a=b", "in.parquet"]),
    "memory": _SIZES,
    "weights_memory": _SIZES,
    "max_row_bytes": _SIZES,
    "output": st.sampled_from(
        ["out.parquet", "out.jsonl", "out/", "new/", "", "in.parquet", "\x00", "x" * 300 + "/", "a.xlsx"]
    ),
}
_LEFT_OUT = {"ray_address", "runner", "trust_remote_code", "compile"}
"""They connect, run code or take minutes."""


def _value(command: str, name: str) -> st.SearchStrategy[str]:
    field = COMMANDS[command].options()[name]
    fitting: list[st.SearchStrategy[str]] = [_CHOICES[name]] if name in _CHOICES else []
    if not fitting and details_of(COMMANDS[command], name).metavar in ("PATH", "FILE", "OUTPUT"):
        fitting.append(st.sampled_from(_PATHS))  # some are written: nowhere else than in the example's folder
    elif name not in _CHOICES:
        if get_origin(field.annotation) is Literal:
            fitting.append(st.sampled_from([str(word) for word in get_args(field.annotation)]))
        if name.endswith(("column", "columns")) or name == "truth":
            fitting.append(st.sampled_from(_COLUMNS))
        if "int" in str(field.annotation) or "float" in str(field.annotation):
            fitting.append(NUMBERS)
        fitting += [st.sampled_from(WORDS), st.sampled_from(WORDS), texts]
    return st.one_of(fitting)


def _option(command: str) -> st.SearchStrategy[list[str]]:
    kind = COMMANDS[command]
    place = kind.given_by_place()
    found = []
    for name, field in kind.options().items():
        if name in _LEFT_OUT or name == place:
            continue
        flag = as_typed(kind, name)
        if flag.startswith("--set "):
            found.append(_value(command, name).map(lambda value, name=name: ["--set", f"{name}={value}"]))
            continue
        if field.annotation in (bool, bool | None):
            found.append(st.sampled_from([[flag], [flag.replace("--", "--no-")]]))
        else:
            found.append(_value(command, name).map(lambda value, flag=flag: [f"{flag}={value}"]))
    return st.one_of(found)


@st.composite
def _lines(draw: st.DrawFn) -> list[str]:
    """Words of a command line; the folder has an input, an output and a calibration."""
    command = draw(st.sampled_from(["score", "score", "score", "inspect", "calibrate", "merge", "verify", "status"]))
    if command in ("verify", "status"):
        return [command, *draw(st.lists(st.sampled_from(["done.parquet", "in.parquet", *_PATHS]), max_size=2))]
    given = {"score": "in.parquet", "inspect": "in.parquet"}.get(command, "done.parquet")
    words = [command, draw(st.sampled_from([given] * 8 + ["in", "gone.parquet", "*.parquet", "", "\x00"]))]
    for option in draw(st.lists(_option(command), max_size=4)):
        words += option
    if command == "score" and draw(st.integers(0, 3)) == 0:
        words.append("--dry-run")
    return words


def _check_line(words: list[str], place: Workplace) -> None:
    _prepare(place)
    models = {"MODEL": place.model, "CHAT": place.chat_model}
    placed = [models.get(word, word) for word in words]
    placed = [
        f"{name}={models.get(value, value)}" if eq else name for name, eq, value in (w.partition("=") for w in placed)
    ]
    if words[0] in ("score", "inspect") and not any(word.startswith("--model") for word in words):
        placed += ["-m", place.model]
    try:
        run = prefill(*placed, may_exhaust=True)
    except ValueError as error:
        if "embedded null" in str(error):  # no process can be given such a word
            return
        raise
    if words[0] == "score" and "--dry-run" not in words and not any(w.startswith("--shard") for w in words):
        require_all_rows(run, "in.parquet")


def _prepare(place: Workplace) -> None:
    source = place.folder / "scored"
    if not source.exists():
        source.mkdir()
        rows = range(6)
        table = pa.table(
            {
                "prompt": [f"The fox {'ran ' * row}. Answer:" for row in rows],
                "id": list(rows),
                "x": [None, "a", "b", "c", "d", "e"],
                "truth": ["Yes", "No"] * 3,
            }
        )
        pq.write_table(table, source / "in.parquet")
        words = ("score", f"{source}/in.parquet", "-m", place.model, "-o", f"{source}/done.parquet", "--quiet")
        assert prefill(*words, "--truth", "truth").exit_code == 0
        (source / "in").mkdir()
        (source / "c.json").write_text("{}")
    shutil.copytree(source, ".", dirs_exist_ok=True)


LINES = Fuzzer("flags", _lines(), _check_line, per_round=100)
