"""The tokenizer that a GGUF file describes, by llama.cpp's rules.

A file has the tokens, their types and merges or scores. Most else follows from two names in it: the kind of tokenizer
(`tokenizer.ggml.model`) and how it splits texts (`tokenizer.ggml.pre`). Source: `llama_vocab::impl::load` and
`llm_tokenizer_bpe` of llama.cpp's `src/llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from prefillcli.errors import UsageError, brief, out_of_resource

_KEYS = "tokenizer.ggml."
_AS_SAFETENSORS = "take the model as safetensors"

# What is read besides the kind, `pre`, tokens and types.
_KINDS = _BYTE_LEVEL, _SENTENCEPIECE, _GEMMA4 = "gpt2", "llama", "gemma4"
_READ = {
    "model", "pre", "tokens", "token_type", "merges", "scores", "add_space_prefix", "add_bos_token", "add_eos_token",
    "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id",
}  # fmt: skip
# What changes no token of a prompt, in llama.cpp either: where generation ends and what it avoids, how text is filled
# in, and what other kinds of tokenizers read.
_WITHOUT_EFFECT = {
    "token_type_count", "eot_token_id", "eom_token_id", "seperator_token_id", "separator_token_id", "cls_token_id",
    "mask_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id",
    "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
    "suppress_tokens", "add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap",
    "normalizer.lowercase", "normalizer.strip_accents",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Split:
    """How texts are split before their letters are merged: each pattern splits what those before it left.

    `whole`: a word that is a token is not merged. `begins`: texts begin with BOS unless the file says otherwise.
    `lines`: words are lines of letters, with ▁ for a space; else they are bytes.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    lines: bool = False


def _words(
    numbers: str = r"\p{N}",
    letters: str = r"\p{L}+",
    *,
    marks: str = "",
    ending: str = r"[\r\n]*",
    lines: str = r"[\r\n]+",
) -> str:
    # As Llama 3 and Qwen 2 split texts.
    return (
        rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{numbers}| ?[^\s\p{{L}}{marks}\p{{N}}]+{ending}"
        rf"|\s*{lines}|\s+(?!\S)|\s+"
    )


