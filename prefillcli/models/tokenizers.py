"""Tokenizers: loaded, where their files are of a size that fits the model, and compared with one another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefillcli.errors import PrefillError, UsageError, brief, out_of_resource
from prefillcli.models.files import check_files, read_json, refuse_code_elsewhere

_TOKENIZER = "tokenizer.json"
_VOCABULARIES = ("vocab.json", "added_tokens.json")
_BESIDE = 1 << 16  # tokens beside twice those that the model embeds
_TOKEN_BYTES = 256  # of such a file for each of them: with merges and blanks, large ones have 130

#: What makes tokens of a text, in the files of the tokenizers library, and how to call it.
_PARTS = {
    "model": "merges or pieces",
    "normalizer": "normalisation",
    "pre_tokenizer": "splitting into words",
}


def load_tokenizer(folder: Path, *, embedded: int, trust_remote_code: bool, said: str) -> Any:
    """transformers' tokenizer of a folder, for a model that embeds so many tokens.

    Raises UsageError that begins with what is `said`, and before anything is made of files whose vocabulary is out of
    all proportion to the model: tables are made that are as long as its largest id.
    """
    from transformers import AutoTokenizer

    check_files(folder)
    if trust_remote_code:
        refuse_code_elsewhere(folder)
    most = 2 * embedded + _BESIDE
    for name in (_TOKENIZER, *_VOCABULARIES):
        if (folder / name).is_file():
            _check_vocabulary(folder / name, most)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain ones
        if isinstance(error, PrefillError) or out_of_resource(error):
            raise
        raise UsageError(f"{said}: {brief(error)}") from None


def _check_vocabulary(file: Path, most: int) -> None:
    """Raise UsageError for a vocabulary of more than `most` tokens, or ids beyond."""
    content = read_json(file, most=_TOKEN_BYTES * most)
    for vocabulary in _vocabularies(content) if file.name == _TOKENIZER else [content]:
        if not isinstance(vocabulary, dict | list):
            continue
        ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
        largest = max((number for number in ids if type(number) is int), default=0)
        if max(len(vocabulary), largest) > most:
            what = f"{len(vocabulary):,} tokens" if len(vocabulary) > most else f"a token with the id {largest:,}"
            raise UsageError(f"{file}: has {what}; for this model it may have {most:,} at most")


def _vocabularies(content: Any) -> Iterator[Any]:
    """Those of a `tokenizer.json`: a mapping or a list of tokens, and the added ones."""
    if isinstance(content, dict):
        model, added = content.get("model"), content.get("added_tokens")
        yield model.get("vocab") if isinstance(model, dict) else None
        if isinstance(added, list):
            yield {at: each.get("id") for at, each in enumerate(added) if isinstance(each, dict)}


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
