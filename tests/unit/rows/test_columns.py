"""The columns of an output: their order, their types, and what the manual says of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from prefillcli.rows.output.columns import COLUMNS
from prefillcli.rows.records import ScoredRow
from tests.unit.rows.outputs import LABELS, make_window, open_sink, read, scored

ROOT = Path(__file__).parents[3]
RESULT = {
    "score": "double",
    **{f"logprob_{label}": "double" for label in LABELS},
    "label_mass": "double",
    "prediction": "string",
    "prompt_tokens": "int64",
    "shared_tokens": "int64",
    "kept_tokens": "int64",
    "computed_tokens": "int64",
    "seconds": "double",
    "method": "string",
    "truncated": "bool",
    "error": "string",
    "error_detail": "string",
}
AUDIT = {"audit_score": "double", "audit_prediction": "string"}


@pytest.mark.parametrize("audit", [False, True])
def test_the_columns_of_an_output_have_their_order_and_types(tmp_path: Path, audit: bool) -> None:
    output = str(tmp_path / "o.parquet")
    window = make_window(0, [0, 1, 2], bad=(2,))
    both = ScoredRow(1, scored(1).logprobs, 1, 2, 3, 0.5, "specprefill", np.log([0.1, 0.2, 0.6]) if audit else None)
    with open_sink(output, groups=frozenset({"audit"} if audit else ())) as sink:
        sink.write(window, [scored(0), both], {}, temperature=2.0)
        sink.finish(1)
    schema = pq.read_schema(output)
    wanted = {"id": "string", "kept": "int64"} | RESULT | (AUDIT if audit else {})
    assert {field.name: str(field.type) for field in schema} == wanted
    assert schema.names == list(wanted)
    if audit:
        weights = np.sqrt([0.1, 0.2, 0.6])
        assert [row["audit_prediction"] for row in read(output)] == [None, "Maybe", None]
        assert [row["audit_score"] for row in read(output)] == [None, pytest.approx(weights[0] / weights.sum()), None]


def test_the_manual_lists_the_columns_in_their_order() -> None:
    table = (ROOT / "docs" / "score.md").read_text().partition("\n| column |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (.*?) \| .+ \|$", table, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    of_questions = [name for name in names if name.startswith("<name>")]
    listed = dict.fromkeys(name for name in names if name not in of_questions)
    assert list(listed) == ["row", *dict.fromkeys(column.name for column in COLUMNS)]  # some have one of several types
