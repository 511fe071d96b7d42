"""The answers a model may give: the tokens of each after a prompt, or a class of the model's head."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from prefillcli.errors import UsageError, counted
from prefillcli.plan.behind import AnsweringHead, LabelSet, LabelTokens
from prefillcli.prompts.encoding import Controls, Encoder
from prefillcli.prompts.lists import split_list
from prefillcli.prompts.questions import Label, Question, Readout, typed
from prefillcli.rows.records import ErrorCode, Window
from prefillcli.stats.arrays import Int32Array
from prefillcli.stats.labels import Measure

_TAIL_CHARS = 32
_MIN_TAIL_CHARS = 6
_MEMO_TAILS = 50_000


class LabelError(UsageError):
    """A label cannot follow a prompt, whose row gets the error `code`."""

    def __init__(self, detail: str, code: ErrorCode = ErrorCode.INVALID_LABELS) -> None:
        super().__init__(detail)
        self.code = code


def parse_labels(labels: str | Sequence[str], *, least: int = 2) -> tuple[Label, ...]:
    r"""Labels of `--labels`: `Yes,No`, or `Yes= Yes|yes|YES,No= No|no` with literal variants.

    A list has one label per item. In a text they are items of CSV (`split_list`), and a backslash before `|` or `=`
    takes it literally too. Raises UsageError if there are fewer than `least` labels, an empty one, or one name twice.
    """
    try:
        items = split_list(labels, keep_escapes=True) if isinstance(labels, str) else list(labels)
    except ValueError as error:
        raise UsageError(f"--labels {labels!r}: {error}") from None
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
            f"--label-values {given}: {counted(len(values), 'number')} for {counted(len(names), 'label')}: "
            f"{', '.join(names)}\n"
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
    """The number of the label that a right answer in a data set or a spreadsheet stands for; None if it is none.

    It may be a label's name or one of its spellings, also in other case, with other spaces or as another form of the
    number (1.0 for 1), where only one label is like that. Of two labels true, yes and 1 otherwise mean the first,
    false, no and 0 the second, unless the labels are such words themselves.
    """
    number = _named(answer, labels)
    if number is not None or answer is None:
        return number
    said = plain_form(answer)
    near = [at for at, own in enumerate(labels) if said in map(plain_form, (own.name, *(own.variants or ())))]
    if len(near) == 1:
        return near[0]
    if len(labels) != 2 or said not in _OF_TWO:
        return None
    words = [_OF_TWO.get(plain_form(own.name)) for own in labels]
    return words.index(_OF_TWO[said]) if sorted(words, key=str) == [0, 1] else _OF_TWO[said]


_OF_TWO = {"true": 0, "yes": 0, "1": 0, "false": 1, "no": 1, "0": 1}
_WHOLE = re.compile(r"([+-]?\d+)\.0*")


def plain_form(value: str | int | float | bool) -> str:
    """Return what stays the same of a value that went through a spreadsheet: 1.0 is 1, TRUE is true."""
    text = " ".join(str(value).split()).casefold()
    return found[1] if (found := _WHOLE.fullmatch(text)) else text


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
    return re.sub(r"\\([,|=\"\\])", r"\1", text)


def _own_end(text: str) -> int:
    # Where the white space begins that goes to the answer: after the last word or line break.
    end = len(text.rstrip())
    return max(end, text.rfind("\n", end) + 1, text.rfind("\r", end) + 1)


def tail_of(text: str) -> str:
    """The end of a prompt that decides how the next word is tokenised, cut where a line or a word starts. The white
    space at the end is whole."""
    stop = _own_end(text)
    first = max(0, stop - _TAIL_CHARS)
    end = text[first:]
    latest = stop - first - _MIN_TAIL_CHARS
    line = end.rfind("\n", 0, max(latest + 1, 0))
    if line >= 0:
        return end[line:]
    for at in range(latest, -1, -1):
        if end[at].isspace():
            return end[at:]
    return end


class Following(NamedTuple):
    """The answers that may follow a prompt: its labels, and the tokens at the prompt's end that these begin with
    instead.

    `merged` is the end of a text in which the tokenizer joins the prompt's last letters and the answer's first ones.
    """

    labels: LabelSet
    moved: tuple[int, ...] = ()
    merged: str = ""


class PromptEnd(NamedTuple):
    """A prompt's tail (`tail_of`) and its tokens. Answers begin after `context` of them. `literal`: the text is as
    `Controls.respell` writes it; `bare`: a word that follows has no space of its own before it."""

    text: str
    literal: bool
    tokens: list[int]
    context: int
    bare: bool

    @property
    def moved(self) -> tuple[int, ...]:
        """The tokens at the prompt's end with which answers begin instead."""
        return tuple(self.tokens[self.context :])


