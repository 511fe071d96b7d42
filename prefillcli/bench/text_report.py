"""The numbers of `prefill bench --rationale`: what `bench.json` holds of the ways to write texts."""

from __future__ import annotations

from pydantic import BaseModel, Field

from prefillcli.bench.measured_range import Range
from prefillcli.decode.speculation.registry import DRAFTERS

TEXT_REFERENCE = "plain"
"""The way of writing that the others are compared with."""

TEXT_METHODS = {
    TEXT_REFERENCE: "lock-step decoding behind the scored packs, without guesses; the others are compared with it",
    **{kind.name: f"with guesses: {kind.guesses}" for kind in DRAFTERS.values()},
    "generate": "scores of the layer walk, then transformers' generate, which reads each prompt again",
    "generate-padded": "the same in padded batches, longest prompts first",
    "vllm": "vLLM in a process of its own, with a copy of the model; its prefix cache begins empty",
}
"""The ways to write texts, each with a line for readers of the tables."""


class Guesses(BaseModel):
    """What a drafter guessed: `accepted` of the `proposed` tokens were right."""

    proposed: int
    accepted: int


class TextMethodResult(BaseModel):
    """A way of writing, on some prompts."""

    method: str
    seconds: Range  # scores and texts
    decode_seconds: Range  # of that, from the prompts in memory to the texts
    speedup: Range  # seconds of the reference over the method's, within a round
    decode_speedup: Range  # the same of decoding alone
    tokens_per_second: float  # written, by decoding alone
    passes_per_token: float | None  # of the model over a row
    guesses: dict[str, Guesses] = Field(default_factory=dict)  # by drafter
    peak_bytes: int | None = None  # above what was in use before, weights among it
    same_texts: int  # as the reference's
    near_ties: int  # texts that are not, where the two best tokens of the reference's were once within 1e-4


class TextResult(BaseModel):
    """All ways of writing on a workload."""

    workload: str
    rows: int
    prompt_tokens: int
    text_tokens: int  # that the reference has written
    rounds: int
    notes: list[str] = Field(default_factory=list)
    methods: list[TextMethodResult] = Field(default_factory=list)

    def summary(self) -> dict[str, dict[str, float]]:
        """For the last line on stdout."""
        return {
            each.method: {
                "seconds": round(each.seconds.median, 4),
                "decode_seconds": round(each.decode_seconds.median, 4),
                "speedup": round(each.speedup.median, 3),
                "decode_speedup": round(each.decode_speedup.median, 3),
            }
            for each in self.methods
        }
