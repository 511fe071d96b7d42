"""Directories of tensors, in safetensors and GGUF files, in which any field may be another one."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from prefillcli.models.gguf_header import read_gguf_header
from tests.fuzz.command import prefill
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.workplace import Workplace
from tests.jobs.models import save_model

_PROMPTS = ["The fox. Answer:", "Yes or no", "A quick brown fox. Answer:"]
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class _Entry:
    """A tensor as a directory has it. Its bytes begin at `begin` and end before `end`; GGUF files say no end."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    begin: int
    end: int | None = None


_FIELDS = ("name", "kind", "shape", "begin", "end")
_NUMBERS = st.one_of(st.sampled_from([0, 1, -1, 4, 16, 32, -32, 64, 2**31, 2**63]), st.integers(-200, 200))
_EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(["begin", "end", "both"]), st.integers(0, 99), _NUMBERS),
        st.tuples(st.just("resize"), st.integers(0, 3), st.integers(0, 99), _NUMBERS),
        st.tuples(st.just("turn"), st.integers(0, 3), st.integers(0, 99), st.integers(1, 4)),
        st.tuples(st.sampled_from(["copy", "swap"]), st.sampled_from(_FIELDS), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("kind"), st.just(""), st.integers(0, 99), st.integers(0, 40)),
        st.tuples(st.sampled_from(["drop", "double", "rename"]), st.just(""), st.integers(0, 99), st.integers(0, 5)),
    ),
    max_size=2,
)
_SAFE_KINDS = ("F64", "F32", "I64", "I32", "U32", "U8", "BOOL", "F8_E4M3", "X", 7, None)
_NAMES = ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", "rope_freqs.weight", "score.weight", "x", "")


