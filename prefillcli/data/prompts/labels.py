"""The answers a model may give: the tokens of each after a prompt, or a class of the model's head."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.rows import ErrorCode, Int32Array, TokenText, Window
from prefillcli.errors import UsageError
from prefillcli.plan.behind import LabelSet, LabelTokens
from prefillcli.stats.evaluation import Measure

_TAIL_CHARS = 32
_MIN_TAIL_CHARS = 6
_MEMO_TAILS = 50_000
_BREAKS = ("\n", '"', "(")  # texts after which a word begins without a space before it


class LabelError(UsageError):
    """A label cannot follow a prompt, whose row gets the error `code`."""

    def __init__(self, detail: str, code: ErrorCode = ErrorCode.INVALID_LABELS) -> None:
        super().__init__(detail)
        self.code = code


class Label(NamedTuple):
    """An answer. `variants` are its literal spellings; None: its name, after a space where one fits."""

    name: str
    variants: tuple[str, ...] | None = None


def parse_labels(labels: str | Sequence[str], *, least: int = 2) -> tuple[Label, ...]:
    r"""Labels of `--labels`: `Yes,No`, or `Yes= Yes|yes|YES,No= No|no` with literal variants.

    A list has one label per item. A backslash before `,` `|` `=` or `\` takes it literally. Raises UsageError
    if there are fewer than `least` labels, an empty one, or one name twice.
    """
    items = _split(labels, ",") if isinstance(labels, str) else list(labels)
    parsed = tuple(_parse_label(item) for item in items)
    if len(parsed) < least:
        raise UsageError(f"--labels {labels!r}: at least two labels are needed, as in Yes,No")
    names = [label.name for label in parsed]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--labels {labels!r}: label {name!r} is given twice")
    return parsed


def require_values(values: Sequence[float], names: Sequence[str]) -> None:
    """Raise UsageError unless these are one finite number for each label, and not all the same."""
    given = ",".join(f"{value:g}" for value in values)
    if len(values) != len(names):
        raise UsageError(
            f"--label-values {given}: {len(values)} numbers for {len(names)} labels: {', '.join(names)}\n"
            "give one number for each label, in the order of --labels"
        )
    if not np.isfinite(values).all() or len(set(values)) == 1:
        raise UsageError(
            f"--label-values {given}: the numbers must be finite, and not all the same\n"
            "give each label its place on a scale, as in 1,2,3,4,5"
        )


def complementary(label: Label, other: Label | None = None) -> tuple[Label, Label]:
    """A label and its complement, which right answers may also name as 1 and 0."""
    other = other or Label(f"not {label.name}")
    return (label._replace(variants=label.variants or ("1",)), other._replace(variants=other.variants or ("0",)))


def label_of(answer: str | int | float | bool | None, labels: Sequence[Label]) -> int | None:
    """The number of the label that a right answer of a data set stands for; None if it is not a label.

    It may be a label's name or one of its spellings. With two labels, true and 1 otherwise mean the first, false and 0
    the second.
    """
    number = _named(answer, labels)
    if number is None and len(labels) == 2 and answer in (0, 1):
        return int(not answer)
    return number


def _named(answer: str | int | float | bool | None, labels: Sequence[Label]) -> int | None:
    # The number of the label with this name or spelling; true and 1 are the same, and so are false and 0.
    if answer is None:
        return None
    texts = [str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer).strip()]
    if answer in (0, 1):
        texts += [str(bool(answer)), str(bool(answer)).lower(), str(int(answer))]
    for text in texts:
        for number, label in enumerate(labels):
            if text in (label.name, *(spelling.strip() for spelling in label.variants or ())):
                return number
    return None


def _parse_label(item: str) -> Label:
    name, *spellings = _split(item, "=", 1)
    label = Label(_unescape(name.strip()))
    if not label.name:
        raise UsageError(f"--labels: there is an empty label ({item!r}); separate labels by single commas")
    if not spellings:
        return label
    variants = tuple(dict.fromkeys(_unescape(variant) for variant in _split(spellings[0], "|")))
    if "" in variants:
        raise UsageError(f"--labels: label {label.name!r} has an empty variant")
    return label._replace(variants=variants)


def _split(text: str, mark: str, most: int = 0) -> list[str]:
    # `text` at every `mark` that is not escaped; escapes stay in the parts.
    parts = [""]
    for piece in re.findall(r"\\.|.|\\$", text, re.DOTALL):
        if piece == mark and not (most and len(parts) > most):
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _unescape(text: str) -> str:
    return re.sub(r"\\([,|=\\])", r"\1", text)


def tail_of(text: str) -> str:
    """The end of a prompt that decides how the next word is tokenised, cut where a line or a word starts."""
    end = text[-_TAIL_CHARS:]
    latest = len(end) - _MIN_TAIL_CHARS
    line = end.rfind("\n", 0, max(latest + 1, 0))
    if line >= 0:
        return end[line:]
    for at in range(latest, -1, -1):
        if end[at].isspace():
            return end[at:]
    return end


class Following(NamedTuple):
    """What may follow a prompt: its labels, and the tokens at the prompt's end that these begin with instead."""

    labels: LabelSet
    moved: tuple[int, ...] = ()


Normalisation = Literal["none", "tokens", "bytes"]
#: As `--label-end`: the tokenizer's own token for the end of a text.
EOS = "eos"


class Labels:
    """Finds the tokens of the labels after any prompt. Threads may share it.

    With an `end`, each label ends in this text, or in the tokenizer's end token (`eos`). Scores are made of the
    log-probabilities divided by the labels' numbers of tokens or bytes if `norm` says so. Raises UsageError.
    """

    measure = Measure.SHARES  # the meaning of an engine's numbers for the labels
    columns: tuple[str, ...] = ()  # of the input, whose values `resolve_all` needs
    each: tuple[Labels, ...] = ()  # of several questions, those behind each prompt of a row
    values: tuple[float, ...] = ()  # the number that each label stands for; none unless they are ordered
    # Of the likeliest tokens instead of labels, the text of each by its id.
    token_text: Callable[[int], TokenText] | None = None
    _typed = True  # whether the user has written the labels: control tokens in them are meant

    def __init__(
        self, tokenizer: Any, labels: Sequence[Label], *, norm: Normalisation = "none", end: str | None = None
    ) -> None:
        self.labels = tuple(labels)
        self.names: tuple[str, ...] = tuple(label.name for label in labels)
        self._encoder = Encoder(tokenizer)
        self._norm = norm
        self._end = end
        self._end_ids: list[int] = []
        if end == EOS:
            if (eos := getattr(tokenizer, "eos_token_id", None)) is None:
                raise UsageError("--label-end eos: the tokenizer has no end token\ngive a text, like '.'")
            self._end, self._end_ids = None, [int(eos)]
        self._known: dict[LabelSet, LabelSet] = {}  # equal sets are stored once
        self._memo: OrderedDict[tuple[str, bool], Following | LabelError] = OrderedDict()
        self._alone: dict[str, list[int]] = {}
        self._resolving = threading.Lock()

    @property
    def with_absence(self) -> tuple[Label, ...]:
        """The labels that right answers may name: with a single label, also its absence."""
        if len(self.labels) > 1:
            return self.labels
        return complementary(self.labels[0])

    def is_positive(self, answer: str | int | float | bool | None) -> bool | None:
        """Whether a right answer, as a data set has it, is the first label; None if it is not a label.

        It may be a label's name or one of its spellings, or else true or false, 1 or 0.
        """
        number = _named(answer, self.labels)
        if number is not None:
            return number == 0
        return bool(answer) if answer in (0, 1) else None

    def check(self, window: Window) -> None:
        """Raise the LabelError if the labels fail after every prompt of the job's first window. Labels that rows bring
        fail for these rows alone."""
        if self.columns:
            return
        for error in window.errors.values():
            if not window.prompts and error.code == ErrorCode.INVALID_LABELS:
                raise LabelError(error.detail)

    def resolve_all(
        self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
    ) -> list[Following | LabelError]:
        """For every tail (see `tail_of`) the tokens of the labels after it, or why a label cannot follow it.

        `literal`: the tails are of prompts as `Controls.respell` writes them. `values` are those of the row's
        `columns`, for each tail.
        """
        keys = [(tail, literal) for tail in tails]
        with self._resolving:
            new = [key for key in dict.fromkeys(keys) if key not in self._memo]
            found = dict(zip(new, self._resolve_new([tail for tail, _ in new], literal), strict=True))
            result = [found[key] if key in found else self._memo[key] for key in keys]
            self._memo |= found
            while len(self._memo) > _MEMO_TAILS:
                self._memo.popitem(last=False)
        return result

    def _resolve_new(self, tails: Sequence[str], literal: bool) -> list[Following | LabelError]:
        # Tokenise every tail, alone and before every spelling, in one batch.
        controls = self._encoder.controls
        spellings = [s for label in self.labels for s in label.variants or (f" {label.name}", label.name)]
        ends = ["", *(controls.respell(spelling) if literal else spelling for spelling in spellings)]
        ids = iter(self._encode([tail + end for tail in tails for end in ends], literal))
        found: list[Following | LabelError] = []
        for tail in tails:
            base = next(ids)
            follow = {spelling: self._following(base, next(ids), spelling) for spelling in spellings}
            shown = controls.shown(tail) if literal else tail
            try:
                chosen = self._single_tokens(shown, base, follow)
                if chosen is None:
                    own = self._sequences(tail, base, self.labels, literal=literal)
                else:
                    own = Following(self._sized(LabelSet.of(chosen), self.labels))
                found.append(own._replace(labels=self._known.setdefault(own.labels, own.labels)))
            except LabelError as error:
                found.append(error)
        return found

    def _following(self, base: list[int], whole: list[int], spelling: str) -> list[int]:
        # The tokens of `spelling` after the tokens `base`, where `whole` are those of the joined text.
        if whole[: len(base)] == base:
            return whole[len(base) :]
        if spelling not in self._alone:  # the end of the prompt and the word become one token
            self._alone[spelling] = self._standing_alone(spelling)
        return self._alone[spelling]

    def _standing_alone(self, spelling: str) -> list[int]:
        # The tokens of a word that merges with nothing before it.
        ids = iter(self._encode([text for mark in _BREAKS for text in (mark, mark + spelling)]))
        candidates = []
        for base, whole in zip(ids, ids, strict=True):
            if whole[: len(base)] == base and len(whole) > len(base):
                candidates.append(whole[len(base) :])
        return min(candidates, key=len, default=[])

    def _is_bare(self, tail: str, base: Sequence[int]) -> bool:
        # Whether a word that follows has no space of its own before it.
        return tail[-1:].isspace() or not base or base[-1] in self._encoder.special_ids

    def _single_tokens(self, tail: str, base: list[int], follow: dict[str, list[int]]) -> list[list[int]] | None:
        # The tokens of labels that are all one token; None if one is longer, or has an end.
        if self._end is not None or self._end_ids:
            return None
        bare = self._is_bare(tail, base)
        chosen: list[list[int]] = []
        owner: dict[int, str] = {}
        for label in self.labels:
            spellings = label.variants
            if spellings is None:
                spaced = f" {label.name}"
                spellings = (spaced if not bare and self._is_one_token(follow[spaced]) else label.name,)
            if not all(self._is_one_token(follow[spelling]) for spelling in spellings):
                return None
            ids = [follow[spelling][0] for spelling in spellings]
            for number in ids:
                if owner.setdefault(number, label.name) != label.name:
                    raise _alike(owner[number], label.name, self._encoder.tokens([number]))
            chosen.append(list(dict.fromkeys(ids)))
        return chosen

    def _is_one_token(self, ids: list[int]) -> bool:
        return len(ids) == 1 and ids[0] != self._encoder.unknown_id

    def _sequences(self, tail: str, base: list[int], labels: Sequence[Label], *, literal: bool) -> Following:
        # Labels of any length, by the rule of lm-evaluation-harness (`TemplateLM._encode_pair`): white space at the
        # prompt's end goes to the labels, whose tokens are those of the whole text behind those of the prompt.
        controls = self._encoder.controls
        stripped = tail.rstrip()
        bare = self._is_bare(tail, base)
        spellings = [
            label.variants or (label.name if bare or label.name[:1].isspace() else f" {label.name}",)
            for label in labels
        ]
        texts = [spelling for own in spellings for spelling in own]
        end = self._end or ""
        if literal:
            end, texts = controls.respell(end), [controls.respell(text) for text in texts] if self._typed else texts
        texts = [text + end for text in texts]
        before, *wholes = self._encode([stripped, *(tail + text for text in texts)], literal)
        if not before or base[: len(before)] != before:  # the white space is part of a token that begins before it
            before = base
        found = iter(wholes)
        ends = np.array(self._end_ids, np.int32)
        sequences = [[np.array([*next(found)[len(before) :], *ends], np.int32) for _ in own] for own in spellings]
        self._require_distinct(labels, sequences, controls.shown(tail) if literal else tail)
        chosen = LabelSet(tuple(tuple(_without_longer(own)) for own in sequences))
        return Following(self._sized(chosen, labels), tuple(base[len(before) :]))

    def _require_distinct(self, labels: Sequence[Label], sequences: Sequence[Sequence[Int32Array]], tail: str) -> None:
        # Raise LabelError for a label without tokens, with an unknown one, or which begins another label.
        ends = len(self._end_ids)
        known: dict[bytes, int] = {}
        for number, own in enumerate(sequences):
            for tokens in own:
                if len(tokens) <= ends:
                    raise LabelError(
                        f"label {labels[number].name!r} has no tokens of its own after a prompt "
                        f"that ends in {tail[-20:]!r}"
                    )
                if self._encoder.unknown_id is not None and self._encoder.unknown_id in tokens:
                    raise LabelError(
                        f"label {labels[number].name!r} has a token that is unknown to the tokenizer "
                        f"({self._encoder.tokenizer.unk_token})\nchoose another label"
                    )
                other = known.setdefault(tokens.tobytes(), number)
                if other != number:
                    raise _alike(labels[other].name, labels[number].name, self._encoder.tokens(tokens.tolist()))
        for number, own in enumerate(sequences):
            for tokens in own:
                for length in range(1, len(tokens)):
                    other = known.get(tokens[:length].tobytes(), number)
                    if other != number:
                        raise LabelError(
                            f"label {labels[other].name!r} begins label {labels[number].name!r}, and its probability "
                            "holds the other's\ntell them apart by an end: --label-end eos, or a text"
                        )

    def _sized(self, chosen: LabelSet, labels: Sequence[Label]) -> LabelSet:
        # With the sizes that scores are made with.
        if self._norm == "bytes":
            sizes = tuple(float(len((label.variants or (label.name,))[0].strip().encode()) or 1) for label in labels)
            chosen = replace(chosen, sizes=sizes)
        elif self._norm == "tokens" and chosen.single is None:
            chosen = replace(chosen, sizes=tuple(float(len(own[0])) for own in chosen.spellings))
        return chosen

    def _encode(self, texts: Sequence[str], literal: bool = False) -> list[list[int]]:
        return [tokens.tolist() for tokens in self._encoder.encode(texts, special=False, literal=literal)]


def _alike(one: str, other: str, tokens: Sequence[str]) -> LabelError:
    what = f"token {tokens[0]!r}" if len(tokens) == 1 else f"tokens {list(tokens)}"
    return LabelError(
        f"labels {one!r} and {other!r} are the same {what}\nchoose labels (or variants) that the tokenizer tells apart"
    )


def _without_longer(spellings: Sequence[Int32Array]) -> list[Int32Array]:
    # The spellings of a label that no other one begins: a longer one's probability is part of the other's.
    texts = {each.tobytes(): each for each in spellings}
    return [own for own in texts.values() if not any(own[:length].tobytes() in texts for length in range(1, len(own)))]


class ClassLabels(Labels):
    """The labels that some outputs of a head stand for.

    `outputs` has the number of each label's output, alone in a tuple; ~number is the complement of an output: its
    probability is 1 minus that of the output.
    """

    def __init__(self, labels: Sequence[Label], outputs: LabelTokens, measure: Measure) -> None:
        self.labels = tuple(labels)
        self.names = tuple(label.name for label in labels)
        self.outputs = outputs
        self.measure = measure
        self._following_all = Following(LabelSet.of(outputs))

    def resolve_all(
        self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
    ) -> list[Following | LabelError]:
        """The one set of labels for each prompt, however it ends."""
        return [self._following_all] * len(tails)
