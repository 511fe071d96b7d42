"""How long a prompt may be in each mode: the measurements, and what follows from them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class MemoryPoint(BaseModel):
    """One short run of a mode."""

    tokens: int
    peak_bytes: int  # above the loaded model
    seconds: float


class Confirmation(BaseModel):
    """A run of a mode under an enforced budget."""

    tokens: int
    fits: bool
    peak_bytes: int | None = None  # above the loaded model; None where the run did not come to its end
    seconds: float | None = None
    excess_bytes: int | None = None  # of a run that did not fit: what was missing at least, if known
    reason: str | None = None  # why it did not fit


class ModeResult(BaseModel):
    """How long a prompt may be in one mode. Bytes are `fit_base + fit_token * tokens`."""

    mode: str
    points: list[MemoryPoint] = Field(default_factory=list)
    fit_base: float | None = None  # bytes
    fit_token: float | None = None  # bytes for each token
    law_base: float
    law_token: float
    law_terms: dict[str, float] = Field(default_factory=dict)  # bytes for each token, by what takes them
    fit_over_law: float | None = None  # of the bytes for each token
    predicted_tokens: int | None = None  # by the fit, in the budget, within the model's own limit
    limited_by: Literal["memory", "model"] | None = None
    confirmations: list[Confirmation] = Field(default_factory=list)
    capped: bool = False  # the confirming run was shorter than predicted, to save time
    max_tokens: int | None = None  # longest that a confirming run has shown to fit
    notes: list[str] = Field(default_factory=list)


class TracePoint(BaseModel):
    """Memory in use above the loaded model, some time after the start of a run."""

    seconds: float
    used_bytes: int


class Trace(BaseModel):
    """Memory over the time of one run."""

    mode: str
    tokens: int
    points: list[TracePoint]
