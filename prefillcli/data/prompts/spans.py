"""Where the tokens of a prompt lie in its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.data.rows import Prompt


class Spans(NamedTuple):
    """A prompt's text, and of each token its first character and the one after its last: int32 [tokens, 2]."""

    text: str
    offsets: npt.NDArray[np.int32]


def spans_of(tokenizer: Any, prompts: Sequence[Prompt]) -> Mapping[int, Spans] | None:
    """The spans of each prompt by its row number; None where a tokenizer has none, or texts do not give the tokens.

    The text is the tokens decoded. It stands for the prompt only if it is tokenised to the same ids again, so a
    prompt cut in the middle of a letter, or ids that no text leads to, have none.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    found = {}
    for prompt in prompts:
        spans = _spans(tokenizer, prompt.tokens.tolist())
        if spans is None:
            return None
        found[prompt.row] = spans
    return found


def _spans(tokenizer: Any, ids: list[int]) -> Spans | None:
    special = set(tokenizer.all_special_ids)
    start = next((at for at, token in enumerate(ids) if token not in special), len(ids))
    # As it stands, special tokens spelled out; else without those in front, which the tokenizer puts there itself.
    for part, add in ((ids, False), (ids[start:], True)):
        text = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        coded = tokenizer(text, add_special_tokens=add, return_offsets_mapping=True, verbose=False)
        if coded["input_ids"][: len(ids)] == ids:
            return Spans(text, np.array(coded["offset_mapping"][: len(ids)], np.int32).reshape(-1, 2))
    return None
