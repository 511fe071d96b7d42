"""Prompts in the tokens of another tokenizer, and importance mapped back: for every pair of kinds of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from prefillcli.core.request import Tick
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.trie import TokenArray
from prefillcli.prompts.encoding import Encoder
from prefillcli.prompts.translation import TEXT, Overlap, Translation, Translator
from prefillcli.reading.compress.draft import spread
from prefillcli.reading.compress.load import SpecPrefill
from prefillcli.reading.compress.selection import FAILED, FALLBACKS, ImportanceEstimate
from prefillcli.rows.records import Prompt
from prefillcli.stats.arrays import Float32Array

TEXTS = [
    "The quick brown fox, the lazy dog; 12 of 340.\n",
    "naïve café, 你好世界 and שלום عالم 👩‍👧‍👦 🙂\n",
    "a b c d e f",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SCRIPTS = [
    "the fox dog, 12.",
    "你好世界漢字",
    "👩‍👧‍👦🙂🏽🇩🇪",
    "a\u0301e\u0308o\u0323\u0307",
    "שלום عالم",
    " \n\t",
    "é½ﬁﬀİß",
    "\u200d\ufeff\x00",
]
MIXED = st.lists(st.sampled_from(SCRIPTS).flatmap(lambda script: st.text(script, max_size=8)), max_size=10).map(
    "".join
)


def transformers_tokenizer(tokenizer: Tokenizer, bos: str | None, **options: Any) -> Any:
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, **options)


def byte_level(*special: str, size: int = 400) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return transformers_tokenizer(tokenizer, "<s>")


def unigram(*special: str, byte_fallback: bool = True, normalizer: Any = None) -> Any:
    known = ["<unk>", "<s>", *special, *(BYTES if byte_fallback else [])]
    pieces = [(piece, 0.0) for piece in known]
    pieces += [(piece, -2.0) for piece in ("▁the", "▁fox", "▁dog", "th")] + [
        (letter, -6.0) for letter in "▁the foxdgiu,12."
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", *special)])
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers_tokenizer(tokenizer, "<s>", unk_token="<unk>")


def sentencepiece_bpe() -> Any:
    vocabulary = {piece: at for at, piece in enumerate(["<unk>", "<s>", *BYTES, *"▁thefoxdgiu,12.", "th", "▁th"])}
    merges = [("t", "h"), ("▁", "th")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers_tokenizer(tokenizer, "<s>", unk_token="<unk>")


def word_piece() -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return transformers_tokenizer(tokenizer, "[CLS]", unk_token="[UNK]")


KINDS = {
    "byte level": byte_level(),
    "unigram": unigram(),
    "unigram, normalised": unigram(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "SentencePiece BPE": sentencepiece_bpe(),
    "words": word_piece(),
}
PAIRS = [pair for pair in product(KINDS, repeat=2) if pair[0] != pair[1]]
TRANSLATORS = {(target, draft): Translator(KINDS[target], KINDS[draft]) for target, draft in product(KINDS, repeat=2)}


def mapped(found: Translation, votes: Float32Array) -> Float32Array:
    """Votes of one query on the target's tokens, from those on the draft's."""
    votes_on: Float32Array = spread(found.overlap, torch.from_numpy(votes)[None])[0].numpy()
    return votes_on


def tokens_of(tokenizer: Any, text: str) -> TokenArray:
    return np.array(tokenizer(text)["input_ids"], np.int32)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@settings(max_examples=30)
@given(MIXED)
@example("👩‍👧‍👦" * 30 + "你好" * 40)
def test_every_token_overlaps_tokens_of_the_draft_or_the_prompt_falls_back(target: str, draft: str, text: str) -> None:
    tokens = tokens_of(KINDS[target], text)
    (found,) = TRANSLATORS[target, draft].translate([tokens])
    if isinstance(found, str):
        assert found in FALLBACKS
        return
    assert len(found.overlap.first) == len(found.overlap.width) == len(tokens)
    ends = found.overlap.first + found.overlap.width
    assert found.overlap.width.min() >= 1
    assert ends.max() <= len(found.tokens)
    assert (np.diff(found.overlap.first) >= 0).all()
    assert (np.diff(ends) >= 0).all()
    assert np.isfinite(mapped(found, np.ones(len(found.tokens), np.float32))).all()


@pytest.mark.parametrize("draft", ["byte level", "unigram", "SentencePiece BPE"])
@given(MIXED)
def test_a_draft_that_knows_all_bytes_reads_every_text(draft: str, text: str) -> None:
    """Also one cut in the middle of a letter, which no text leads to."""
    target = KINDS["byte level"]
    for tokens in (tokens_of(target, text + "x"), tokens_of(target, text + "x🙂")[:-2]):
        (found,) = TRANSLATORS["byte level", draft].translate([tokens])
        assert isinstance(found, Translation)
        text_read = target.decode(tokens[1:])
        assert found.tokens.tolist() == KINDS[draft](text_read)["input_ids"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["byte level", "unigram", "SentencePiece BPE"])
@given(MIXED, st.randoms(use_true_random=False))
def test_the_same_tokenizer_maps_each_token_to_itself(kind: str, text: str, random: Any) -> None:
    tokens = tokens_of(KINDS[kind], text + "fox")
    (found,) = TRANSLATORS[kind, kind].translate([tokens])
    assert isinstance(found, Translation)
    if found.tokens.tolist() == tokens.tolist():  # not where a text has the bytes of other letters
        importance = np.array([random.random() for _ in tokens], np.float32)
        assert mapped(found, importance).tobytes() == importance.tobytes()
    else:
        assert KINDS[kind].decode(tokens[1:]) != text + "fox"


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_word_is_as_important_as_the_drafts_tokens_of_that_word(target: str, draft: str) -> None:
    """Which those are, the tokenizers library says itself."""
    text = "the fox, the dog 12 the fox"
    own, other = (KINDS[kind](text, return_offsets_mapping=True) for kind in (target, draft))
    place = text.index("dog"), text.index("dog") + 3
    importance = np.array([float(overlaps(at, place)) for at in other["offset_mapping"]], np.float32)
    (found,) = TRANSLATORS[target, draft].translate([np.array(own["input_ids"], np.int32)])
    assert isinstance(found, Translation)
    assert found.tokens.tolist() == other["input_ids"]
    votes = mapped(found, importance)
    for at, value in zip(own["offset_mapping"], votes.tolist(), strict=True):
        if overlaps(at, place):
            assert value == 1.0
        elif at[1] and text[at[0] : at[1]].strip() and not overlaps(at, (place[0] - 1, place[1])):
            assert value == 0.0


def overlaps(one: Sequence[int], other: Sequence[int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


@given(MIXED)
def test_bytes_say_where_a_token_lies_as_the_library_does(text: str) -> None:
    coded = KINDS["byte level"](text, return_offsets_mapping=True, add_special_tokens=False)
    translator = TRANSLATORS["byte level", "unigram"]
    if coded["input_ids"]:
        found = translator._places_by_bytes(coded["input_ids"], text)
        assert found is not None
        assert list(map(tuple, found.tolist())) == coded["offset_mapping"]
        assert translator._places_by_bytes(coded["input_ids"], text + "x") is None


def test_only_byte_level_tokens_are_known_by_their_bytes() -> None:
    known = {kind: Encoder(tokenizer).bytes_of_tokens() is not None for kind, tokenizer in KINDS.items()}
    assert known == {kind: kind == "byte level" for kind in KINDS}


@given(st.text("你好世界", min_size=1, max_size=40))
def test_letters_spelled_in_bytes_are_found_each_near_its_own_place(text: str) -> None:
    """The library gives the bytes of a run of unknown letters the place of the whole run."""
    coded = KINDS["byte level"](text, return_offsets_mapping=True)
    (found,) = TRANSLATORS["byte level", "unigram"].translate([np.array(coded["input_ids"], np.int32)])
    assert isinstance(found, Translation)
    assert len(found.tokens) == 2 + 3 * len(text)
    firsts, widths = found.overlap.first[1:].astype(int), found.overlap.width[1:].astype(int)
    for first, width, (start, end) in zip(firsts, widths, coded["offset_mapping"][1:], strict=True):
        assert 3 * start - 3 <= first < first + width <= 3 * end + 5


def test_control_tokens_are_the_drafts_own_of_that_name_or_plain_text() -> None:
    target, draft = byte_level("<|end|>", "<|user|>"), unigram("<|end|>")
    text = "the fox<|end|>the dog<|user|>the"
    tokens = np.array(target(text)["input_ids"], np.int32)
    (found,) = Translator(target, draft).translate([tokens])
    assert isinstance(found, Translation)
    read = draft.convert_ids_to_tokens(found.tokens)
    assert read[0] == "<s>"
    assert read.count("<|end|>") == 1
    assert "<|user|>" not in read
    end = draft.convert_tokens_to_ids("<|end|>")
    votes = mapped(found, (found.tokens == end).astype(np.float32))
    assert votes.tolist() == [float(token == target.convert_tokens_to_ids("<|end|>")) for token in tokens.tolist()]


def test_text_of_the_data_becomes_no_control_token_of_the_draft() -> None:
    target, draft = byte_level(), unigram("<|end|>")
    (found,) = Translator(target, draft).translate([tokens_of(target, "the <|end|> fox")])
    assert isinstance(found, Translation)
    assert draft.convert_tokens_to_ids("<|end|>") not in found.tokens.tolist()


def test_a_draft_that_does_not_know_the_letters_reads_no_prompt() -> None:
    target, draft = KINDS["byte level"], unigram(byte_fallback=False)
    known, unknown = tokens_of(target, "the fox, the dog the fox 12 the, 你"), tokens_of(target, "你好世界 the")
    found = Translator(target, draft).translate([known, unknown, known])
    assert [found[1]] == [TEXT]
    assert all(isinstance(each, Translation) for each in (found[0], found[2]))


def test_a_prompt_without_text_is_read_in_full() -> None:
    target, draft = KINDS["byte level"], unigram()
    start = np.array([target.bos_token_id] * 3, np.int32)
    assert Translator(target, draft).translate([start]) == [TEXT]
    assert TRANSLATORS["byte level", "words"].translate([tokens_of(target, " \n \n")]) == [TEXT]


class FoundBefore:
    """A draft that finds each token as important as its number."""

    tokens = 0
    failure = None

    def estimate(
        self, prompts: Sequence[TokenArray], tick: Tick, overlaps: Sequence[Overlap] | None = None
    ) -> list[ImportanceEstimate]:
        assert overlaps is not None
        votes = [torch.arange(float(len(tokens)))[None] for tokens in prompts]
        found = [spread(overlap, own)[0].numpy() for own, overlap in zip(votes, overlaps, strict=True)]
        return [ImportanceEstimate(importance, voters=(1,)) for importance in found]

    def close(self) -> None:
        pass


def rows(prompts: Sequence[TokenArray]) -> list[Prompt]:
    return [Prompt(row, tokens, LabelSet(())) for row, tokens in enumerate(prompts)]


def test_prompts_that_cannot_be_read_leave_the_others_their_own_estimates() -> None:
    target, draft = KINDS["byte level"], unigram(byte_fallback=False)
    prompts = [tokens_of(target, text) for text in ("the fox", "你好", "the dog the", "世界")]
    found = SpecPrefill(FoundBefore(), Translator(target, draft)).estimate(rows(prompts), lambda tokens: None)
    assert [each.reason for each in found] == [None, TEXT, None, TEXT]
    for at in (0, 2):
        importance = found[at].importance
        assert importance is not None
        assert len(importance) == len(prompts[at])
        assert (np.diff(importance) >= 0).all()
        assert found[at].voters == (1,)
    assert all(each.seconds > 0 for each in found)


def test_a_tokenizer_that_fails_on_a_prompt_costs_that_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = KINDS["byte level"]
    prompts = [tokens_of(target, text) for text in ("the fox", "the dog", "a fox")]
    translator = Translator(target, KINDS["unigram"])
    translate = translator.translate

    def failing(given: Sequence[TokenArray]) -> list[Translation | str]:
        if any(tokens is prompts[1] for tokens in given):
            raise RuntimeError("a normaliser went wrong")
        return translate(given)

    monkeypatch.setattr(translator, "translate", failing)
    draft = SpecPrefill(FoundBefore(), translator)
    assert [each.reason for each in draft.estimate(rows(prompts), lambda tokens: None)] == [None, FAILED, None]
    assert str(draft.failure) == "a normaliser went wrong"
