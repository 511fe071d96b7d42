"""A job of three windows without a model: what it gives to a sink, and what its output must be."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.plan.behind import LabelSet
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.destination import Job
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.records import Prompt, RowError, ScoredRow, Window

LABELS = ("Yes", "No", "Maybe")
FINGERPRINT = {"input": "i", "model": "m", "tokenizer": "t", "template": "p", "labels": "l", "settings": "s"}
TOO_LONG = RowError("prompt_too_long", "9 tokens, the limit is 8")


def open_sink(output: str | Path, kind: type[Sink] = Sink, **options: Any) -> Any:
    """`options` are those of the job, of the schema, and of `Sink.open`."""
    own = {each.name: options.pop(each.name) for each in fields(AnswerColumns) if each.name in options}
    own["groups"] = groups = own.get("groups", frozenset())
    given: dict[str, Any] = {
        "questions": (AnswerColumns(**{"labels": LABELS} | own),),
        "groups": groups,
        "id_name": "id",
        "carried": pa.schema([("id", pa.string()), ("kept", pa.int64())]),
    } | options
    schema = OutputSchema(**{each.name: given.pop(each.name) for each in fields(OutputSchema) if each.name in given})
    chosen = {"limit": None, "sample": None, "seed": 0}
    job = Job(given.pop("fingerprint", FINGERPRINT), given.pop("selection", chosen), schema.id_name)
    return kind.open(str(output), job, schema, **given)


def make_window(index: int, rows: list[int], bad: tuple[int, ...] = (), json_text: bool = False) -> Window:
    ids: list[Any] = [f"id-{row}" for row in rows]
    kept: list[Any] = [None if row % 5 == 0 else row * 10 for row in rows]
    if json_text:
        ids, kept = [json.dumps(i) for i in ids], [None if k is None else json.dumps(k) for k in kept]
    return Window(
        index,
        np.array(rows, np.int64),
        [
            Prompt(row, np.arange(row % 7 + 1, dtype=np.int32), LabelSet(()), truncated=row % 3 == 0)
            for row in rows
            if row not in bad
        ],
        dict.fromkeys(bad, TOO_LONG),
        pa.table({"id": ids, "kept": pa.array(kept, pa.string() if json_text else pa.int64())}),
    )


def scored(row: int) -> ScoredRow:
    logprobs = np.log(np.array([row % 11 + 1, 5.0, 2.0]) / 40)
    return ScoredRow(row, logprobs, shared_tokens=1, computed_tokens=2, kept_tokens=3, seconds=0.5, method="full")


def score_all(sink: Sink, windows: list[Window], *, temperature: float = 1.0, per_part: int = 2) -> None:
    """What a job does: score what is not done, a few rows at a time."""
    for window in windows:
        done = sink.done(window.index)
        todo = [prompt.row for prompt in window.prompts if prompt.row not in done]
        for at in range(0, len(todo) or 1, per_part):
            results = [scored(row) for row in reversed(todo[at : at + per_part])]
            sink.write(window, results, {}, temperature=temperature)


WINDOWS = [
    make_window(0, list(range(0, 7)), bad=(2,)),
    make_window(1, list(range(7, 10)), bad=(7, 8, 9)),
    make_window(2, list(range(10, 15))),
]


def read(output: str) -> list[dict[str, Any]]:
    if output.endswith(".parquet"):
        return list(pq.read_table(output).to_pylist())
    if output.endswith("/"):
        names = sorted(name for name in os.listdir(output) if name.endswith(".parquet"))
        return [row for name in names for row in pq.read_table(output + name).to_pylist()]
    codec = {"gz": "gzip", "zst": "zstd"}.get(output.rpartition(".")[2])
    data = pa.input_stream(output, compression=codec).read()
    return [json.loads(line) for line in data.decode().splitlines()]


def expected_row(row: int, bad: bool, temperature: float = 1.0) -> dict[str, Any]:
    kept = None if row % 5 == 0 else row * 10
    weights = [row % 11 + 1, 5.0, 2.0]
    powers = [(w / 40) ** (1 / temperature) for w in weights]
    none = dict.fromkeys(["score", *(f"logprob_{n}" for n in LABELS), "label_mass", "prediction"])
    none |= dict.fromkeys(["prompt_tokens", "shared_tokens", "kept_tokens", "computed_tokens", "seconds", "method"])
    if bad:
        wrong = {"truncated": False, "error": TOO_LONG.code, "error_detail": TOO_LONG.detail}
        return {"id": f"id-{row}", "kept": kept, **none, **wrong}
    return {
        "id": f"id-{row}",
        "kept": kept,
        "score": pytest.approx(powers[0] / sum(powers), rel=1e-12),
        **{f"logprob_{n}": pytest.approx(math.log(w / 40)) for n, w in zip(LABELS, weights, strict=True)},
        "label_mass": pytest.approx(sum(weights) / 40),
        "prediction": LABELS[weights.index(max(weights))],
        "prompt_tokens": row % 7 + 1,
        "shared_tokens": 1,
        "kept_tokens": 3,
        "computed_tokens": 2,
        "seconds": 0.5,
        "method": "full",
        "truncated": row % 3 == 0,
        "error": None,
        "error_detail": None,
    }


BAD = (2, 7, 8, 9)
EXPECTED = [expected_row(row, row in BAD) for row in range(15)]


def finished(output: str, **options: Any) -> None:
    with open_sink(output, **options) as sink:
        score_all(sink, WINDOWS)
        sink.finish(3)


def read_memory(url: str) -> list[dict[str, Any]]:
    """The rows of a Parquet output in a filesystem in memory."""
    filesystem, path = fsspec.core.url_to_fs(url)
    return list(pq.read_table(pa.BufferReader(filesystem.cat_file(path))).to_pylist())
