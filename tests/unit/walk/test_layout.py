"""How tokens are cut into what one call computes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefillcli.walk.attention import ROW_STEP
from prefillcli.walk.layout import split_evenly


@given(total=st.integers(1, 100_000), most=st.integers(1, 10_000))
def test_parts_are_few_and_whole_blocks(total: int, most: int) -> None:
    parts = split_evenly(total, most)
    assert [parts[0][0], *(end for _, end in parts)] == [*(start for start, _ in parts), total]
    lengths = [end - start for start, end in parts]
    assert len(parts) == -(-total // most)
    assert 0 < min(lengths) <= max(lengths) <= most
    assert len(set(lengths[:-1])) <= 1
    if most % ROW_STEP == 0:
        assert all(length % ROW_STEP == 0 for length in lengths[:-1])
