"""The numbers of `prefill bench`: what `bench.json` holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from prefillcli.compress.pickers.registry import PICKERS
from prefillcli.core.feature import features
from prefillcli.decode.speculation.registry import DRAFTERS
from prefillcli.stats.audit import Audit

# How far the rounds of a measurement lie apart.


class Range(BaseModel):
    """Median, smallest and largest of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(median=statistics.median(values), low=min(values), high=max(values))


# The numbers of `prefill bench --rationale`: what `bench.json` holds of the ways to write texts.


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


SCHEMA_VERSION = 1
REFERENCE = "hybrid"
"""The method that the others are compared with."""

UNCOMPRESSED = {
    "hf": "transformers, one prompt after the other",
    "full": "the layer walk, each prompt by itself",
    REFERENCE: "what prefill score does; the others are compared with it",
}
NAMED = {
    **{name: said for each in features() for name, (said, _) in each.methods.items()},
    "vllm": "vLLM in a process of its own, with a copy of the model; its prefix cache begins empty",
}
"""Methods that are compared only where they are named: they need more than the model, the rows and a minute."""
METHODS = UNCOMPRESSED | {kind.name: kind.summary for kind in PICKERS.values()} | NAMED
"""The methods, each with a line for readers of the tables."""


class Predicted(BaseModel):
    """Speedups over the reference that cost models promise; None where they say nothing of the method."""

    flops: float | None = None  # FLOPs of the reference's plan over those of the method's
    ratio: float | None = None  # 1 / (r + keep) at the mean length, r the draft's share of the FLOPs
    table5: float | None = None  # table 5 of SpecPrefill to the letter, each prompt by itself


class Answers(BaseModel):
    """What a method answers, beside the reference and the truth."""

    audit: Audit | None = None  # None for the reference itself
    accuracy: float | None = None  # share of rows whose likeliest label is right, where that is known
    accuracy_interval: tuple[float, float] | None = None  # 95 %, Clopper-Pearson
    auc: float | None = None


class ClassFlips(BaseModel):
    """Rows that the reference answers with a label, and how many of them a method answers with another."""

    label: str
    rows: int
    flips: int
    interval: tuple[float, float] | None  # 95 %, Clopper-Pearson; None without rows


class ExitResult(BaseModel):
    """Where rows left the model."""

    max_flips: float
    rows_read: int  # other rows, which the exits were learnt on
    left: dict[str, int]  # rows by the layers they went through, then "full"
    layers_saved: float  # share of the layers of computed tokens
    classes: list[ClassFlips]


class LayerDrift(BaseModel):
    """Of one recurrent layer, over some rows; layers are numbered from 1."""

    layer: int
    median: float
    largest: float


class StateDrift(BaseModel):
    """How far the final states of recurrent layers are from those of the whole prompt.

    L2 distance over the norm of the latter; median and largest over all rows and layers.
    """

    rows: int  # compressed ones that were looked at
    median: float
    largest: float
    layers: list[LayerDrift]


class MethodResult(BaseModel):
    """A method on a workload."""

    method: str
    keep: float | None = None
    seconds: Range
    rows_per_second: float
    tokens_per_second: float  # prompt tokens, whether they were read or not
    target_tokens: int  # computed
    draft_tokens: int
    kept: float  # share of the prompt tokens that the target read or shared
    flops: float | None = None  # of both models
    peak_bytes: int | None = None  # above what was in use before, weights among it
    speedup: Range  # seconds of the reference over the method's, within a round
    predicted: Predicted
    measured_over_predicted: float | None = None  # by FLOPs
    fallbacks: dict[str, int] = Field(
        default_factory=dict
    )  # rows read in full although they were to be compressed, by reason
    answers: Answers
    exits: ExitResult | None = None  # of a method that lets rows leave
    drift: StateDrift | None = None  # of a method that drops tokens, where the model has recurrent layers


class WorkloadResult(BaseModel):
    """All methods on a workload."""

    workload: str
    made: bool
    rows: int
    truth_rows: int
    prompt_tokens: int
    unique_tokens: int  # of the trie of all prompts
    rounds: int = 0  # timed
    reference_able: bool | None = None  # better than chance, where the truth is known
    notes: list[str] = Field(default_factory=list)
    methods: list[MethodResult] = Field(default_factory=list)


class BenchReport(BaseModel):
    """What `bench.json` holds."""

    schema_version: int = SCHEMA_VERSION
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    started: str = ""  # ISO 8601, UTC
    output: str | None = None
    page: str | None = None
    seconds: float = 0.0  # of the whole run
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, str | int] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    workloads: list[WorkloadResult] = Field(default_factory=list)
    texts: list[TextResult] = Field(default_factory=list)  # with --rationale, in the place of `workloads`

    @property
    def results(self) -> Sequence[WorkloadResult | TextResult]:
        """What was measured."""
        return [*self.workloads, *self.texts]

    def summary(self) -> dict[str, Any]:
        """The last line on stdout."""
        line: dict[str, Any] = {
            "status": self.status,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "output": self.output,
            "page": self.page,
            "workloads": {each.workload: _sum_up(each) for each in self.workloads}
            | {each.workload: each.summary() for each in self.texts},
        }
        return line | ({"error": self.error} if self.error else {})


def _sum_up(workload: WorkloadResult) -> dict[str, Any]:
    return {
        each.method: {
            "seconds": round(each.seconds.median, 4),
            "speedup": round(each.speedup.median, 3),
            "flips": None if each.answers.audit is None else each.answers.audit.flips,
        }
        for each in workload.methods
    }
