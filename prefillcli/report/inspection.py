"""One prompt as the engine sees it: what is shared, what is kept and why, and what it answers.

Prompts are untrusted: text of theirs is shown through `prefillcli.report.visible` only.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefillcli.compress.reasons import TokenReason
from prefillcli.data.rows import Rationale, SectionEffect
from prefillcli.report.layer_margins import MarginCurve
from prefillcli.report.numbers import counted
from prefillcli.report.visible import visible

WHY: dict[TokenReason, str] = {
    "first": "always kept: start",
    "last": "always kept: end",
    "chosen": "chosen for importance",
    "shared": "kept: another row computes it anyway",
    "dropped": "dropped",
    "full": "no compression",
}
STEPS = 5
"""Steps of the heat scale."""
HEAT = f"rank of importance among the kept tokens, in {STEPS} steps of equal size"
MARKED: dict[TokenReason, str] = {"first": " underline", "last": " underline", "shared": " italic"}
FOLD = 24
"""Dropped stretches of more tokens than this are folded."""
_CHUNK = 32  # tokens of a stretch, where the settings have no select_chunk
_STRETCHES = 10


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token of the prompt."""

    position: int
    id: int
    text: str  # decoded, as it is; untrusted
    importance: float | None  # None if no draft looked at it; any scale
    kept: bool
    why: TokenReason


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """The first `tokens` tokens begin `rows` rows, this one included."""

    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class AnswerView:
    """What the model says to the prompt."""

    logprobs: dict[str, float]  # by label, natural logarithm, over the whole vocabulary
    score: float  # probability of the first label among the labels
    label_mass: float  # probability of all labels together
    prediction: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """One row. `tokens` are in the order of the prompt, `shared` in ascending order of tokens."""

    row: int
    row_id: str
    model: str
    draft: str | None
    labels: list[str]
    tokens: list[TokenView]
    shared: list[CommonPrefix]
    full: AnswerView | None  # None where the whole prompt does not fit the memory
    compressed: AnswerView | None  # None without compression
    settings: dict[str, Any]
    method: str
    voters: tuple[int, ...]  # layers of the draft that voted, numbered from 1
    draft_layers: int  # of the draft; 0 without one
    margins: MarginCurve | None = None  # of the prompt as a job reads it: compressed, if it is
    rationale: Rationale | None = None
    begins: str = ""  # the words that the rationale goes on behind
    evidence: tuple[SectionEffect, ...] | None = None  # None where it was not asked for, or the prompt has no sections


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens `first` to `last` (included), one chunk of the selection."""

    first: int
    last: int
    importance: float  # mean over its tokens
    why: tuple[TokenReason, ...]
    text: str  # as it is; untrusted


def heat(tokens: Sequence[TokenView]) -> tuple[list[int | None], list[tuple[float, float] | None]]:
    """Step of every token on the heat scale, and the least and largest importance in each of the `STEPS` steps.

    Importance is attention: a few tokens have most of it, and any scale of its values would show these alone. So a
    step is a rank: that of the token among the kept ones, ties in the middle of their ranks. None for a token that is
    dropped or has no importance, and for a step that no token has.
    """
    ranked = sorted(value for token in tokens if token.kept and (value := importance_of(token)) is not None)
    steps: list[int | None] = []
    ranges: list[tuple[float, float] | None] = [None] * STEPS
    for token in tokens:
        value = importance_of(token)
        if value is None or not token.kept:
            steps.append(None)
            continue
        middle = (bisect_left(ranked, value) + bisect_right(ranked, value)) / 2
        step = min(int(STEPS * middle / len(ranked)), STEPS - 1)
        low, high = ranges[step] or (value, value)
        ranges[step] = min(low, value), max(high, value)
        steps.append(step)
    return steps, ranges


def stretches(inspection: Inspection, most: int = _STRETCHES) -> list[Stretch]:
    """The `most` chunks of the prompt with the highest mean importance, highest first; none without a draft."""
    size = inspection.settings.get("select_chunk")
    size = size if isinstance(size, int) and size > 0 else _CHUNK
    found = []
    for start in range(0, len(inspection.tokens), size):
        chunk = inspection.tokens[start : start + size]
        values = [value for token in chunk if (value := importance_of(token)) is not None]
        if values:
            why = tuple(dict.fromkeys(token.why for token in chunk))
            text = "".join(token.text for token in chunk)
            mean = math.fsum(values) / len(values)
            found.append(Stretch(chunk[0].position, chunk[-1].position, mean, why, text))
    return sorted(found, key=lambda stretch: (-stretch.importance, stretch.first))[:most]


def facts(inspection: Inspection) -> list[tuple[str, str]]:
    """Name and text of what is shown above the prompt, safe to show."""
    tokens, kept = len(inspection.tokens), sum(token.kept for token in inspection.tokens)
    found = [
        ("row", f"{inspection.row_id} (row {inspection.row:,} of the input)"),
        ("model", inspection.model),
        ("draft", inspection.draft or "none"),
        ("method", inspection.method),
        ("tokens", f"{tokens:,}, {kept:,} kept ({kept / max(tokens, 1):.1%})"),
    ]
    if any(token.importance is not None for token in inspection.tokens):
        found.append(("votes", _votes(inspection)))
    prefixes = [f"the first {prefix.tokens:,} by {counted(prefix.rows, 'row')}" for prefix in inspection.shared]
    found.append(("shared", ", ".join(prefixes) or "nothing with another row"))
    return [(name, visible(text, line=True)) for name, text in found]


def _votes(inspection: Inspection) -> str:
    """Which layers of the draft have voted."""
    voters, layers = inspection.voters, inspection.draft_layers
    if len(voters) == layers:
        return f"all {layers:,} layers of the draft"
    names = ", ".join(f"{number:,}" for number in voters)
    return f"{len(voters):,} of the draft's {counted(layers, 'layer')}: {names}"


def answer_columns(inspection: Inspection) -> list[str]:
    """Names of the values in `answer_rows`."""
    names = [name for name, _ in _answers(inspection)]
    return names + (["difference"] if len(names) == 2 else [])


def answer_rows(inspection: Inspection) -> list[list[str]]:
    """Name and values of each number of the answers, side by side, safe to show."""
    answers = [answer for _, answer in _answers(inspection)]
    predictions = [visible(answer.prediction, line=True) for answer in answers]
    rows = [["prediction", *predictions]]
    if len(answers) == 2:
        rows[0].append("same" if answers[0].prediction == answers[1].prediction else "FLIP")
    numbers = [("score", [answer.score for answer in answers], ".4g")]
    numbers.append(("label mass", [answer.label_mass for answer in answers], ".4g"))
    for label in inspection.labels:
        name = visible(f"log P({label})", line=True)
        numbers.append((name, [answer.logprobs[label] for answer in answers], ".3f"))
    for name, values, form in numbers:
        texts = [format(value, form) for value in values]
        if len(values) == 2:
            texts.append(format(values[1] - values[0], "+" + form))
        rows.append([name, *texts])
    return rows


def _answers(inspection: Inspection) -> list[tuple[str, AnswerView]]:
    both = ("full", inspection.full), ("compressed", inspection.compressed)
    return [(name, answer) for name, answer in both if answer is not None]


def importance_of(token: TokenView) -> float | None:
    """The token's importance, if it is a number."""
    value = token.importance
    return value if value is not None and math.isfinite(value) else None


def counts(inspection: Inspection) -> list[tuple[TokenReason, str, int]]:
    """What happened to the tokens, in words, and to how many."""
    found = Counter(token.why for token in inspection.tokens)
    return [(why, text, found[why]) for why, text in WHY.items() if found[why]]