class Behind(NamedTuple):
    """The tokens of an answer after a prompt; `merged`: they lack letters of the answer, or repeat some of the
    prompt, as the tokenizer joins the two."""

    tokens: list[int]
    merged: bool


def prompt_ends(encoder: Encoder, tails: Sequence[tuple[str, bool]]) -> list[PromptEnd]:
    """The end of each prompt: its tail, and whether that is literal.

    White space at a prompt's end goes to the answer, as in lm-evaluation-harness (`TemplateLM._encode_pair`), but
    never a line break: the tokenizer joins a space with the word after it, and a line break with none.
    """
    before = [text[: _own_end(text)] for text, _ in tails]
    spaced = [at for at, (text, _) in enumerate(tails) if text != before[at]]
    coded = _encode(encoder, [*tails, *((before[at], tails[at][1]) for at in spaced)])
    stripped = dict(zip(spaced, coded[len(tails) :], strict=True))
    found = []
    for at, ((text, literal), tokens) in enumerate(zip(tails, coded, strict=False)):
        own = stripped.get(at, tokens)
        # Without its white space a text may have other tokens: a token that began before holds it.
        context = len(own) if own and tokens[: len(own)] == own else len(tokens)
        bare = text[-1:].isspace() or not tokens or tokens[-1] in encoder.control_ids
        found.append(PromptEnd(text, literal, tokens, context, bare))
    return found


def tokens_behind(encoder: Encoder, asked: Sequence[tuple[PromptEnd, Sequence[str]]]) -> list[list[Behind]]:
    """The tokens of each answer after its prompt: those of the whole text less those of the prompt, as in
    lm-evaluation-harness.

    Where the prompt's last letters and the answer become one token, nothing may be left. Then the answer has the
    tokens of a text that merges with nothing before it.
    """
    wholes = iter(_encode(encoder, [(end.text + text, end.literal) for end, texts in asked for text in texts]))
    found = []
    for end, texts in asked:
        own = []
        for text in texts:
            whole, context = next(wholes), end.tokens[: end.context]
            tokens = whole[len(context) :]
            if whole[: len(context)] == context:
                own.append(Behind(tokens, merged=False))
            else:
                own.append(Behind(tokens or _alone(encoder, text, end.literal), merged=bool(tokens)))
        found.append(own)
    return found


def _alone(encoder: Encoder, text: str, literal: bool) -> list[int]:
    before, whole = _encode(encoder, [("\n", literal), (f"\n{text}", literal)])
    return whole[len(before) :] if whole[: len(before)] == before else []