def _cased(numbers: str, contracted: str = "") -> str:
    # As GPT-4o splits texts: also where a capital follows small letters.
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"{before}{upper}*{lower}+{contracted}|{before}{upper}+{lower}*{contracted}|{numbers}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3, _QWEN2 = _words(_THREE_DIGITS), _words()
_GPT4O = _cased(_THREE_DIGITS, _CONTRACTED + "?")
_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_DEEPSEEK_V3 = (_THREE_DIGITS, _CHINESE, _DEEPSEEK + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_DEEPSEEK_LETTERS = (
    "A-Za-z"
    "\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CLAUSES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BY_LINES = r"[^\n]+|\n+"
_KOREAN_AND_CHINESE = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _CHINESE
)
_MANY_SPACES = "|".join(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"

# By `tokenizer.ggml.pre`. Where llama.cpp approximates the pattern that a model was trained with, and says so, this is
# the model's own.
SPLITS: dict[str, _Split] = {
    name: split
    for names, split in (
        (
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            _Split((_LLAMA3,), whole=True, begins=True),
        ),
        ("dbrx smaug-bpe chatglm-bpe", _Split((_LLAMA3,))),
        ("glm4 glm5", _Split((_LLAMA3,), whole=True)),
        ("minicpm5", _Split((_THREE_DIGITS, _words(r"\p{N}+")), whole=True)),
        ("jais-2", _Split((_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _MANY_SPACES,))),
        ("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", _Split((_QWEN2,))),
        ("qwen35", _Split((_words(letters=r"[\p{L}\p{M}]+", marks=r"\p{M}"),))),
        ("ufakzeka", _Split((_QWEN2.removeprefix(_CONTRACTED + "|"),))),
        ("laguna", _Split((_BY_LINES, _QWEN2))),
        ("seed-coder", _Split((_QWEN2.replace(r"| ?[^\s\p{L}\p{N}]+[\r\n]*|", r"| ?[^\s\p{L}\p{N}\r\n]+|"),))),
        (
            "bailingmoe bailingmoe2 llada-moe",
            _Split(
                (
                    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
                    r"|\s+(?!\S)|\s+",
                )
            ),
        ),
        (
            "exaone-moe",
            _Split((_words(letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", ending=r"[\r\n/]?", lines=r"[\r\n]"),)),
        ),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", _Split((_GPT4O,))),
        ("tekken", _Split((_cased(_DIGIT),), whole=True, begins=True)),
        ("youtu", _Split((_KOREAN_AND_CHINESE, _cased(_DIGIT, _CONTRACTED + "?")), whole=True)),
        ("tiny_aya cohere2moe", _Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _Split(_DEEPSEEK_V3)),
        ("spark2_5", _Split((_THREE_DIGITS, _CHINESE, _DEEPSEEK + r"|[\r\n]|\s+(?!\S)|\s+", _DIGIT))),
        (
            "deepseek-llm",
            _Split(
                (
                    r"[\r\n]",
                    rf"\s?[{_DEEPSEEK_LETTERS}]+",
                    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                    r"\s+$",
                    _IDEOGRAPHS,
                    r"\p{N}+",
                )
            ),
        ),
        ("deepseek-coder", _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, _DIGIT))),
        ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling", _Split((_GPT2,))),
        ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _Split((_DIGIT, _GPT2))),
        ("falcon", _Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
        ("default", _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
        ("bloom poro-chat gpt3-finnish", _Split((_CLAUSES,))),
        ("viking", _Split((_CLAUSES, _DIGIT))),
        ("superbpe", _Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
        ("gemma4", _Split((_BY_LINES,), begins=True, lines=True)),
        ("sarvam-moe", _Split((_BY_LINES,), lines=True)),
    )
    for name in names.split()
}

# The types of tokens. Those of `_WHOLE_TEXTS` are found in a text as they are spelled, before it is split.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_WHOLE_TEXTS = (_UNKNOWN, _CONTROL, _USER_DEFINED)

# Tokens that are of another type than the file says, because converters often miss it: those that end an answer,
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<\uff5cend\u2581of\u2581sentence\uff5c> [e~["
)
# those around text to be filled in, where the file does not name them by these keys,
_FILLED_IN = {
    "fim_pre_token_id": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
    "<|code_prefix|> <|prefix|>",
    "fim_suf_token_id": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> "
    "<|code_suffix|> <|suffix|>",
    "fim_mid_token_id": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> "
    "<|code_middle|> <|middle|>",
    "fim_pad_token_id": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep_token_id": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep_token_id": "<|file_sep|>",
}
# and those of gpt-oss.
_SHOWN = "<|channel|> <|message|> <|start|> <|constrain|>"

# What llama.cpp takes where a file does not name it. (For byte-level ones it takes token 11, which is Falcon's.)
_DEFAULT_IDS = {_SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0}}
_PLAIN_IN_PHI3 = ("<unk>", "<s>", "<|endoftext|>")


def unknown_settings(fields: Mapping[str, Any]) -> list[str]:
    """Return the tokenizer's settings in a file's header that are not known here, and so not applied."""
    known = {_KEYS + name for name in _READ | _WITHOUT_EFFECT}
    return [name for name in fields if name.startswith(_KEYS) and name not in known]


def is_split_unknown(fields: Mapping[str, Any]) -> bool:
    """Return whether a file does not say how its tokenizer splits texts, though it has one that does."""
    return fields.get(_KEYS + "model") == _BYTE_LEVEL and not fields.get(_KEYS + "pre")


def make_tokenizer(fields: Mapping[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a file of all `fields` of its header, with whole arrays.

    Raises UsageError, whose message begins with `path`, for settings that are not read, and where a token that is to
    be found in texts would not be.
    """
    return _Maker(fields, path).tokenizer()


class _Maker:
    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        self._fields, self._path = fields, path
        self._kind = self._get("model")
        if self._kind is None:
            raise self._refusal("model is missing, so it has no tokenizer")
        if self._kind not in _KINDS:
            raise self._refusal(f"model is {self._kind!r}, which is not read; {', '.join(_KINDS)} are")
        self._tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(self._list("tokens"))]
        self._ids = {token: number for number, token in enumerate(self._tokens)}
        for number, token in enumerate(self._tokens):
            if self._ids[token] != number:
                raise self._refusal(f"tokens has {token!r} twice, as {number} and {self._ids[token]}")
        self._types = self._own_types()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        try:
            backend, begins = self._sentencepiece() if self._kind == _SENTENCEPIECE else self._merged()
        except Exception as error:  # the tokenizers library raises plain ones
            if isinstance(error, UsageError) or out_of_resource(error):
                raise
            raise UsageError(
                f"{self._path}: no tokenizer can be made of it: {brief(error)}\n{_AS_SAFETENSORS}"
            ) from None
        backend.add_tokens([self._added(number) for number, kind in enumerate(self._types) if kind in _WHOLE_TEXTS])
        self._check_found(backend)
        self._surround(backend, begins)
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            **{name: self._named(key) for name, key in names.items()},
            chat_template=self._fields.get("tokenizer.chat_template"),
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
        )

    def _merged(self) -> tuple[Tokenizer, bool]:
        # Byte-level BPE, or that of whole lines; and whether texts begin with BOS by default.
        name = _GEMMA4 if self._kind == _GEMMA4 else self._get("pre") or "default"
        split = SPLITS.get(name)
        if split is None:
            raise self._refusal(f"pre is {name!r}, a way to split texts that is not known")
        merges = [_halves(merge) for merge in self._list("merges")]
        backend = Tokenizer(
            models.BPE(vocab=self._ids, merges=merges, ignore_merges=split.whole, byte_fallback=split.lines)
        )
        splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
        if split.lines:
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        else:
            splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            backend.decoder = decoders.ByteLevel()
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
        return backend, split.begins

    def _sentencepiece(self) -> tuple[Tokenizer, bool]:
        # Pieces of a whole text, joined in the order of their scores: merges of all that a token can be made of.
        scores = self._list("scores")
        merges = [
            (token[:at], token[at:])
            for token, number in sorted(self._ids.items(), key=lambda each: (-scores[each[1]], each[1]))
            for at in range(len(token) - 1, 0, -1)
            if token[:at] in self._ids and token[at:] in self._ids
        ]
        unknown = self._id("unknown")
        backend = Tokenizer(
            models.BPE(
                vocab=self._ids,
                merges=merges,
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaced = self._flag("add_space_prefix", True)  # before each text between such tokens
        escape: list[Any] = [normalizers.Prepend("▁")] if spaced else []
        backend.normalizer = normalizers.Sequence([*escape, normalizers.Replace(" ", "▁")])
        strip: list[Any] = [decoders.Strip(" ", 1, 0)] if spaced else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend, True

    def _surround(self, backend: Tokenizer, begins: bool) -> None:
        # Let texts begin with BOS and end with EOS, as the file has it.
        begins = self._flag("add_bos_token", begins) or self._kind == _GEMMA4  # whose files are often wrong
        wanted = {"bos": begins, "eos": self._flag("add_eos_token", False)}
        ids = {name: self._id(name) for name, is_wanted in wanted.items() if is_wanted}
        if "bos" in ids and ids["bos"] is None:
            raise self._refusal("bos_token_id names no token, and texts are to begin with one")
        around = {name: number for name, number in ids.items() if number is not None}
        if around:
            special = [{"id": name, "ids": [id_], "tokens": [self._tokens[id_]]} for name, id_ in around.items()]
            first, last = (f"{name} " * (name in around) for name in ("bos", "eos"))
            backend.post_processor = processors.TemplateProcessing(
                single=f"{first}$A {last}".strip(),
                pair=f"{first}$A {last}{first}$B:1 {last}".strip(),
                special_tokens=special,
            )

    def _check_found(self, backend: Tokenizer) -> None:
        numbers = [number for number, kind in enumerate(self._types) if kind in _WHOLE_TEXTS]
        found = backend.encode_batch_fast([self._tokens[number] for number in numbers], add_special_tokens=False)
        for number, coded in zip(numbers, found, strict=True):
            if coded.ids != [number]:
                raise self._refusal(
                    f"tokens has {self._tokens[number]!r} as {number}, which would not be found in texts"
                )

    def _added(self, number: int) -> AddedToken:
        token = self._tokens[number]
        name = str(self._fields.get("general.name", "")).lower()
        drops_spaces = ("phi-3" in name or "phi3" in name) and token not in _PLAIN_IN_PHI3
        return AddedToken(token, normalized=False, special=self._types[number] != _USER_DEFINED, rstrip=drops_spaces)

    def _own_types(self) -> list[int]:
        types = self._list("token_type") if _KEYS + "token_type" in self._fields else [_NORMAL] * len(self._tokens)
        types = types[: len(self._tokens)]

        def change(names: str, kind: int) -> None:
            for name in names.split():
                if name in self._ids:
                    types[self._ids[name]] = kind

        change(_ENDS, _CONTROL)
        for key, names in _FILLED_IN.items():
            if self._get(key) is None:
                change(names, _CONTROL)
        change(_SHOWN, _USER_DEFINED)
        if any(names <= self._ids.keys() for names in ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})):
            change("<|end|>", _USER_DEFINED)
        if not self._ids.keys().isdisjoint(["<|tool_response>", "<|plamo:eos|>"]):
            change("</s>", _NORMAL)
        return types

    def _named(self, name: str) -> str | None:
        # A token by its name in templates, if it is no plain text.
        number = self._id(name)
        return self._tokens[number] if number is not None and self._types[number] in _WHOLE_TEXTS else None

    def _id(self, name: str) -> int | None:
        number = self._get(f"{name}_token_id", _DEFAULT_IDS.get(self._kind, {}).get(name))
        return int(number) if type(number) is int and 0 <= number < len(self._tokens) else None

    def _flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self._refusal(f"{name} is {value!r}, which is neither true nor false")
        return bool(value)

    def _list(self, name: str) -> list[Any]:
        value = self._get(name)
        least = 0 if name in ("tokens", "merges") else len(self._tokens)
        if not isinstance(value, list) or len(value) < least:
            raise self._refusal(f"{name} is missing, or too short")
        return value

    def _get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(_KEYS + name, default)

    def _refusal(self, why: str) -> UsageError:
        return UsageError(f"{self._path}: {_KEYS}{why}\n{_AS_SAFETENSORS}")


def _halves(merge: Any) -> tuple[str, str]:
    at = str(merge).find(" ", 1)
    return str(merge)[:at], str(merge)[at + 1 :]
