"""Which rows of which window are audited."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.core.request import AuditDraw, draw
from prefillcli.rows.input.selection import Selection
from prefillcli.rows.records import Window

ALL = Selection()


def window(index: int, rows: np.ndarray) -> Window:
    return Window(index, rows.astype(np.int64), [], {}, pa.table({}))


def cut(rows: np.ndarray, size: int) -> list[Window]:
    """Windows of so many rows, the last one smaller."""
    return [window(index, rows[at : at + size]) for index, at in enumerate(range(0, len(rows), size))]


@given(total=st.integers(1, 3000), size=st.integers(1, 400), wanted=st.integers(1, 400))
def test_the_windows_together_audit_as_many_rows_as_were_asked_for(total: int, size: int, wanted: int) -> None:
    audit = AuditDraw(wanted, ALL, total)
    drawn = [len(audit.draw(each, range(len(each.rows)))) for each in cut(np.arange(total), size)]
    if wanted <= total:
        assert sum(drawn) == wanted
    else:
        assert sum(drawn) == total
    share = wanted * size / total
    assert max(drawn) <= min(size, share + 1)


@pytest.mark.parametrize("limit", [1, 64, 999, 1000])
def test_with_a_limit_all_are_drawn_before_it(limit: int) -> None:
    audit = AuditDraw(20, Selection(limit), 1000)
    drawn = sum(len(audit.draw(each, range(len(each.rows)))) for each in cut(np.arange(limit), 100))
    assert drawn == min(20, limit)


@pytest.mark.parametrize(("sample", "seed"), [(500, 0), (500, 1), (2000, 2), (9999, 3)])
def test_of_a_sample_as_many_are_drawn(sample: int, seed: int) -> None:
    selection = Selection.draw(sample, 10_000, seed)
    audit = AuditDraw(100, selection, 10_000)
    windows = cut(selection.within(0, 10_000), 250)
    assert sum(len(audit.draw(each, range(len(each.rows)))) for each in windows) == 100


@given(st.integers(0, 60), st.integers(-3, 80), st.integers(0, 9))
def test_a_draw_is_random_but_the_same_every_time(rows: int, count: int, number: int) -> None:
    candidates = [f"row {i:03d}" for i in range(rows)]
    found = draw(range(rows), count, number)
    assert found == draw(list(range(rows)), count, number)
    assert len(found) == min(max(count, 0), rows) == len({candidates[i] for i in found})
