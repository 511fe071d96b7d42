"""One prompt as the engine sees it: its shared tokens, its kept tokens and the reasons, and the model's answer.

Prompts are untrusted: their text is shown through `prefillcli.report.section` only.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from prefillcli.core.request import ReadPrompt, TokenReason
from prefillcli.engines.base import Readings
from prefillcli.errors import PrefillError
from prefillcli.images.image import FEATURE, ImageLayout, PlacedImage
from prefillcli.images.thumbnails import Thumbnail
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.trie import common_prefix
from prefillcli.prompts.encoding import Encoder, token_texts
from prefillcli.reading.exits.policy import ExitPolicy
from prefillcli.report.run import LikelyToken
from prefillcli.report.section import (
    Cell,
    Part,
    Plot,
    Scale,
    Section,
    TableRows,
    counted,
    line_plot,
    page_html,
    preview,
    print_section,
    quoted_token,
    round_ticks,
    settings_section,
    signed_bar,
    visible,
)
from prefillcli.rows.output.store import put_text
from prefillcli.rows.records import NextTokens, Prompt, RowError, ScoredRow
from prefillcli.stats.labels import label_mass, label_probabilities, log_shares_of

# A model's view of a row after each of its layers: the lead of one label, and the layers where rows would leave.


_WIDE, _NARROW = 16, 6  # characters of the longest bar to either side, without and with exits
_LAST_TOKENS = 8  # of the prompt
_LEAST_GAP = 6.0  # percent between two ticks


@dataclass(frozen=True, slots=True)
class ExitGuess:
    """The prediction of an exit layer's probe for the row.

    `margin` is its prediction of the final margin, `ahead` the lead of its likeliest label, and `threshold` the least
    lead with which this label leaves (infinity: never). The row `leaves` here if it reaches that first.
    """

    margin: float
    prediction: str
    ahead: float
    threshold: float
    leaves: bool


@dataclass(frozen=True, slots=True)
class LayerMargin:
    """The reading of the model's own norm and head after some layers; after 0, from the embedding.

    `margin` is in logits, `entropy` that of the labels' shares in bits. `changes`: the layer before predicts another
    label.
    """

    layers: int
    margin: float
    entropy: float
    prediction: str
    changes: bool
    guess: ExitGuess | None = None


@dataclass(frozen=True, slots=True)
class MarginCurve:
    """The margins of a row over the layers, from the embedding to the final answer, and the labels that they
    compare."""

    what: str
    layers: list[LayerMargin]

    @property
    def settled(self) -> int:
        """The number of layers after which the prediction is the final one, and stays so."""
        return max((each.layers for each in self.layers if each.changes), default=0)

    @property
    def left(self) -> int | None:
        """The number of layers after which the row would leave; None if it goes on to the end."""
        return next((each.layers for each in self.layers if each.guess is not None and each.guess.leaves), None)


def margin_curve(
    readings: Sequence[Readings],
    final: npt.NDArray[np.float64],
    labels: Sequence[str],
    policy: ExitPolicy | None = None,
) -> MarginCurve:
    """Return the margins of one row.

    `readings` are those of every layer but the last, in their order, with one row each; `final` [labels] are the label
    log-probabilities of the answer. With two labels the margin is the first over the second; with more, the final
    answer over the best other. With a `policy`, exit layers have their probes' predictions.
    """
    logits = [readings[0].before[0], *(each.logits[0] for each in readings)] if readings else []
    logits = [*logits, final]
    best = 0 if len(labels) == 2 else int(final.argmax())
    found: list[LayerMargin] = []
    left = False
    for layers, own in enumerate(logits):
        guess = None
        if policy is not None and layers - 1 in policy.layers and layers <= len(readings):
            guess = _guess(policy, layers - 1, readings[layers - 1], labels, best, left)
            left = left or guess.leaves
        shares = log_shares_of(own)
        prediction = labels[int(own.argmax())]
        found.append(
            LayerMargin(
                layers=layers,
                margin=_margin(own, best),
                entropy=float(-(np.exp(shares) * shares).sum() / np.log(2)),
                prediction=prediction,
                changes=bool(found) and found[-1].prediction != prediction,
                guess=guess,
            )
        )
    other = labels[1] if len(labels) == 2 else "the best other label"
    return MarginCurve(f"{labels[best]} over {other}", found)


def margin_rows(curve: MarginCurve) -> list[list[str]]:
    """Return a header and a line for each layer, safe to show."""
    guesses = any(each.guess is not None for each in curve.layers)
    most = max((abs(each.margin) for each in curve.layers if np.isfinite(each.margin)), default=0.0)
    side = _NARROW if guesses else _WIDE
    rows = [["after", "margin", "", "entropy", "prediction", *(["exit"] if guesses else [])]]
    for each in curve.layers:
        said = visible(each.prediction, line=True) + (" ←" if each.changes else "")
        cells = [
            f"{each.layers}",
            f"{each.margin:+.3f}",
            Cell(signed_bar(each.margin, most, side), "chars"),
            f"{each.entropy:.3f}",
        ]
        rows.append([*cells, said, *([_guess_text(each.guess)] if guesses else [])])
    return rows


def margin_notes(curve: MarginCurve) -> list[str]:
    """Return the meaning of the numbers, in sentences, safe to show."""
    last = curve.layers[-1]
    notes = [
        f"Margin: logits of {visible(curve.what, line=True)}, read after each layer by the model's own norm and head; "
        "after 0, from the embedding. Entropy in bits, of the labels alone.",
        f"After {curve.settled} of {last.layers} layers the prediction is {visible(last.prediction, line=True)} for "
        "good; ← marks where it changes.",
    ]
    if any(each.guess is not None for each in curve.layers):
        where = "goes on to the end" if curve.left is None else f"would leave after layer {curve.left}"
        notes.append(
            "Exit: the label that its probe predicts, how far that is ahead of the next one, and how far it must be. "
            f"The row {where}."
        )
    return notes


def margin_plot(curve: MarginCurve) -> Plot | None:
    """Return the margin over the layers, a line at 0, and the probes' predictions; None for numbers that are not
    finite."""
    points = [(each.layers, each.margin) for each in curve.layers]
    guesses = [(each.layers, each.guess.margin) for each in curve.layers if each.guess is not None]
    values = [margin for _, margin in points + guesses]
    if len(points) < 2 or not np.isfinite(values).all():
        return None
    last = points[-1][0]
    ticks = round_ticks(max(*map(abs, values), 1e-3))
    heights = {at: f"{at:+g}" if at else "0" for at in (*(-each for each in reversed(ticks[1:])), *ticks)}
    step = max(1, math.ceil(last * _LEAST_GAP / 100))
    lines = [(curve.what, f"{points[-1][1]:+.2f}", points)]
    if guesses:
        lines.append(("as the probes predict it", f"{guesses[-1][1]:+.2f}", guesses))
    return line_plot(
        lines,
        Scale(0, last, {at: f"{at}" for at in range(0, last + 1, step)}),
        Scale(-ticks[-1], ticks[-1], heights),
    )


def _guess(
    policy: ExitPolicy, layer: int, readings: Readings, labels: Sequence[str], best: int, left: bool
) -> ExitGuess:
    (predicted,), thresholds = policy.guess(layer, readings)
    likeliest = int(predicted.argmax())
    return ExitGuess(
        margin=_margin(predicted, best),
        prediction=labels[likeliest],
        ahead=_margin(predicted, likeliest),
        threshold=thresholds[likeliest],
        leaves=not left and bool(policy.decide(layer, readings)[0][0]),
    )


def _margin(logits: npt.NDArray[np.float64], best: int) -> float:
    return float(logits[best] - np.delete(logits, best).max())


def _guess_text(guess: ExitGuess | None) -> str:
    if guess is None:
        return ""
    needed = f"of {guess.threshold:.2f}" if np.isfinite(guess.threshold) else "never leaves"
    said = f"{visible(guess.prediction, line=True)} {guess.ahead:.2f} {needed}"
    return f"{said}, leaves" if guess.leaves else said


WHY: dict[TokenReason, str] = {
    "first": "always kept: start",
    "last": "always kept: end",
    "chosen": "chosen for importance",
    "shared": "kept: another row computes it anyway",
    "dropped": "dropped",
    "full": "no compression",
}
STEPS = 5  # steps of the heat scale
HEAT = f"rank of importance among the kept tokens, in {STEPS} steps of equal size"
MARKED: dict[TokenReason, str] = {"first": " underline", "last": " underline", "shared": " italic"}
FOLD = 24  # dropped stretches of more tokens than this are folded
_CHUNK = 32  # tokens of a stretch, if the settings have no select_chunk
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


LEAST_SHARED = 16  # tokens; shorter overlaps are due to chance
MOST_PREFIXES = 10


def shared_tokens(prompts: Sequence[Prompt], number: int) -> list[int]:
    """Return the number of tokens that the prompt with this number shares with the beginning of each prompt of a
    window."""
    return [common_prefix(prompts[number].tokens, other.tokens) for other in prompts]


def shared_prefixes(shared: Sequence[int]) -> list[CommonPrefix]:
    """Return prefix lengths at which the number of sharing rows changes, ascending.

    `shared` are the tokens that each other row has in common with the prompt. If there are many lengths, those at
    which most rows diverge are kept.
    """
    parting = Counter(common for common in shared if common >= LEAST_SHARED)
    lengths = sorted(parting, key=lambda tokens: (-parting[tokens], -tokens))[:MOST_PREFIXES]
    return [CommonPrefix(tokens, 1 + sum(common >= tokens for common in shared)) for tokens in sorted(lengths)]


def token_views(tokenizer: Any, read: ReadPrompt) -> list[TokenView]:
    """Return the tokens of a prompt, with their texts."""
    ids = read.request.prompt.whole.tolist()
    importance = [None] * len(ids) if read.importance is None else read.importance.tolist()
    parts = zip(ids, token_texts(Encoder(tokenizer).decode, ids), importance, read.why, strict=True)
    return [
        TokenView(at, number, text, value, why != "dropped", why)
        for at, (number, text, value, why) in enumerate(parts)
    ]


def next_views(tokenizer: Any, told: NextTokens | None) -> list[LikelyToken]:
    """Return the tokens that the model may write next."""
    if told is None:
        return []
    encoder, pairs = Encoder(tokenizer), zip(told.tokens.tolist(), told.logprobs.tolist(), strict=True)
    return [LikelyToken(id=token, text=encoder.text_behind(token), share=math.exp(own)) for token, own in pairs]


def no_score(row: int, row_id: str | None, error: RowError) -> PrefillError:
    """Return the error of a row that has no score."""
    name = f"row {row}" + ("" if row_id is None else f" ({row_id})")
    return PrefillError(visible(f"{name} has no score: {error.code}: {error.detail}", line=True))


@dataclass(frozen=True, slots=True)
class AnswerView:
    """The model's answer to the prompt."""

    logprobs: dict[str, float]  # by label, natural logarithm, over the whole vocabulary
    score: float  # probability of the first label among the labels
    label_mass: float  # probability of all labels together
    prediction: str

    @classmethod
    def of(
        cls, names: Sequence[str], labels: LabelSet, divided: npt.NDArray[np.float64], temperature: float
    ) -> AnswerView:
        """Return the answer from log-probabilities of labels [labels], divided by their sizes where these have
        some."""
        shares, logprobs = label_probabilities(divided, temperature), labels.whole(divided)
        return cls(
            logprobs=dict(zip(names, logprobs.tolist(), strict=True)),
            score=float(shares[0]),
            label_mass=float(label_mass(logprobs)),
            prediction=names[int(shares.argmax())],
        )

    @property
    def is_finite(self) -> bool:
        """True if the score is a finite number: one label without a finite value makes all shares NaN."""
        return math.isfinite(self.score)


