"""What local attention hides."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from prefillcli.walk.layout import KeyWindow, oldest_key, query_blocks

windows = st.builds(KeyWindow, st.integers(1, 30), aligned=st.booleans())


@given(windows, st.integers(0, 100))
def test_a_query_sees_what_transformers_masks_show(window: KeyWindow, depth: int) -> None:
    if window.aligned:
        mask = chunked_causal_mask_function(window.size, torch.zeros(1, dtype=torch.long))
    else:
        mask = sliding_window_causal_mask_function(window.size)
    seen = [key for key in range(120) if bool(mask(0, 0, torch.tensor(depth), torch.tensor(key)))]
    assert seen == list(range(max(0, oldest_key(window, depth)), depth + 1))


@given(st.none() | windows, st.integers(0, 50), st.integers(0, 80), st.integers(0, 99), st.integers(1, 40))
def test_blocks_of_queries_are_in_one_part(
    window: KeyWindow | None, start: int, tokens: int, depth: int, most: int
) -> None:
    blocks = list(query_blocks(window, start, start + tokens, depth, most))
    assert [token for block in blocks for token in range(*block)] == list(range(start, start + tokens))
    for first, end in blocks:
        assert end - first <= most
        if window and window.aligned:
            own = [window.oldest(depth + token - start) for token in range(first, end)]
            assert len(set(own)) == 1
