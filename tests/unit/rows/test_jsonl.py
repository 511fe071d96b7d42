"""JSON Lines: one bad line is one error row, one bad file is an error that names it."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.errors import PrefillError, UsageError
from prefillcli.rows.input.source import BadLine, Source, parse
from prefillcli.rows.records import RowError

Write = Callable[..., str]


def read(path: str, columns: tuple[str, ...] = ("prompt",), carried: tuple[str, ...] = (), **options: Any) -> Any:
    """All values by column, all errors, all carried rows."""
    source = Source.open([path], columns=columns, carried=carried, **options)
    values: dict[str, list[Any]] = {name: [] for name in columns}
    errors: dict[int, RowError] = {}
    kept: list[Any] = []
    for batch in source.batches():
        for name in columns:
            values[name] += batch.columns[name]
        errors |= batch.errors
        kept += batch.carried.to_pylist()
    return values, errors, kept


def test_every_bad_line_is_one_error_row_and_the_others_are_read(write_jsonl: Write) -> None:
    path = write_jsonl(
        [
            {"prompt": "zero"},
            b'{"prompt": "cut',
            b'{"prompt": "\xff\xfe"}',
            b"[1, 2]",
            b"3",
            {"other": 1},
            b"[" * 100_000,
            b"1" * 5000,
            {"prompt": "eight"},
        ]
    )
    values, errors, _ = read(path)
    assert {row: error.code for row, error in errors.items()} == {
        1: "invalid_json",
        2: "invalid_utf8",
        3: "wrong_type",
        4: "wrong_type",
        5: "missing_column",
        6: "invalid_json",
        7: "invalid_json",
    }
    assert values["prompt"][0] == "zero"
    assert values["prompt"][8] == "eight"
    assert "'prompt'" in errors[5].detail


def test_blank_lines_are_no_rows_and_a_bom_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt":"a"}\r\n\r\n  \n\n{"prompt":"b"}')
    values, errors, _ = read(str(path))
    assert values["prompt"] == ["a", "b"]
    assert not errors


def zipped(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(data, 1))
    return str(path)


def test_millions_of_blank_lines_are_not_read_one_by_one(tmp_path: Path) -> None:
    blank = [b"\n" * (24 << 20), b" \r\n" * (4 << 20), b" " * 300_000 + b"\n", b"\n\t" * 40 + b"\n", b"\n"]
    path = zipped(tmp_path, b"".join(b'{"prompt":"%d"}\n%s' % each for each in enumerate(blank)))
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([arg.__name__] if event == "c_call" else []))
    try:
        values, errors, _ = read(path)
    finally:
        sys.setprofile(None)
    assert 5 < calls["readline"] < 1000
    assert values["prompt"] == ["0", "1", "2", "3", "4"]
    assert not errors


def test_blank_lines_that_do_not_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefillcli.rows.input.source._MAX_BLANK_BYTES", 1 << 20)
    few, many = b"\n" * (1 << 20), b"\n" * (3 << 19)
    found = read(zipped(tmp_path, b'{"prompt":"a"}' + few + b'{"prompt":"b"}' + few))
    assert found[0]["prompt"] == ["a", "b"]
    with pytest.raises(PrefillError, match=r"a\.jsonl\.gz: more than 1,048,576 bytes of blank lines in a row"):
        read(zipped(tmp_path, b'{"prompt":"a"}' + many + b'{"prompt":"b"}'))


def test_nan_and_infinity_are_null_and_so_is_what_no_float_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt":NaN,"n":[1,Infinity,1e400,-1e400,1e3]}\n')
    values, errors, kept = read(str(path), carried=("n",))
    assert values["prompt"] == [None]
    assert json.loads(kept[0]["n"]) == [1, None, None, None, 1000.0]
    assert not errors


def test_a_line_of_many_megabytes_is_one_row(write_jsonl: Write) -> None:
    text = "x" * (10 << 20)
    path = write_jsonl([{"prompt": text}, {"prompt": "next"}])
    values, _, _ = read(path)
    assert values["prompt"] == [text, "next"]


def test_carried_values_are_json_text_and_absent_ones_null(write_jsonl: Write) -> None:
    objects = [{"prompt": "p", "k": value} for value in (1, 2.5, "a\u00e9", [1, {"b": None}], True, None)]
    _, errors, kept = read(write_jsonl([*objects, {"prompt": "p"}]), carried=("k",))
    assert not errors
    assert [row["k"] and json.loads(row["k"]) for row in kept] == [
        1,
        2.5,
        "a\u00e9",
        [1, {"b": None}],
        True,
        None,
        None,
    ]


def test_half_a_surrogate_pair_in_a_kept_value_is_an_error_of_that_row(write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "p", "k": "\ud800"}, {"prompt": "p", "k": "\U0001f600"}])
    _, errors, kept = read(path, carried=("k",))
    assert list(errors) == [0]
    assert errors[0].code == "invalid_utf8"
    assert json.loads(kept[1]["k"]) == "\U0001f600"


def compressed(data: bytes, ending: str) -> bytes:
    return gzip.compress(data) if ending == "gz" else pa.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_files_are_read_also_in_several_members(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(compressed(b'{"prompt":"a"}\n', ending) + compressed(b'{"prompt":"b"}\n', ending))
    assert read(str(path))[0]["prompt"] == ["a", "b"]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_cut_file_yields_what_came_before_and_then_fails_by_name(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl.{ending}"
    draw = random.Random(0)
    lines = b"".join(b'{"prompt":"%d"}\n' % draw.getrandbits(400) for _ in range(12_000))
    data = compressed(lines, ending)
    path.write_bytes(data[: len(data) // 2])
    rows: list[int] = []
    batches = Source.open([str(path)], columns=["prompt"]).batches()
    with pytest.raises(PrefillError, match=r"a\.jsonl") as caught:
        rows.extend(row for batch in batches for row in batch.rows)
    assert rows == list(range(len(rows)))
    assert len(rows) > 2048
    assert caught.value.exit_code == 1


def test_a_file_that_is_no_json_lines_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "pretty.json"
    path.write_text(json.dumps([{"prompt": "a"}], indent=1))
    with pytest.raises(UsageError, match=r"pretty\.json: it is one JSON array"):
        Source.open([str(path)], columns=["prompt"])


def test_a_column_on_none_of_the_first_lines_is_a_usage_error_that_lists_the_others(write_jsonl: Write) -> None:
    path = write_jsonl([{"text": "a", "id": 1}] * 3)
    with pytest.raises(UsageError, match=r"'prompt'(.|\n)*text, id"):
        Source.open([path], columns=["prompt"])


def test_a_column_that_only_later_lines_have_counts_as_there(write_jsonl: Write) -> None:
    values, errors, _ = read(write_jsonl([{"text": "a"}] * 99 + [{"prompt": "b"}]))
    assert values["prompt"][99] == "b"
    assert len(errors) == 99


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_a_line_is_read_as_the_json_module_reads_it(row: dict[str, Any]) -> None:
    line = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
    parsed = parse(line)
    if isinstance(parsed, BadLine):
        assert parsed.error.code == "invalid_utf8"
    else:
        assert parsed == row


@given(st.binary(max_size=30))
def test_no_line_of_bytes_breaks_the_reader(line: bytes) -> None:
    parsed = parse(line)
    assert isinstance(parsed, dict | BadLine)


def test_odd_names_of_columns_stay_on_one_line_of_a_message(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": 1, "a\r\nb": 2, "": 3, "long" * 10_000: 4}))
    with pytest.raises(UsageError, match="no column 'prompt'") as refused:
        Source.open([str(path)], columns=("prompt",))
    assert str(refused.value).splitlines()[1].startswith(r"available: text, 'a\r\nb', '', 'longlong")
    assert len(str(refused.value)) < 400
