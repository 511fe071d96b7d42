"""What a run wrote behind rows, and what that took."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from prefillcli.data.output.columns import Counts
from prefillcli.data.rows import Rationale, SectionEffect
from prefillcli.decode.continuations import DecodingReport
from prefillcli.engines.memory_plan import TEXTS
from prefillcli.report.rendering import Cell, counted, minutes_and_seconds, row_name, signed_bar, visible
from prefillcli.report.section import Bar, Part, Section, Strip


class DrafterUse(BaseModel):
    """What guessed tokens ahead, and how often it was right."""

    rounds: int  # guesses for one row each
    proposed: int  # tokens
    accepted: int  # of them, those that the model chose itself
    acceptance: float | None = None  # accepted over proposed; None where nothing was proposed


class SectionChange(BaseModel):
    """A section of a prompt, and by how much the score falls without it. The name is untrusted."""

    section: str
    change: float


class WrittenRow(BaseModel):
    """A row that was written about or weighed. All texts are untrusted."""

    row: int | None  # None where rows have ids
    id: str | None
    score: float
    prediction: str | None
    rationale: str | None = None
    finish_reason: str | None = None
    source: str | None = None
    evidence: list[SectionChange] | None = None


class RationaleUse(BaseModel):
    """Rows and tokens are those of the output, all else is of this run."""

    rows: int = 0  # that are written about
    tokens: int = 0  # of their texts
    finish_reasons: dict[str, int] = Field(default_factory=dict)  # rows by why their text ends
    sources: dict[str, int] = Field(default_factory=dict)  # rows by what it was written from
    evidence_rows: int = 0  # whose sections were weighed
    kv: str | None = None  # kept while prompts are scored, or read again; None where no plan says it
    kv_reason: str | None = None
    kv_bytes: int | None = None  # that are kept at a time, at most
    speculation: str | None = None  # as it was asked for; None in a merge
    kept_prompts: int = 0  # that had their K,V kept while they were scored
    again_prompts: int = 0  # that were read once more
    again_tokens: int = 0  # computed for that
    prefill_seconds: float = 0.0  # reading them once more
    decode_seconds: float = 0.0  # writing
    written_tokens: int = 0  # of this run
    passes: int = 0  # of the model, over all rows that were written together
    passes_per_token: float | None = None  # of the model, for one token of a row: 1 without speculation
    drafters: dict[str, DrafterUse] = Field(default_factory=dict)  # by level
    shown: list[WrittenRow] = Field(default_factory=list)  # with --show-text, the first ones

    @property
    def tokens_per_second(self) -> float | None:
        """Written in this run, while it decoded."""
        return self.written_tokens / self.decode_seconds if self.decode_seconds else None

    @classmethod
    def of(cls, decoded: DecodingReport | None, speculation: str | None) -> RationaleUse:
        """What writing took, of all workers; None: nothing was written in this run."""
        if decoded is None:
            return cls(speculation=speculation)
        return cls(
            speculation=speculation,
            kept_prompts=decoded.kept_prompts,
            again_prompts=decoded.again_prompts,
            again_tokens=decoded.prompt_tokens,
            prefill_seconds=decoded.prompt_seconds,
            decode_seconds=decoded.seconds,
            written_tokens=decoded.tokens,
            passes=decoded.passes,
            passes_per_token=decoded.row_passes / decoded.tokens if decoded.tokens else None,
            drafters={
                name: DrafterUse(
                    rounds=each.rounds,
                    proposed=each.proposed,
                    accepted=each.accepted,
                    acceptance=each.accepted / each.proposed if each.proposed else None,
                )
                for name, each in sorted(decoded.drafters.items())
            },
        )

    def take_plan(self, plan: Mapping[str, Any]) -> None:
        """Take over what a job's plan says of K,V behind which texts are written."""
        texts = plan.get(TEXTS)
        if texts is not None:
            self.kv, self.kv_reason, self.kv_bytes = texts["kv"], texts["reason"], texts["bytes"]

    def take(self, counts: Counts) -> None:
        """Take over what is known of the output's rows, those of earlier attempts included."""
        found = counts.tallies.rationales
        self.rows, self.tokens, self.evidence_rows = found.rows, found.tokens, counts.tallies.evidence
        self.finish_reasons, self.sources = dict(found.finish_reasons), dict(found.sources)


# What a run wrote, in a few lines for the terminal and the page.


def rationale_lines(use: RationaleUse) -> Iterator[tuple[str, str]]:
    """The lines that rationales and evidence add to the table of a run: name and text."""
    if use.rows:
        yield "rationales", f"{counted(use.rows, 'row')} of {counted(use.tokens, 'token')}; {_by(use.finish_reasons)}"
        if set(use.sources) != {"full"}:
            yield "written from", _by(use.sources)
    if use.evidence_rows:
        yield "evidence", f"{counted(use.evidence_rows, 'row')} without each of their sections"
    if use.written_tokens:
        yield "writing", _writing(use)
    if use.again_prompts:
        yield (
            "read again",
            f"{counted(use.again_prompts, 'prompt')}, {counted(use.again_tokens, 'token')} in "
            f"{minutes_and_seconds(use.prefill_seconds)}; {use.kept_prompts:,} kept from scoring",
        )
    if use.drafters:
        yield (
            "speculation",
            "; ".join(
                f"{name} {each.accepted:,} of {counted(each.proposed, 'token')} right"
                + ("" if each.acceptance is None else f" ({each.acceptance:.1%})")
                for name, each in use.drafters.items()
            ),
        )


