"""Whether two models mean the same by their token ids."""

from __future__ import annotations

import json
from typing import Any

#: What makes tokens of a text, in the files of the tokenizers library, and how to call it.
_PARTS = {
    "model": "merges or pieces",
    "normalizer": "normalisation",
    "pre_tokenizer": "splitting into words",
}


def difference(target: Any, draft: Any) -> str | None:
    """In what the content of two transformers tokenizers differs, or None.

    Compared are the vocabularies, with added tokens, and how they make tokens of text; names and paths do not count.
    What is put before a text (BOS) does not either: the draft reads the target's tokens.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        wrong = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        token = wrong[0]
        ids = " and ".join(str(vocabulary.get(token, "absent")) for vocabulary in (ours, theirs))
        return f"{len(wrong):,} tokens have other ids, {token!r} for one: {ids}"
    first, second = (getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (target, draft))
    if first is None or second is None:
        return None
    mine, other = (json.loads(backend.to_str()) for backend in (first, second))
    for part, name in _PARTS.items():
        if mine.get(part) != other.get(part):
            return f"the same vocabulary, but another {name}"
    return None
