"""Parquet, JSON Lines and CSV files with wrong bytes in them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.command import prefill
from tests.fuzz.damage import byte_edits, edited
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.workplace import Workplace

_ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"The fox saw {'a dog ' * (number % 4)}and {number}. Answer:",
        "id": number,
        "kept": [{"role": "user", "content": "ä" * number}],
        "ids": list(range(1, number + 2)),
    }
    for number in range(12)
]
_WRITING = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
        "use_dictionary": st.booleans(),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "row_group_size": st.sampled_from([3, 12]),
        "data_page_size": st.sampled_from([16, 1 << 20]),
        "write_page_checksum": st.booleans(),
        "write_statistics": st.booleans(),
        "store_schema": st.booleans(),
    }
)
_FLAGS = st.sampled_from(
    [
        (),
        ("--id-column", "id"),
        ("--keep-columns", "kept"),
        ("--id-column", "prompt", "--keep-columns", "kept,ids"),
        ("--prompt-column", "ids"),
        ("--prompt-column", "kept"),
        ("--sample", "3"),
        ("--limit", "2"),
    ]
)


def _check_parquet(drawn: Any, place: Workplace) -> None:
    writing, edits, at_end, flags = drawn
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(_ROWS), file, **writing)
    data = file.getvalue()
    middle = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    body, footer = data[:middle], data[middle:]  # which is small, and says where all else lies
    data = body + edited(footer, edits) if at_end else edited(body, edits) + footer
    Path("in.parquet").write_bytes(data)
    run = prefill("score", "in.parquet", "-m", place.model, "-o", "out.parquet", "--quiet", *flags)
    require_all_rows(run, "in.parquet")


def _check_jsonl(drawn: Any, place: Workplace) -> None:
    edits, name, flags = drawn
    data = b"".join(json.dumps(row).encode() + b"\n" for row in _ROWS)
    if name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    elif name.endswith(".zst"):
        data = pa.compress(data, codec="zstd", asbytes=True)
    Path(name).write_bytes(edited(data, edits))
    run = prefill("score", name, "-m", place.model, "-o", "out.jsonl", "--quiet", *flags)
    require_all_rows(run, name)


def _check_csv(drawn: Any, place: Workplace) -> None:
    edits, name, flags, most = drawn
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "id", "kept", "ids"], delimiter="\t" if ".tsv" in name else ",")
    writer.writeheader()
    writer.writerows(row | {"kept": f'{row["kept"]}\n"' * (row["id"] % 3)} for row in _ROWS)
    data = edited(text.getvalue().encode(), edits)
    Path(name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    quoting = ("--csv-quoting", "quotes" if most == "90" else "none") if ".tsv" in name else ()
    words = ["--quiet", "--max-row-bytes", most, *quoting, *flags]
    run = prefill("score", name, "-m", place.model, "-o", "out.csv", *words)
    require_all_rows(run, name)


def _check_output(drawn: Any, place: Workplace) -> None:
    """Every command that reads an output says what is wrong, and `--resume` makes a whole one or refuses."""
    edits, output, chosen, resumed = drawn
    pq.write_table(pa.Table.from_pylist(_ROWS), "in.parquet")
    words = ["score", "in.parquet", "-m", place.model, "-o", output, "--quiet", "--id-column", "id"]
    assert prefill(*words, "--keep-columns", "prompt").exit_code == 0
    files = sorted(path for path in Path().rglob("*") if path.is_file() and path.name != "in.parquet")
    file = files[chosen % len(files)]
    before = file.read_bytes()
    file.write_bytes(edited(before, edits))
    os.utime(file, ns=(1, 1))
    found = prefill("verify", output, "in.parquet")
    if file.read_bytes() != before and file.suffix in (".parquet", ".jsonl", ".csv"):
        assert found.exit_code != 0, file
    prefill("status", output)
    prefill("calibrate", output, "--truth-from", "in.parquet", "--truth", "prompt", "-o", "c.json")
    if resumed:
        run = prefill(*words, "--keep-columns", "prompt", "--resume")
        assert run.exit_code in (0, 2, 4), run.stderr


PARQUET = Fuzzer("parquet", st.tuples(_WRITING, byte_edits, st.booleans(), _FLAGS), _check_parquet, per_round=100)
JSONL = Fuzzer(
    "jsonl",
    st.tuples(byte_edits, st.sampled_from(["in.jsonl", "in.jsonl.gz", "in.jsonl.zst"]), _FLAGS),
    _check_jsonl,
    per_round=60,
)
CSV = Fuzzer(
    "csv",
    st.tuples(byte_edits, st.sampled_from(["in.csv", "in.tsv", "in.csv.gz"]), _FLAGS, st.sampled_from(["90", "1MiB"])),
    _check_csv,
    per_round=60,
)
OUTPUTS = Fuzzer(
    "outputs",
    st.tuples(
        byte_edits, st.sampled_from(["out.parquet", "out.jsonl", "out.csv", "out/"]), st.integers(0, 10), st.booleans()
    ),
    _check_output,
    per_round=30,
)