def _changed(entries: Sequence[_Entry], edits: Any, *, gguf: bool) -> list[_Entry]:
    found = list(entries)
    for what, detail, at, value in edits:
        at = at % len(found)
        entry = found[at]
        match what:
            case "add" if detail == "both" or gguf:
                end = None if entry.end is None else entry.end + value
                found[at] = replace(entry, begin=entry.begin + value, end=end)
            case "add":
                found[at] = replace(entry, **{detail: getattr(entry, detail) + value})
            case "resize":
                sizes = list(entry.shape)
                sizes[detail % len(sizes)] += value
                found[at] = replace(entry, shape=tuple(sizes))
            case "turn":  # as many numbers in another shape
                turned = {1: entry.shape[::-1], 2: (*entry.shape, 1), 3: (1, *entry.shape)}
                found[at] = replace(entry, shape=turned.get(value, (entry.shape[0] // 2, 2, *entry.shape[1:])))
            case "copy":
                found[at] = replace(entry, **{detail: getattr(found[value % len(found)], detail)})
            case "swap":
                other = found[value % len(found)]
                found[at] = replace(entry, **{detail: getattr(other, detail)})
                found[value % len(found)] = replace(other, **{detail: getattr(entry, detail)})
            case "kind":
                found[at] = replace(entry, kind=value if gguf else _SAFE_KINDS[value % len(_SAFE_KINDS)])
            case "drop" if len(found) > 1:
                del found[at]
            case "double":
                found.append(replace(entry, name=_NAMES[value].format(at)))
            case "rename":
                found[at] = replace(entry, name=_NAMES[value].format(at))
    return found


def _is_told(before: Sequence[_Entry], after: Sequence[_Entry]) -> bool:
    """Whether anybody can tell the two apart: not where tensors of one shape and kind have changed places."""
    described = [{each.name: (each.kind, each.shape) for each in entries} for entries in (before, after)]
    places = [sorted((each.begin, each.end or 0, each.kind, each.shape) for each in before)]
    if len(after) != len(before) or described[0] != described[1]:
        return True
    return sorted((each.begin, each.end or 0, each.kind, each.shape) for each in after) != places[0]


def _write_safetensors(folder: Path, edits: Any) -> bool:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__", None)
    before = [
        _Entry(name, each["dtype"], tuple(each["shape"]), *each["data_offsets"]) for name, each in header.items()
    ]
    after = _changed(before, edits, gguf=False)
    items = [f'"__metadata__": {json.dumps(metadata)}'] + [  # a mapping would have no name twice
        json.dumps(each.name)
        + ": "
        + json.dumps({"dtype": each.kind, "shape": each.shape, "data_offsets": [each.begin, each.end]})
        for each in after
    ]
    text = ("{" + ", ".join(items) + "}").encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return _is_told(before, after)


_SETTINGS = (
    *("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"),
    *("vocab_size", "rope.dimension_count", "attention.layer_norm_rms_epsilon", "rope.freq_base"),
)
_METADATA = st.none() | st.one_of(
    st.tuples(st.just("set"), st.sampled_from(_SETTINGS[:7]), st.one_of(st.integers(0, 80), _NUMBERS)),
    st.tuples(st.sampled_from(["drop", "double", "rename"]), st.sampled_from(_SETTINGS[:8]), st.just(0)),
    st.tuples(st.just("align"), st.just(""), st.sampled_from([0, 1, 2, 8, 16, 24, 32, 64, 128, 4096, 2**31])),
    st.tuples(st.sampled_from(["tensors", "settings", "version"]), st.just(""), st.integers(-2, 2)),
)


def _write_gguf(file: Path, edits: Any, metadata: Any) -> bool:
    header = read_gguf_header(file)
    data = file.read_bytes()[header.data_start :]
    before = [_Entry(each.name, each.kind, each.shape, each.offset) for each in header.tensors]
    after = _changed(before, edits, gguf=True)
    settings = list(header.raw.values())
    counts = {"tensors": len(after), "settings": 0, "version": header.version}
    what, name, value = metadata or ("", "", 0)
    key = f"{header.architecture}.{name}"
    match what:
        case "set":
            kind = header.raw[key][len(key) + 8 :][:4]
            settings[list(header.raw).index(key)] = _named(key) + kind + _in(value, 4)
        case "drop":
            settings.remove(header.raw[key])
        case "double":
            settings.append(header.raw[key])
        case "rename":
            settings[list(header.raw).index(key)] = _named(key[:-1] + "x") + header.raw[key][8 + len(key) :]
        case "align":
            settings.append(_named("general.alignment") + _in(4, 4) + _in(value, 4))
        case "tensors" | "settings" | "version":
            counts[what] += value
    counts["settings"] += len(settings)
    table = [
        _named(each.name)
        + _in(len(each.shape), 4)
        + b"".join(_in(size, 8) for size in each.shape[::-1])
        + _in(each.kind, 4)
        + _in(each.begin, 8)
        for each in after
    ]
    start = b"GGUF" + _in(counts["version"], 4) + _in(counts["tensors"], 8) + _in(counts["settings"], 8)
    head = start + b"".join([*settings, *table])
    file.write_bytes(head + bytes(-len(head) % header.alignment) + data)
    return _is_told(before, after)


def _named(name: str) -> bytes:
    return _in(len(name.encode()), 8) + name.encode()


def _in(number: int, size: int) -> bytes:
    return struct.pack("<Q", number % 2**64)[:size]


def _check(drawn: Any, place: Workplace) -> None:
    form, edits, metadata, flags = drawn
    source, wanted = _intact(place, form)
    model = Path(shutil.copytree(source, "model"))
    if form == "safetensors":
        told = _write_safetensors(model, edits)
    else:
        told = _write_gguf(model / f"{form}.gguf", edits, metadata)
    pq.write_table(pa.table({"prompt": _PROMPTS}), "in.parquet")
    run = prefill("score", "in.parquet", "-m", "model", "-o", "out.parquet", "--quiet", "--dtype", "float32", *flags)
    rows = require_all_rows(run, "in.parquet", len(_PROMPTS))
    assert rows or run.exit_code == 2, run.stderr
    if told:
        for row, score in zip(rows, wanted, strict=bool(rows)):
            assert row["error"] is not None or abs(row["score"] - score) <= _TOLERANCE, (row["score"], score)


def _intact(place: Workplace, form: str) -> tuple[Path, list[float]]:
    """The folder of an intact model, and its scores."""
    folder = place.folder / "directories" / form
    if not folder.exists():
        plain = save_model(folder if form == "safetensors" else folder.with_name("plain"), hidden=32, seed=3)
        if form != "safetensors":
            _quantise(plain, folder, form)
        pq.write_table(pa.table({"prompt": _PROMPTS}), "in.parquet")
        words = ["score", "in.parquet", "-m", str(folder), "-o", "intact.parquet", "--quiet", "--dtype", "float32"]
        assert prefill(*words).exit_code == 0
        shutil.move("intact.parquet", folder.with_suffix(".parquet"))
    scores: list[float] = pq.read_table(folder.with_suffix(".parquet"))["score"].to_pylist()
    return folder, scores


def _quantise(plain: Path, folder: Path, form: str) -> None:
    from gguf import GGMLQuantizationType

    from tests.gguf_files import write_gguf

    folder.mkdir(parents=True)
    write_gguf(folder / f"{form}.gguf", plain, kind=GGMLQuantizationType[form])


DIRECTORIES = Fuzzer(
    "directories",
    st.tuples(
        st.sampled_from(["safetensors", "F32", "Q8_0"]),
        _EDITS,
        _METADATA,
        st.sampled_from([(), (), ("--weights", "stream"), ("--engine", "hf")]),
    ),
    _check,
    per_round=60,
)
