"""The answers a model may give: the one token that stands for each after a prompt, or a class of its head."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.rows import ErrorCode, Window
from prefillcli.errors import UsageError
from prefillcli.stats.evaluation import Measure

LabelSet = tuple[tuple[int, ...], ...]  # token ids of every label's variants

_TAIL_CHARS = 32
_MIN_TAIL_CHARS = 6
_MEMO_TAILS = 50_000
_BREAKS = ("\n", '"', "(")  # texts after which a word begins without a space before it


class LabelError(UsageError):
    """A label is not one token."""


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


class Labels:
    """Finds the tokens of the labels after any prompt; equal sets of tokens are stored once. Threads may share it."""

    measure = Measure.SHARES  # the meaning of an engine's numbers for the labels

    def __init__(self, tokenizer: Any, labels: Sequence[Label]) -> None:
        self.labels = tuple(labels)
        self.names: tuple[str, ...] = tuple(label.name for label in labels)
        self.sets: list[LabelSet] = []  # grows as prompts are seen; `Prompt.labels` points into it
        self._encoder = Encoder(tokenizer)
        self._index: dict[LabelSet, int] = {}
        self._memo: OrderedDict[tuple[str, bool], int | LabelError] = OrderedDict()
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
        """Raise the LabelError if the labels fail after every prompt of the job's first window."""
        for error in window.errors.values():
            if not window.prompts and error.code == ErrorCode.LABEL_NOT_ONE_TOKEN:
                raise LabelError(error.detail)

    def resolve_all(self, tails: Sequence[str], *, literal: bool = False) -> list[int | LabelError]:
        """For every tail (see `tail_of`) an index into `sets`, or why a label is not one token there.

        `literal`: the tails are of prompts as `Controls.respell` writes them.
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

    def _resolve_new(self, tails: Sequence[str], literal: bool) -> list[int | LabelError]:
        # Tokenise every tail, alone and before every spelling, in one batch.
        controls = self._encoder.controls
        spellings = [s for label in self.labels for s in label.variants or (f" {label.name}", label.name)]
        ends = ["", *(controls.respell(spelling) if literal else spelling for spelling in spellings)]
        ids = iter(self._encode([tail + end for tail in tails for end in ends], literal))
        found: list[int | LabelError] = []
        for tail in tails:
            base = next(ids)
            follow = {spelling: self._following(base, next(ids), spelling) for spelling in spellings}
            try:
                shown = controls.shown(tail) if literal else tail
                found.append(self._set_index(self._choose(shown, base, follow)))
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

    def _choose(self, tail: str, base: list[int], follow: dict[str, list[int]]) -> LabelSet:
        bare = tail[-1:].isspace() or not base or base[-1] in self._encoder.special_ids
        chosen: list[tuple[int, ...]] = []
        owner: dict[int, str] = {}
        for label in self.labels:
            if label.variants is not None:
                ids = [self._one_token(label, variant, follow[variant], tail) for variant in label.variants]
            else:
                spaced = f" {label.name}"
                take_spaced = not bare and self._is_one_token(follow[spaced])
                spelling = spaced if take_spaced else label.name
                if not bare and not self._is_one_token(follow[spelling]):
                    spelling = spaced  # neither fits: the message shows the usual spelling
                ids = [self._one_token(label, spelling, follow[spelling], tail)]
            for number in ids:
                if owner.setdefault(number, label.name) != label.name:
                    token = self._encoder.tokens([number])[0]
                    raise LabelError(
                        f"labels {owner[number]!r} and {label.name!r} are the same token {token!r}\n"
                        "choose labels (or variants) that the tokenizer tells apart"
                    )
            chosen.append(tuple(dict.fromkeys(ids)))
        return tuple(chosen)

    def _is_one_token(self, ids: list[int]) -> bool:
        return len(ids) == 1 and ids[0] != self._encoder.unknown_id

    def _one_token(self, label: Label, spelling: str, ids: list[int], tail: str) -> int:
        if self._is_one_token(ids):
            return ids[0]
        tokens = self._encoder.tokens(ids)
        what = f"{len(ids)} tokens {tokens}" if len(ids) != 1 else f"unknown to the tokenizer ({tokens[0]})"
        raise LabelError(
            f"label {label.name!r} is not one token: after a prompt that ends in {tail[-20:]!r}, "
            f"{spelling!r} is {what}\n"
            f"choose another label, or name the spellings to look at: --labels '{label.name}= Yes|yes,...'"
        )

    def _set_index(self, chosen: LabelSet) -> int:
        index = self._index.setdefault(chosen, len(self.sets))
        if index == len(self.sets):
            self.sets.append(chosen)
        return index

    def _encode(self, texts: Sequence[str], literal: bool = False) -> list[list[int]]:
        return [tokens.tolist() for tokens in self._encoder.encode(texts, special=False, literal=literal)]


class ClassLabels(Labels):
    """The labels that some outputs of a head stand for.

    `outputs` has the number of each label's output, alone in a tuple; ~number is the complement of an output: its
    probability is 1 minus that of the output.
    """

    def __init__(self, labels: Sequence[Label], outputs: LabelSet, measure: Measure) -> None:
        self.labels = tuple(labels)
        self.names = tuple(label.name for label in labels)
        self.sets = [outputs]
        self.measure = measure

    def resolve_all(self, tails: Sequence[str], *, literal: bool = False) -> list[int | LabelError]:
        """The one set of labels for each prompt, however it ends."""
        return [0] * len(tails)
