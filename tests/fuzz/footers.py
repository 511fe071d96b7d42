"""Parquet files whose footers say other numbers than they were written with."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.command import prefill
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.workplace import Workplace
from tests.jobs.jobs import read_output
from tests.parquet_footers import fields_of, with_numbers

_ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"The {'quick ' * (number % 3)}fox {'saw a dog ' * number}and {number * 7919 % 13}. Answer:",
        "id": number,
        "kept": [{"role": "user", "content": "ä" * (number % 4)}] * (number % 3),
        "ids": list(range(1 + number % 3, 2 * number + 4)),
    }
    for number in range(12)
]
_WRITING = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "snappy"]),
        "use_dictionary": st.booleans(),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "row_group_size": st.sampled_from([3, 5, 12]),
        "data_page_size": st.sampled_from([1, 1 << 20]),
        "write_batch_size": st.sampled_from([1, 2, 1024]),
        "write_page_index": st.booleans(),
    }
)
_NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 10**6, 10**10, 2**31 - 1, 2**63 - 1, -(2**63)]),
    st.integers(0, 40),
    st.sampled_from(["-1", "+1", "half", "double", "other"]),
)
_EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), _NUMBERS), min_size=1, max_size=3)
_LIARS = st.sampled_from(["any", "rows", "all rows"])
_COLUMNS = st.sampled_from(
    [("--prompt-column", "prompt"), ("--prompt-column", "ids"), ("--template", "A dog{{ '.' }} Answer:")]
)
_FLAGS = st.sampled_from(
    [
        (),
        ("--id-column", "id"),
        ("--id-column", "id", "--keep-columns", "kept,prompt"),
        ("--sample", "3", "--id-column", "id"),
        ("--limit", "4", "--id-column", "id"),
    ]
)


def _check(drawn: Any, place: Workplace) -> None:
    """Rows that have a score have that of the file as it was written, and each row has one or an error."""
    writing, edits, liar, column, flags = drawn
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(_ROWS), file, **writing)
    data = file.getvalue()
    Path("in.parquet").write_bytes(_damaged(data, edits, liar))
    words = ["score", "in.parquet", "-m", place.model, "-o", "out.parquet", "--quiet", *column]
    run = prefill(*words, *flags)
    most = {"--sample": 3, "--limit": 4}.get(flags[0] if flags else "", len(_ROWS))
    truth = _scores(place, column)
    found = require_all_rows(run, "in.parquet", most if run.exit_code in (0, 3) else None)
    for number, row in enumerate(found):
        if row["error"] is None:
            name = row.get("id", row.get("row"))
            assert "--sample" in flags or name == number, row
            assert abs(row["score"] - truth[name]) < 1e-5, (row, truth[name])
            assert "kept" not in row or row["kept"] == _ROWS[name]["kept"], row


def _damaged(data: bytes, edits: Any, liar: str) -> bytes:
    """With some numbers of the footer changed: any, those that count rows, or all that count those of a row group."""
    numbers = dict(fields_of(data))
    fields = [
        field for field in numbers if liar == "any" or field.name in ("num_rows", "group.num_rows", "num_values")
    ]
    changed = {}
    for which, other, number in edits:
        field = fields[which % len(fields)]
        now, another = numbers[field], numbers[fields[other % len(fields)]]
        new = {"-1": now - 1, "+1": now + 1, "half": now // 2, "double": 2 * now, "other": another}.get(number, number)
        changed[field] = max(min(int(new), 2**63 - 1), -(2**63))
        if liar == "all rows":  # so that the footer agrees with itself; of fewer rows Arrow reads no others
            groups = {each: now for each, now in numbers.items() if each.name == "group.num_rows"}
            group = list(groups)[which % len(groups)]
            by = abs(changed.pop(field) - now)
            own = [each for each in fields if each.way[:2] == group.way[:2]]
            changed |= {each: numbers[each] + by for each in [fields[0], *own]}
    return with_numbers(data, [(field, max(min(new, 2**63 - 1), -(2**63))) for field, new in changed.items()])


@cache
def _scores(place: Workplace, column: tuple[str, ...]) -> list[float]:
    pq.write_table(pa.Table.from_pylist(_ROWS), "whole.parquet")
    words = ["score", "whole.parquet", "-m", place.model, "-o", "whole-out.parquet", "--quiet", *column]
    assert prefill(*words).exit_code == 0
    return [row["score"] for row in read_output("whole-out.parquet")]


FOOTERS = Fuzzer("footers", st.tuples(_WRITING, _EDITS, _LIARS, _COLUMNS, _FLAGS), _check, per_round=60)
