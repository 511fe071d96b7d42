"""Texts after prompts: how they are written, how they end, and what it took. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefillcli.plan.trie import TokenArray

# Why a text ends: at a stop token, at its greatest length (or the model's), or before it began, for lack of memory or
# because the engine failed at each attempt.
FinishReason = Literal["stop", "length", "memory", "error"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """The way in which tokens are guessed before the model reads them, several in one pass. Texts do not depend on it.

    `drafter` is a value of `--speculation`. At most `tokens` are guessed for
    one pass. The retrieval cache keeps `budget` tokens of each prompt, in chunks of `chunk`. The draft model keeps
    the first `sinks` tokens of a prompt and the `recent` ones.
    """

    drafter: str = "lookup"
    tokens: int = 6
    budget: int = 4096
    chunk: int = 8
    sinks: int = 16
    recent: int = 240

    def kept_twice(self, prompt: int) -> int:
        """The most tokens of a prompt of this many that a retrieval cache keeps a second time."""
        return self.budget if prompt > self.budget and self.drafter in ("retrieval", "hierarchy") else 0


@dataclass(frozen=True, slots=True)
class Writing:
    """The way in which texts are written: of at most `tokens` tokens, up to one of the `stop_tokens`, which is not
    part of them.

    The layer walk writes no more once `ends` says of the tokens of a text that it has ended.

    At most `beginning` tokens stand between a prompt and its text. At a `temperature` of 0 each token is the likeliest
    one. Else it is drawn by noise that follows from the `seed`, the text's key and the token's place in it
    (`prefillcli.walk.lockstep`).
    """

    tokens: int
    stop_tokens: frozenset[int] = frozenset()
    beginning: int = 32
    temperature: float = 0.0
    seed: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    ends: Callable[[Sequence[int]], bool] | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens after a prompt at a time, at most: its beginning, its text, and guesses."""
        return self.beginning + self.tokens + (0 if self.speculation.drafter == "off" else self.speculation.tokens)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The tokens before a text: those of its prompt, as the model reads them, and those that follow the prompt.

    `positions` int32 [prompt] are the places of the prompt's tokens; None: 0, 1, 2 ... The text stands after the last
    of them. `tokens` has at least one. The noise follows from `key`.
    """

    prompt: TokenArray
    tokens: tuple[int, ...]
    key: str
    positions: TokenArray | None = None

    @property
    def end(self) -> int:
        """The place of the first token of the text."""
        last = len(self.prompt) - 1 if self.positions is None else int(self.positions[-1])
        return last + 1 + len(self.tokens)

    def room(self, tokens: int, longest: int | None, switch: int = 0) -> int:
        """Return how many of this many tokens the text may have; less than 1: none.

        It ends at the `longest` place of the model; where position encodings change after `switch` places (0: they
        do not), a text that begins before does not go beyond them.
        """
        if longest is None:
            return tokens
        return min(tokens, (switch if self.end <= switch else longest) - self.end)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text: its tokens without the stop token, and the reason why it ends.

    `gap` is the smallest difference between the two best tokens, the stop token's choice included: of their logits, or
    of the numbers whose largest one is drawn. It is infinite where nothing was chosen.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    gap: float


@dataclass(slots=True)
class DrafterCounts:
    """Counts of a drafter's guesses: `proposed` tokens in `rounds` for one row each, of which `accepted` were
    right."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DecodingReport:
    """The cost of writing: `texts` of `tokens`, in `seconds`.

    A pass of the model reads new tokens of several rows; `row_passes` counts it once for each of them, so that
    `row_passes / tokens` are the passes for one token of a row. `kept_prompts` had their K,V kept while they were
    scored; `again_prompts` were read once more. `prompt_seconds` and `prompt_tokens` are the cost of reading them
    again. `drafters` are by name; a drafter that checks another's guesses has its own counts.
    """

    texts: int = 0
    tokens: int = 0
    passes: int = 0
    row_passes: int = 0
    seconds: float = 0.0
    kept_prompts: int = 0
    again_prompts: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    drafters: dict[str, DrafterCounts] = field(default_factory=dict)

    def add(self, other: DecodingReport) -> None:
        for name in ("texts", "tokens", "passes", "row_passes", "seconds", "kept_prompts", "again_prompts",
                     "prompt_tokens", "prompt_seconds"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, counts in other.drafters.items():
            own = self.drafters.setdefault(name, DrafterCounts())
            own.rounds += counts.rounds
            own.proposed += counts.proposed
            own.accepted += counts.accepted


def sum_of(reports: Sequence[DecodingReport]) -> DecodingReport | None:
    """The sum over several engines; None of none."""
    found = DecodingReport()
    for report in reports:
        found.add(report)
    return found if reports else None


OWN_STEP = 32  # tokens by which the room after the prompts grows


def whole_steps(tokens: int) -> int:
    """The room that a row has for this many tokens after its prompt."""
    return -(-tokens // OWN_STEP) * OWN_STEP
