"""What a run wrote behind rows, and what that took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from prefillcli.data.output.counts import Counts
from prefillcli.decode.continuations import DecodingReport
from prefillcli.engines.memory_plan import TEXTS


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