MOST_IMAGES = 100  # of a prompt, with thumbnails


@dataclass(frozen=True, slots=True)
class ImageView:
    """An image in the prompt: its size in pixels, its tokens, those that the model's processor writes around features
    included, and the place of the first of them."""

    width: int
    height: int
    tokens: int
    first: int


def image_views(prompt: Prompt, layout: Callable[[PlacedImage], ImageLayout]) -> list[ImageView]:
    """Return the images of a prompt, whose layouts are known, in their order."""
    found: list[ImageView] = []
    end = 0
    for each in prompt.images:
        own = layout(each)
        feature = end + int(np.argmax(prompt.tokens[end:] == each.first))
        first = feature - int(np.argmax(own.tokens == FEATURE))
        end = first + len(own.tokens)
        found.append(ImageView(each.image.width, each.image.height, len(own.tokens), first))
    return found


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
    margins: MarginCurve | None = None  # of the prompt as a job reads it: compressed, if the job compresses it
    scored: ScoredRow | None = None  # as in a job
    further: Sequence[Section] = ()  # sections on the further questions about it
    next: Sequence[LikelyToken] = ()  # the likeliest tokens after the prompt
    images: Sequence[ImageView] = ()
    thumbnails: Sequence[Thumbnail] = ()  # of the first images, for the page; none where they are not wanted


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens `first` to `last` (included), one chunk of the selection."""

    first: int
    last: int
    importance: float  # mean over its tokens
    why: tuple[TokenReason, ...]
    text: str  # as it is; untrusted


def heat(tokens: Sequence[TokenView]) -> tuple[list[int | None], list[tuple[float, float] | None]]:
    """Return the step of every token on the heat scale, and the least and largest importance in each of the `STEPS`
    steps.

    Importance is attention: a few tokens have most of it, and a scale of values would show only these. So a step is a
    rank: the token's rank among the kept ones, ties in the middle of their ranks. None for a token that is dropped or
    has no importance, and for a step that no token has.
    """
    ranked = sorted(value for token in tokens if token.kept and (value := _importance_of(token)) is not None)
    steps: list[int | None] = []
    ranges: list[tuple[float, float] | None] = [None] * STEPS
    for token in tokens:
        value = _importance_of(token)
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
    """Return the `most` chunks of the prompt with the highest mean importance, highest first; none without a draft."""
    size = inspection.settings.get("select_chunk")
    size = size if isinstance(size, int) and size > 0 else _CHUNK
    found = []
    for start in range(0, len(inspection.tokens), size):
        chunk = inspection.tokens[start : start + size]
        values = [value for token in chunk if (value := _importance_of(token)) is not None]
        if values:
            why = tuple(dict.fromkeys(token.why for token in chunk))
            text = "".join(token.text for token in chunk)
            mean = math.fsum(values) / len(values)
            found.append(Stretch(chunk[0].position, chunk[-1].position, mean, why, text))
    return sorted(found, key=lambda stretch: (-stretch.importance, stretch.first))[:most]


def facts(inspection: Inspection) -> list[tuple[str, str]]:
    """Return the names and texts of the facts above the prompt, safe to show."""
    tokens, kept = len(inspection.tokens), sum(token.kept for token in inspection.tokens)
    found = [
        ("row", f"{inspection.row_id} (row {inspection.row:,} of the input)"),
        ("model", inspection.model),
        ("draft", inspection.draft or "none"),
        ("method", inspection.method),
        ("tokens", f"{tokens:,}, {kept:,} kept ({kept / max(tokens, 1):.1%})"),
    ]
    if any(token.importance is not None for token in inspection.tokens):
        voters, layers = inspection.voters, inspection.draft_layers
        names = ", ".join(f"{number:,}" for number in voters)
        some = f"{len(voters):,} of the draft's {counted(layers, 'layer')}: {names}"
        found.append(("votes", f"all {layers:,} layers of the draft" if len(voters) == layers else some))
    prefixes = [f"the first {prefix.tokens:,} by {counted(prefix.rows, 'row')}" for prefix in inspection.shared]
    found.append(("shared", ", ".join(prefixes) or "nothing with another row"))
    return [(name, visible(text, line=True)) for name, text in found]


def _answer_table(inspection: Inspection) -> TableRows:
    # A header, and the numbers of the answers side by side, safe to show.
    both = {"full": inspection.full, "compressed": inspection.compressed}
    known = {name: answer for name, answer in both.items() if answer is not None}
    answers = list(known.values())
    rows = [["", *known], ["prediction", *(visible(answer.prediction, line=True) for answer in answers)]]
    if len(answers) == 2:
        rows[0].append("difference")
        rows[1].append("same" if answers[0].prediction == answers[1].prediction else Cell("FLIP", "alarm"))
    numbers = [
        ("score", [answer.score for answer in answers], ".4g"),
        ("label mass", [answer.label_mass for answer in answers], ".4g"),
    ]
    for label in inspection.labels:
        name = visible(f"log P({label})", line=True)
        numbers.append((name, [answer.logprobs[label] for answer in answers], ".3f"))
    for name, values, form in numbers:
        texts = [format(value, form) for value in values]
        if len(values) == 2:
            texts.append(format(values[1] - values[0], "+" + form))
        rows.append([name, *texts])
    return rows


def _importance_of(token: TokenView) -> float | None:
    # The token's importance, if it is a number.
    value = token.importance
    return value if value is not None and math.isfinite(value) else None


def counts(inspection: Inspection) -> list[tuple[TokenReason, str, int]]:
    """Return the treatments of tokens, in words, each with its number of tokens."""
    found = Counter(token.why for token in inspection.tokens)
    return [(why, text, found[why]) for why, text in WHY.items() if found[why]]


# One prompt in the terminal.


# Cold to hot at medium lightness, because the terminal's background is unknown.
_STYLES = (
    "#ffffff on #5b6b7a",
    "#ffffff on #7d7440",
    "#000000 on #c99a2e",
    "#000000 on #ee7f2d",
    "#ffffff on #c81e1e",
)
_EDGE = 8  # tokens shown at either end of a long dropped stretch


@dataclass(frozen=True, slots=True)
class Fold:
    """Neighbouring tokens that are counted, not shown."""

    tokens: int
    kept: int = 0

    def __str__(self) -> str:
        if not self.kept:
            return f"… {counted(self.tokens, 'token')} dropped"
        if self.kept == self.tokens:
            return f"… {counted(self.tokens, 'kept token')} not shown"
        return f"… {counted(self.tokens, 'token')} not shown, {self.kept:,} of them kept"


def print_inspection(inspection: Inspection, console: Console, *, most_tokens: int | None = None) -> None:
    """Write `inspection` to `console`: coloured on a terminal, else with brackets around kept text.

    `most_tokens`: the most tokens of the text to show, from both ends; None shows all.
    """
    coloured = console.is_terminal and not console.no_color and console.color_system is not None

    print_section(console, Section(lines=facts(inspection)))
    console.print(Text("\nPrompt", "bold"))
    tokens = inspection.tokens
    shown = _coloured(tokens, most_tokens) if coloured else _bracketed(tokens, most_tokens)
    for text in (_legend(inspection, coloured), Text(), shown):
        console.print(text, soft_wrap=not console.is_terminal, highlight=False)
    sections = {each.title: each for each in _sections(inspection, terminal=True)}
    for title in (
        "Images",
        "Most important stretches",
        "Answer",
        "The likeliest next tokens",
        *(each.title for each in inspection.further),
        "Layer by layer",
    ):
        if title in sections:
            print_section(console, sections[title], wide=not console.is_terminal)


def _legend(inspection: Inspection, coloured: bool) -> Text:
    parts = []
    for why, text, number in counts(inspection):
        style = "dim" if why == "dropped" else MARKED.get(why, "").strip()
        parts.append(Text(f"{text} {number:,}", style if coloured else ""))
    legend = Text("; ").join(parts)
    _, ranges = heat(inspection.tokens)
    if not coloured:
        dropped = any(not token.kept for token in inspection.tokens)
        return legend.append("\n⟦kept⟧ ⟦… dropped⟧") if dropped else legend
    if any(ranges):
        legend.append("\n")
        for style, values in zip(_STYLES, ranges, strict=True):
            if values:
                legend.append(f" {values[0]:.2g}-{values[1]:.2g} ", style)
        legend.append(f" importance; colour: {HEAT}")
    return legend


def _folded(tokens: Sequence[TokenView], edge: int, fold: int) -> Iterator[int | Fold]:
    # Indices of the tokens to show; of a dropped stretch of more than `fold`, `edge` at either end.
    start = 0
    for kept, run in groupby(tokens, key=lambda token: token.kept):
        stop = start + sum(1 for _ in run)
        if kept or stop - start <= fold:
            yield from range(start, stop)
        else:
            yield from range(start, start + edge)
            yield Fold(stop - start - 2 * edge)
            yield from range(stop - edge, stop)
        start = stop


def _shortened(items: list[int | Fold], tokens: Sequence[TokenView], most: int | None) -> list[int | Fold]:
    # `items` with no more than `most` tokens, from both ends.
    shown = [at for at, item in enumerate(items) if isinstance(item, int)]
    if most is None or len(shown) <= most:
        return items
    head, tail = (most + 1) // 2, most // 2
    start, stop = shown[head], shown[-tail - 1] + 1
    while start and isinstance(items[start - 1], Fold):
        start -= 1
    while stop < len(items) and isinstance(items[stop], Fold):
        stop += 1
    hidden = kept = 0
    for item in items[start:stop]:
        hidden += item.tokens if isinstance(item, Fold) else 1
        kept += isinstance(item, int) and tokens[item].kept
    return [*items[:start], Fold(hidden, kept), *items[stop:]]


def _coloured(tokens: Sequence[TokenView], most: int | None) -> Text:
    steps, _ = heat(tokens)
    text = Text()
    items = _shortened(list(_folded(tokens, _EDGE, FOLD)), tokens, most)
    for style, part in groupby(items, key=lambda item: _style(item, tokens, steps)):
        shown = (f" [{item}] " if isinstance(item, Fold) else visible(tokens[item].text) for item in part)
        text.append("".join(shown), style)
    return text


def _style(item: int | Fold, tokens: Sequence[TokenView], steps: Sequence[int | None]) -> str:
    if isinstance(item, Fold):
        return "dim reverse"
    token, step = tokens[item], steps[item]
    if not token.kept:
        return "dim"
    return ("" if step is None else _STYLES[step]) + MARKED.get(token.why, "")


def _bracketed(tokens: Sequence[TokenView], most: int | None) -> Text:
    text = Text()
    items = _shortened(list(_folded(tokens, 0, 0)), tokens, most)
    if all(isinstance(item, int) for item in items):
        return text.append("".join(visible(token.text) for token in tokens))  # all is kept: no brackets needed
    for folded, part in groupby(items, key=lambda item: isinstance(item, Fold)):
        if folded:
            text.append("".join(f"⟦{item}⟧" for item in part))
        else:
            inside = "".join(visible(tokens[item].text) for item in part if isinstance(item, int))
            text.append("⟦" + inside.replace("⟦", "⟨U+27E6⟩").replace("⟧", "⟨U+27E7⟩") + "⟧")
    return text


# One prompt as one HTML page.


def inspection_html(inspection: Inspection) -> str:
    """Return the page of an inspected prompt."""
    _, ranges = heat(inspection.tokens)
    head = Section(title=f"Prompt of row {inspection.row_id}", lines=facts(inspection))
    return page_html(
        head,
        _sections(inspection),
        title=f"{inspection.row_id} - prefill inspect",
        template="inspection.html.j2",
        heat=HEAT,
        ranges=ranges,
        counts=counts(inspection),
        pieces=_pieces(inspection.tokens),
    )


def in_characters(part: Part) -> Part:
    """Return a part whose bars extend from the middle of their track to either side, for the terminal."""
    if not part.bars:
        return part
    rows = [
        [
            Cell(each.name, "name"),
            each.text,
            Cell(signed_bar(math.copysign(each.length, each.start - 49.9), 50, 20), "chars"),
        ]
        for each in part.bars
    ]
    return replace(part, bars=(), table=[["section", "change", ""], *rows], words=(0, 2))


def _sections(inspection: Inspection, *, terminal: bool = False) -> Iterator[Section]:
    over = " over the whole vocabulary" if inspection.next else ""  # which another head does not read
    note = f"Log probabilities are natural logarithms{over}; the score is the first label's share among the labels."
    yield Section(title="Answer", parts=[Part(table=_answer_table(inspection), note=note)])
    if inspection.next:
        last = " ".join(quoted_token(token.text) for token in inspection.tokens[-_LAST_TOKENS:])
        rows = [[each.name, f"{each.share:.4g}"] for each in inspection.next]
        yield Section(
            title="The likeliest next tokens",
            parts=[
                Part(lines=[("the prompt's last tokens", last)]),
                Part(
                    table=[["next token", "probability"], *rows], note="The likeliest ones, over the whole vocabulary."
                ),
            ],
        )
    for section in inspection.further:
        yield replace(section, parts=[in_characters(part) for part in section.parts]) if terminal else section
    if inspection.margins is not None:
        parts = [] if terminal else [Part(plot=margin_plot(inspection.margins))]
        parts.append(Part(table=margin_rows(inspection.margins), words=(2, 4, 5)))
        yield Section(
            title="Layer by layer", parts=[*parts, *(Part(note=note) for note in margin_notes(inspection.margins))]
        )
    if inspection.images:
        yield _images(inspection)
    yield Section(title="Prompt", alarms=[""])  # in the template
    best = [
        [
            f"{each.first:,} to {each.last:,}",
            f"{each.importance:.3g}",
            ", ".join(each.why),
            Cell(preview(each.text), "prose"),
        ]
        for each in stretches(inspection)
    ]
    if best:
        part = Part(
            table=[["tokens", "importance", "why", "text"], *best],
            words=(2, 3),
            layout="stretches",
            note="Importance is the mean over the stretch's tokens.",
        )
        yield Section(title="Most important stretches", parts=[part])
    if inspection.shared:
        rows = [[f"{each.tokens:,}", f"{each.rows:,}"] for each in inspection.shared]
        shared = Part(table=[["first tokens", "rows"], *rows], words=())
    else:
        shared = Part(text="No other row begins like this one.")
    yield Section(title="Shared prefixes", parts=[shared])
    yield settings_section(inspection.settings)


def _images(inspection: Inspection) -> Section:
    rows: TableRows = [["image", "pixels", "tokens", "in the prompt"]]
    for number, each in enumerate(inspection.images):
        place = f"{each.first:,} to {each.first + each.tokens - 1:,}"
        name = Cell(f"{number + 1}", "", tuple(inspection.thumbnails[number : number + 1]))
        rows.append([name, f"{each.width:,} x {each.height:,}", f"{each.tokens:,}", place])
    tokens = sum(each.tokens for each in inspection.images)
    note = f"{tokens:,} of the prompt's {counted(len(inspection.tokens), 'token')} are images; places count from 0."
    return Section(title="Images", parts=[Part(table=rows, note=note)])


def write_html(inspection: Inspection, path: str) -> None:
    """Write the page of `inspection_html` to a local path or URL. Raises PrefillError."""
    put_text(path, inspection_html(inspection))


@dataclass(frozen=True, slots=True)
class _PageElement:
    """An element of the page: one kept token, or a whole dropped stretch."""

    text: str
    title: str
    classes: str = ""
    dropped: int = 0  # tokens
    folded: bool = False


def _pieces(tokens: Sequence[TokenView]) -> Iterator[_PageElement]:
    steps, _ = heat(tokens)
    at = 0
    for kept, run in groupby(tokens, key=lambda token: token.kept):
        part = list(run)
        if kept:
            for token, step in zip(part, steps[at : at + len(part)], strict=True):
                importance = "" if token.importance is None else f", importance {token.importance:.3g}"
                classes = [f"h{step}"] if step is not None else []
                classes += [token.why] if token.why in MARKED else []
                classes += ["newline"] if token.text and not token.text.strip("\n") else []
                title = f"token {token.position}, id {token.id}{importance}, {token.why}"
                yield _PageElement(visible(token.text), title, " ".join(classes))
        else:
            title = f"tokens {part[0].position}-{part[-1].position} dropped"
            values = [value for token in part if (value := _importance_of(token)) is not None]
            if values:
                title += f", importance {math.fsum(values) / len(values):.3g} mean, {max(values):.3g} largest"
            text = "".join(visible(token.text) for token in part)
            yield _PageElement(text, title, dropped=len(part), folded=len(part) > FOLD)
        at += len(part)
