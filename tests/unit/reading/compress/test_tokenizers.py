"""Whether two tokenizers mean the same by their ids, for every kind of tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from prefillcli.models.open import difference

TEXTS = ["Is the topic in the history? Answer: Yes", "The garden, the train and the river. Answer: No"] * 9
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
Json = dict[str, Any]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "Yes": 3, "No": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


KINDS = {"byte level": byte_level(), "unigram": unigram(), "words": word_level()}


def fast(tokenizer: Tokenizer, change: Callable[[Json], object] = lambda content: None, **options: Any) -> Any:
    """A transformers tokenizer of a changed copy."""
    content = json.loads(tokenizer.to_str())
    change(content)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **SPECIAL, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_do_not_differ(kind: str, tmp_path: Path) -> None:
    target = fast(KINDS[kind])
    target.save_pretrained(tmp_path / "elsewhere")
    assert difference(target, target) is None
    assert difference(target, copy.deepcopy(target)) is None
    assert difference(target, AutoTokenizer.from_pretrained(tmp_path / "elsewhere")) is None


@pytest.mark.parametrize("kind", KINDS)
def test_names_lengths_chats_and_what_comes_before_a_text_do_not_count(kind: str) -> None:
    def nothing_before(content: Json) -> None:
        content["post_processor"] = None
        content["truncation"] = {"direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0}

    other = fast(KINDS[kind], nothing_before, model_max_length=77, chat_template="{{ messages }}")
    other.name_or_path = "elsewhere"
    assert difference(fast(KINDS[kind]), other) is None


def swap(content: Json, one: str, other: str) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


@pytest.mark.parametrize("kind", ["byte level", "words"])
def test_other_ids_are_named_with_a_token(kind: str) -> None:
    target = fast(KINDS[kind])
    one, other = ("a", "b") if kind == "byte level" else ("No", "Yes")
    draft = fast(KINDS[kind], lambda content: swap(content, one, other))
    ids = " and ".join(str(tokenizer.get_vocab()[one]) for tokenizer in (target, draft))
    assert difference(target, draft) == f"2 tokens have other ids, {one!r} for one: {ids}"


def test_a_token_that_one_of_them_lacks_is_a_difference_both_ways() -> None:
    target, draft = fast(KINDS["words"]), fast(KINDS["words"])
    draft.add_tokens(["Perhaps"])
    assert difference(target, draft) == "1 tokens have other ids, 'Perhaps' for one: absent and 5"
    assert difference(draft, target) == "1 tokens have other ids, 'Perhaps' for one: 5 and absent"


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        ("byte level", lambda c: c["model"]["merges"].reverse(), "merges or pieces"),
        ("byte level", lambda c: c["model"].update(ignore_merges=True), "merges or pieces"),
        ("unigram", lambda c: c["model"]["vocab"][-1].__setitem__(1, -0.5), "merges or pieces"),
        ("byte level", lambda c: c.update(normalizer={"type": "NFC"}), "normalisation"),
        ("words", lambda c: c.update(normalizer={"type": "Lowercase"}), "normalisation"),
        ("byte level", lambda c: c["pre_tokenizer"].update(add_prefix_space=True), "splitting into words"),
        ("words", lambda c: c.update(pre_tokenizer={"type": "WhitespaceSplit"}), "splitting into words"),
    ],
)
def test_the_same_vocabulary_can_be_used_otherwise(kind: str, change: Callable[[Json], object], what: str) -> None:
    found = difference(fast(KINDS[kind]), fast(KINDS[kind], change))
    assert found == f"the same vocabulary, but another {what}"


def test_tokenizers_that_are_not_of_the_library_are_known_by_their_vocabulary() -> None:
    assert difference(ByT5Tokenizer(), ByT5Tokenizer()) is None
    found = difference(ByT5Tokenizer(), fast(KINDS["byte level"]))
    assert found is not None
    assert "other ids" in found