def _writing(use: RationaleUse) -> str:
    text = f"{counted(use.written_tokens, 'token')} in {minutes_and_seconds(use.decode_seconds)}"
    if use.tokens_per_second is not None:
        text += f", {use.tokens_per_second:,.0f} tokens/s"
    if use.passes_per_token is not None:
        text += f", {use.passes_per_token:.2f} passes a token"
    return text


def _by(rows: Mapping[str, int]) -> str:
    most_first = sorted(rows.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{visible(name, line=True)} {number:,}" for name, number in most_first)


# A row's rationale and the evidence beside it, as terminal and page show them. Both are untrusted text.


NO_REASON = "It is not the reason for the score: it is text that the model finds likely behind its answer."
WHAT_EVIDENCE_IS = (
    "Change: how far the score of the first label falls when the section is left out. Sections act together, so "
    "changes do not add up."
)
_SIDE = 20  # characters of the longest bar


def evidence_bars(effects: Sequence[SectionEffect]) -> list[Bar]:
    """A bar for each section from the middle of its track, in the order of the column: the largest change first."""
    longest = _longest(effects)
    found = []
    for section, change in effects:
        half = 50 * abs(change) / longest if longest else 0.0
        kind, start = ("alarm", 50 - half) if change < 0 else ("s0", 50.0)
        middle = Strip("middle", 50.0, 0.2)
        found.append(Bar(visible(section, line=True), half, _change(change), kind, start, more=(middle,)))
    return found


def evidence_rows(effects: Sequence[SectionEffect]) -> list[list[str]]:
    """A header, and a line with a bar for each section, safe to show."""
    longest = _longest(effects)
    found = [["section", "change", ""]]
    for section, change in effects:
        name, drawn = Cell(visible(section, line=True), "name"), Cell(signed_bar(change, longest, _SIDE), "chars")
        found.append([name, _change(change), drawn])
    return found


def rationale_text(rationale: Rationale, begins: str = "") -> str:
    """The text behind the words that it goes on, or why there is none; safe to show."""
    if rationale.text is None:
        return f"nothing was written ({rationale.finish_reason})"
    return visible(f"{begins} {rationale.text.strip()}".strip())


def rationale_facts(rationale: Rationale) -> str:
    """How the text ended and what it was written from, in a line that is safe to show."""
    parts = [counted(rationale.tokens, "token"), f"ended: {rationale.finish_reason}", f"from: {rationale.source}"]
    if math.isfinite(rationale.gap):
        parts.append(f"smallest gap between the two best tokens: {rationale.gap:.3g}")
    return visible("; ".join(parts), line=True)


def _longest(effects: Sequence[SectionEffect]) -> float:
    return max((abs(effect.change) for effect in effects), default=0.0)


def _change(change: float) -> str:
    return f"{change:+.4f}"


def rationale_section(use: RationaleUse) -> Section:
    """What terminal, page and metrics say of a run's rationales and evidence."""
    notes = [*([NO_REASON] if use.rows else []), *([WHAT_EVIDENCE_IS] if use.evidence_rows else [])]
    section = Section(
        title="Rationales and evidence",
        lines=list(rationale_lines(use)),
        parts=[*(Part(note=note) for note in notes), *map(_shown, use.shown)],
    )
    section.metric(
        "rationale_rows", "Rows of the output with a rationale by why it ends.", use.finish_reasons, "reason"
    )
    section.metric("rationale_tokens", "Tokens of the output's rationales.", use.tokens)
    section.metric("evidence_rows", "Rows of the output whose sections were weighed.", use.evidence_rows)
    section.metric("rationale_decode_seconds", "Seconds in which the last run wrote.", use.decode_seconds)
    section.metric("rationale_prefill_seconds", "Seconds in which it read prompts once more.", use.prefill_seconds)
    if use.passes_per_token is not None:
        section.metric("rationale_passes_per_token", "Passes of the model for one token.", use.passes_per_token)
    accepted = {name: each.acceptance for name, each in use.drafters.items() if each.acceptance is not None}
    section.metric("rationale_acceptance", "Share of the tokens guessed ahead that were right.", accepted, "drafter")
    return section


def _shown(row: WrittenRow) -> Part:
    effects = [SectionEffect(each.section, each.change) for each in row.evidence or ()]
    return Part(
        title=f"{row_name(row.row, row.id)}: {row.prediction or ''}, score {row.score:.4f}",
        text=row.rationale or "",
        bars=evidence_bars(effects),
        note=f"ended: {row.finish_reason}; from: {row.source}" if row.finish_reason is not None else "",
    )
