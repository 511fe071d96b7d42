"""Texts and values that break programs more often than others."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

CONTROLS = ("<s>", "</s>", "<s", "s>", "[assistant]", "{{", "{%", "\x00", "\ufeff", "\u202e", "\ud7ff")
_PIECES = (
    *CONTROLS,
    "",
    " ",
    "\n",
    "\r\n",
    "\x85",
    "Yes",
    " No",
    "é",
    "日本",
    "🦊",
    "e\u0301",
    "\U0010ffff",
    "x" * 500,
)

texts = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(_PIECES), max_size=6).map("".join),
    st.builds(lambda piece, times: piece * times, st.sampled_from(_PIECES), st.integers(0, 400)),
)
"""Any text without half surrogate pairs."""
broken_texts = st.text(st.characters(categories=["Cs", "L", "Zs"]), max_size=10)
"""Texts that may have halves of surrogate pairs."""

EDGES = (-1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)
"""Whole numbers at which types end."""
numbers = st.one_of(
    st.sampled_from([*EDGES, 0.5, 1e-320, 1e308, -0.0, math.nan, math.inf, -math.inf]),
    st.integers(),
    st.floats(),
)
names = st.sampled_from(
    ["prompt", "id", "messages", "prompt_token_ids", "x", "", "score", "row", "error", "keep", "ä b", "a.b", "key"]
)
"""Of columns: usual ones, those of outputs, and odd ones."""

json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts, broken_texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(["role", "content"]), texts), inner)
    ),
    max_leaves=8,
)
