"""The tokenizer of the sample draft that reads texts in its own way: pieces of whole words, as in SentencePiece.

It differs from the byte-level BPE of the other sample models where it matters for a map from one to the other: a space
is a mark before a word, a number that is seen often is one piece, a rare word is spelled letter by letter, and a
letter that is not in the vocabulary is its bytes of UTF-8.
"""

from collections import Counter
from collections.abc import Iterable
from math import log

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from training.sample_tokenizer import BOS, EOS, LONGEST, sample_texts

UNKNOWN, SPACE = "<unk>", "▁"
OFTEN = 12  # times that a word must be seen to be a piece


def train_word_tokenizer(
    texts: Iterable[str] | None = None, *, often: int = OFTEN, longest: int = LONGEST
) -> PreTrainedTokenizerFast:
    """A Unigram model of words and letters with byte fallback, counted on `texts`: by default on those of the other
    tokenizer. A word is a piece that is seen `often`; `longest` is the longest prompt."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never"),
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    words: Counter[str] = Counter()
    for text in sample_texts(0, 200) if texts is None else texts:
        words.update(word for word, _ in split.pre_tokenize_str(text))
    total = words.total()
    known = {word: log(count / total) for word, count in sorted(words.items()) if count >= often}
    letters = sorted(set("".join(words)) - known.keys())
    rare = log(1 / total)  # a word is never spelled where it is a piece
    specials = [UNKNOWN, BOS, EOS]
    pieces = [(piece, 0.0) for piece in specials + [f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += [*known.items(), *((letter, rare) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, specials.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        pad_token=EOS,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
