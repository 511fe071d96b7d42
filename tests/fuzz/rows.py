"""Rows of JSON Lines with any values, and Arrow tables with columns of any type."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.columns import columns
from tests.fuzz.command import prefill
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.texts import broken_texts, json_values, names, texts
from tests.fuzz.workplace import Workplace

_FLAGS = st.lists(
    st.sampled_from(
        [
            ("--id-column", "id"),
            ("--keep-columns", "x"),
            ("--keep-columns", "id,x"),
            ("--prompt-column", "x"),
            ("--prompt-column", "messages"),
            ("--prompt-column", "prompt_token_ids"),
            ("--on-long", "truncate-left"),
            ("--on-long", "truncate-middle"),
            ("--on-long", "skip"),
            ("--max-length", "20"),
            ("--max-row-bytes", "100"),
            ("--allow-special",),
            ("--truth", "x"),
            ("--template", "{{ prompt }} {{ x }}"),
            ("--system", "Be brief."),
        ]
    ),
    unique_by=lambda flag: flag[0],
    max_size=3,
).map(lambda flags: [word for flag in flags for word in flag])
_OUTPUTS = st.sampled_from(["out.parquet", "out.jsonl", "out.jsonl.gz", "out.csv", "out/"])


@dataclass(frozen=True, slots=True)
class Job:
    """An input, how it is scored, and where its rows go."""

    data: Any
    output: str
    flags: list[str] = field(default_factory=list)
    chat: bool = False

    def words(self, path: str, place: Workplace) -> list[str]:
        model = place.chat_model if self.chat else place.model
        return ["score", path, "-m", model, "-o", self.output, "--quiet", *self.flags]


_MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "system", "assistant", "tool", ""]), "content": json_values}
)
_PROMPTS = st.one_of(
    texts, broken_texts, json_values, st.lists(_MESSAGE, max_size=3), st.lists(st.integers(-1, 401), max_size=5)
)
_ROWS = st.one_of(
    st.fixed_dictionaries(
        {"prompt": _PROMPTS},
        optional={"id": json_values, "x": json_values, "messages": st.lists(_MESSAGE, max_size=3)},
    ),
    st.dictionaries(names, json_values, max_size=4),
    json_values,
)
_LINES = st.one_of(
    st.tuples(_ROWS, st.booleans()).map(lambda drawn: json.dumps(drawn[0], ensure_ascii=True).encode()),
    st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")),
    st.sampled_from([b"", b" ", b"{", b"{}", b"[" * 5000, b'{"a":' * 5000, b"\xef\xbb\xbf{}", b"null", b"1" * 5000]),
)


def _check_lines(job: Job, place: Workplace) -> None:
    Path("in.jsonl").write_bytes(b"\n".join(job.data))
    run = prefill(*job.words("in.jsonl", place))
    require_all_rows(run, "in.jsonl", sum(bool(line.strip()) for line in job.data))


def _check_table(job: Job, place: Workplace) -> None:
    table: pa.Table = job.data
    try:
        pq.write_table(table, "in.parquet", row_group_size=2)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError):
        return  # Arrow does not write it
    run = prefill(*job.words("in.parquet", place))
    require_all_rows(run, "in.parquet", table.num_rows)


@st.composite
def _tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(0, 5))
    chosen = draw(st.lists(names, max_size=3, unique=True))
    wanted = ["prompt", *(name for name in chosen if name != "prompt")]
    return pa.table({name: draw(columns(rows, plain=name == "prompt")) for name in wanted})


LINES = Fuzzer(
    "lines",
    st.builds(Job, st.lists(_LINES, max_size=8), _OUTPUTS, _FLAGS, st.booleans()),
    _check_lines,
    per_round=80,
)
TABLES = Fuzzer("tables", st.builds(Job, _tables(), _OUTPUTS, _FLAGS, st.booleans()), _check_table, per_round=80)