def _encode(encoder: Encoder, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
    # The tokens of each text, which may be literal.
    found: list[list[int]] = [[] for _ in texts]
    for literal in (False, True):
        places = [at for at, (_, each) in enumerate(texts) if each == literal]
        own = encoder.encode([texts[at][0] for at in places], special=False, literal=literal)
        for at, tokens in zip(places, own, strict=True):
            found[at] = tokens.tolist()
    return found


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
    each: tuple[Labels, ...] = ()  # of several questions, those after each prompt of a row
    question: Question  # whose answers they are
    head: AnsweringHead | None = None  # what answers it instead of the model's next token
    audited: bool = False  # whether the model answers too
    fault = ErrorCode.INVALID_LABELS  # the error of a row whose answers the model has no tokens for
    _typed = True  # whether the user has written the labels: control tokens in them are meant

    def __init__(
        self, tokenizer: Any, question: Question, *, norm: Normalisation = "none", end: str | None = None
    ) -> None:
        self.question = question
        self._encoder = Encoder(tokenizer)
        self._norm = norm
        self._end = end
        self._end_ids: list[int] = []
        if end == EOS:
            if (eos := getattr(tokenizer, "eos_token_id", None)) is None:
                raise UsageError("--label-end eos: the tokenizer has no end token\ngive a text, like '.'")
            self._end, self._end_ids = None, [int(eos)]
        self._known: dict[LabelSet, LabelSet] = {}  # equal sets are stored once
        self._memo: OrderedDict[tuple[Any, ...], Following | LabelError] = OrderedDict()
        self._resolving = threading.Lock()

    @property
    def labels(self) -> tuple[Label, ...]:
        """The answers of the question."""
        return self.question.answers

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return self.question.names

    @property
    def read(self) -> tuple[str, ...]:
        """The names of the labels that are read after its prompt."""
        return tuple(label.name for label in self.question.read.labels)

    @property
    def asked(self) -> tuple[Labels, ...]:
        """The labels after each prompt of a row."""
        return self.each or (self,)

    @property
    def with_absence(self) -> tuple[Label, ...]:
        """The labels that right answers may name: with a single label, also its absence."""
        if len(self.labels) > 1:
            return self.labels
        return complementary(self.labels[0])

    def is_positive(self, answer: str | int | float | bool | None) -> bool | None:
        """Return whether a right answer, as a data set has it, is the first label; None if it is not a label.

        It may be what `label_of` takes, or else true or false, 1 or 0.
        """
        number = label_of(answer, self.labels)
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
        keys = [(tail, literal, *own) for tail, own in zip(tails, values or [()] * len(tails), strict=True)]
        with self._resolving:
            new = [key for key in dict.fromkeys(keys) if key not in self._memo]
            found = dict(zip(new, map(self._shared, self._resolve_new(new)), strict=True))
            result = [found[key] if key in found else self._memo[key] for key in keys]
            self._memo |= found
            while len(self._memo) > _MEMO_TAILS:
                self._memo.popitem(last=False)
        return result

    def _resolve_new(self, keys: Sequence[tuple[Any, ...]]) -> list[Following | LabelError]:
        # For the tail and whether it is literal, followed by the values of columns.
        ends = prompt_ends(self._encoder, [(tail, literal) for tail, literal, *_ in keys])
        return self._behind([(end, self.question.read) for end in ends])

    def _shared(self, found: Following | LabelError) -> Following | LabelError:
        if isinstance(found, LabelError):
            return found
        own = found.labels
        if self.head is not None:
            own = own.answered_by(self.head, None if self.audited else len(self.labels))
        return found._replace(labels=self._known.setdefault(own, own))

    def _behind(self, asked: Sequence[tuple[PromptEnd, Readout]]) -> list[Following | LabelError]:
        # The labels after the end of each prompt.
        found = self._spelt([(end, read.labels) for end, read in asked])
        for at, (own, (_, read)) in enumerate(zip(found, asked, strict=True)):
            if read.weights and isinstance(own, Following):
                found[at] = own._replace(labels=replace(own.labels, weights=read.weights))
        return found

    def _spelt(self, asked: Sequence[tuple[PromptEnd, Sequence[Label]]]) -> list[Following | LabelError]:
        if asked and all(label.tokens for _, labels in asked for label in labels):
            return [self._as_tokens(labels) for _, labels in asked]
        spelled = [[self._spelled(label, end) for label in labels] for end, labels in asked]
        texts = [[text for own in each for text in own] for each in spelled]
        coded = tokens_behind(self._encoder, [(end, own) for (end, _), own in zip(asked, texts, strict=True)])
        found: list[Following | LabelError] = []
        for (end, labels), each, behind in zip(asked, spelled, coded, strict=True):
            try:
                found.append(self._following(end, labels, [len(own) for own in each], behind))
            except LabelError as error:
                found.append(error)
        return found

    def _as_tokens(self, labels: Sequence[Label]) -> Following:
        # The labels that are tokens, after a prompt that ends as it is.
        spellings = LabelSet.of([label.tokens for label in labels])
        return Following(self._sized(replace(spellings, rule=labels[0].rule), labels))

    def _spelled(self, label: Label, end: PromptEnd) -> list[str]:
        # The texts of a label after the end of a prompt.
        said = label.said or label.name
        own = label.variants or (said if end.bare or said[:1].isspace() else f" {said}",)
        if not end.literal:
            return [spelling + (self._end or "") for spelling in own]
        respell = self._encoder.controls.respell
        return [(respell(spelling) if self._typed else spelling) + respell(self._end or "") for spelling in own]

    def _following(
        self, end: PromptEnd, labels: Sequence[Label], counts: Sequence[int], behind: Sequence[Behind]
    ) -> Following:
        # This many spellings of each label, of which these are the tokens. Raises LabelError.
        shown = self._encoder.controls.shown(end.text) if end.literal else end.text
        each = iter(np.array([*own.tokens, *self._end_ids], np.int32) for own in behind)
        sequences = [[next(each) for _ in range(count)] for count in counts]
        self._require_distinct(labels, sequences, shown)
        chosen = LabelSet(tuple(tuple(_without_longer(own)) for own in sequences))
        merged = shown if any(own.merged for own in behind) else ""
        return Following(self._sized(chosen, labels), end.moved, merged)

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
        sizes = [label.heat for label in labels]
        if self._norm == "bytes":
            # The one space between prompt and answer does not count, whoever wrote it.
            texts = [(label.variants or (label.name,))[0].removeprefix(" ") for label in labels]
            sizes = [heat * float(len(text.encode()) or 1) for heat, text in zip(sizes, texts, strict=True)]
        elif self._norm == "tokens" and chosen.single is None:
            sizes = [heat * len(own[0]) for heat, own in zip(sizes, chosen.spellings, strict=True)]
        elif all(heat == 1 for heat in sizes):
            return chosen
        return replace(chosen, sizes=tuple(sizes))


def _alike(one: str, other: str, tokens: Sequence[str]) -> LabelError:
    what = f"token {tokens[0]!r}" if len(tokens) == 1 else f"tokens {list(tokens)}"
    return LabelError(
        f"labels {one!r} and {other!r} are the same {what}\nchoose labels (or variants) that the tokenizer tells apart"
    )


def _without_longer(spellings: Sequence[Int32Array]) -> list[Int32Array]:
    # The spellings of a label that no other one begins: a longer one's probability is part of the other's.
    texts = {each.tobytes(): each for each in spellings}
    return [own for own in texts.values() if not any(own[:length].tobytes() in texts for length in range(1, len(own)))]


def literal_end(controls: Controls, tail: str, texts: Sequence[str], *, literal: bool) -> tuple[str, bool]:
    """A tail after which the `texts` of a row follow, and whether it is literal: it becomes so where the tokenizer
    might find a control token in them. Raises NotLiteral."""
    risky = controls.opens(tail) or any(controls.may_be_in(text, joined=False) for text in texts)
    return (controls.respell(tail), True) if risky and not literal and controls.literal_backend else (tail, literal)


class ClassLabels(Labels):
    """The labels that some outputs of a head stand for.

    `outputs` has the number of each label's output, alone in a tuple; ~number is the complement of an output: its
    probability is 1 minus that of the output.
    """

    def __init__(self, labels: Sequence[Label], outputs: LabelTokens, measure: Measure) -> None:
        self.question = typed(labels)
        self.outputs = outputs
        self.measure = measure
        self._following_all = Following(LabelSet.of(outputs))

    def resolve_all(
        self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
    ) -> list[Following | LabelError]:
        """The one set of labels for each prompt, however it ends."""
        return [self._following_all] * len(tails)
