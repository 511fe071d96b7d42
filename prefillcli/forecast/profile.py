"""`profile.json`: what `prefill profile` found, for the commands that plan with it."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from prefillcli.data.output.store import open_file
from prefillcli.errors import UsageError
from prefillcli.forecast.machine import Machine, this_machine
from prefillcli.forecast.replay_results import Replay
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan
from prefillcli.report.survey import Survey

SCHEMA_VERSION = 1

#: What a fit of completion times must reach before anything is predicted with it (docs/profile.md says why).
LEAST_PEARSON = 0.9
MOST_MEAN_ERROR = 0.25
MOST_ERROR = 0.75

_SAME_MEMORY = 0.05  # kernels of one machine count its memory a little differently


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
    excess_bytes: int | None = None  # of a run that did not fit: what it lacked at least, where it could tell
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


class CompletionPoint(BaseModel):
    """A prompt of `input_tokens`, of which the K,V of `cached_tokens` were held from the pack before."""

    input_tokens: int
    cached_tokens: int
    seconds: float  # least of the rounds
    predicted: float  # by the linear fit
    heldout: bool = False  # not used for the fits


class CompletionModel(BaseModel):
    """Seconds of prefills.

    Of one prompt, linear as in PrefillOnly 6.3: `base + per_input * input + per_cached * cached`, and its proxy, which
    takes seconds to be proportional to `input - cached` but for a constant. Of a whole plan: `per_pack`, `per_token`
    and `per_read` (a prompt's own last layer, head and calls) and `per_pair` (a query that sees a key in one layer).
    """

    base: float
    per_input: float
    per_cached: float
    pearson: float  # of the linear fit with the measured seconds
    pearson_proxy: float  # of input - cached with the measured seconds
    heldout_error: float | None = None  # mean relative error of the linear fit on points it has not seen
    heldout_error_proxy: float | None = None
    heldout_error_plan: float | None = None
    heldout_worst_plan: float | None = None  # the largest such error; None in older files
    rounds: int | None = None  # in which every pack was timed; None in older files
    disturbance: float | None = None  # median over the packs of the slowest round over the fastest

    per_pack: float
    per_token: float
    per_read: float
    per_pair: float
    windows: list[tuple[int | None, int]]  # sliding window (or none), and how many layers attend through it
    points: list[CompletionPoint] = Field(default_factory=list)

    def weakness(self) -> str | None:
        """Why nothing may be predicted with this fit; None for one that may be used."""
        found = []
        if not self.pearson >= LEAST_PEARSON:
            found.append(f"the linear fit has Pearson r {self.pearson:.2f}, and {LEAST_PEARSON} is the least")
        for error, most, kind in (
            (self.heldout_error_plan, MOST_MEAN_ERROR, "mean"),
            (self.heldout_worst_plan, MOST_ERROR, "largest"),
        ):
            if error is not None and not error <= most:
                found.append(f"on packs left out its {kind} error is {error:.0%}, and {most:.0%} is the most")
        return "; ".join(found) or None

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of the model over `plan`, reading and writing not counted."""
        return sum(self.pack_seconds(pack) for pack in plan.packs)

    def pack_seconds(self, pack: Pack) -> float:
        """Predicted seconds of one pack."""
        one, tokens, reads, pairs = features(pack, self.windows)
        return self.per_pack * one + self.per_token * tokens + self.per_read * reads + self.per_pair * pairs

    def request_seconds(self, input_tokens: int, cached_tokens: int = 0) -> float:
        """Predicted seconds of a pack of one prompt, of which `cached_tokens` need not be computed."""
        new = input_tokens - cached_tokens
        pairs = sum(layers * _pairs(cached_tokens, new, window) for window, layers in self.windows)
        return self.per_pack + self.per_token * new + self.per_read + self.per_pair * pairs

    def prompt_seconds(self, input_tokens: int, cached_tokens: int = 0) -> float:
        """Predicted seconds of one prompt, by the linear fit."""
        return self.base + self.per_input * input_tokens + self.per_cached * cached_tokens


def features(pack: Pack, windows: Iterable[tuple[int | None, int]]) -> tuple[float, float, float, float]:
    """What a pack's seconds are made of: 1, tokens computed, prompts' ends, and (query, key) pairs over all layers."""
    nodes = [
        (start, end - begin)
        for start, begin, end in zip(pack.starts, pack.offsets[:-1], pack.offsets[1:], strict=True)
    ]
    pairs = sum(layers * sum(_pairs(start, length, window) for start, length in nodes) for window, layers in windows)
    return 1.0, float(len(pack.tokens)), float(len(pack.reads)), pairs


def _pairs(start: int, length: int, window: int | None) -> float:
    """Keys seen by `length` queries behind `start` other tokens of their path, themselves included."""
    return _triangle(start + length, window) - _triangle(start, window)


def _triangle(tokens: int, window: int | None) -> float:
    ramp = min(tokens, window) if window else tokens
    return ramp * (ramp + 1) / 2 + (tokens - ramp) * ramp


class Profile(BaseModel):
    """What `profile.json` holds."""

    schema_version: int = SCHEMA_VERSION
    created: str = ""  # ISO 8601, UTC
    model: str  # digest, prefillcli.data.proof.fingerprints.hash_model
    model_name: str  # as it was given
    family: str
    dtype: str  # "float32", ...
    device: str  # "cpu", "cuda", ...
    machine: Machine
    budget_bytes: int  # for activations and K,V
    chunk_tokens: int
    max_model_tokens: int  # the model's own limit
    modes: list[ModeResult] = Field(default_factory=list)
    traces: list[Trace] = Field(default_factory=list)
    completion: CompletionModel | None = None  # None where no fit was good enough to predict with
    no_completion: str | None = None  # then why
    replays: list[Replay] = Field(default_factory=list)
    survey: Survey | None = None  # of the input, where one was given
    notes: list[str] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    seconds_taken: float = 0.0  # of the profile run

    @classmethod
    def load(cls, path: str) -> Profile | None:
        """The profile at a path or URL; None if there is none. Raises UsageError for a file that is no profile.

        A fit that is too weak is left out, and the replays that were made with it, whoever stored them.
        """
        try:
            with open_file(path) as file:
                text = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{path}: cannot read the profile: {error.strerror or error}") from None
        try:
            content = json.loads(text)
        except ValueError:  # also of bytes that are no text
            content = None
        if not isinstance(content, dict):
            raise UsageError(f"{path}: not a profile (not JSON); make one with prefill profile")
        if (number := content.get("schema_version")) != SCHEMA_VERSION:
            raise UsageError(
                f"{path}: a profile of version {number!r}, not {SCHEMA_VERSION}; make a new one with prefill profile"
            )
        try:
            profile = cls.model_validate_json(text)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise UsageError(f"{path}: not a profile ({where}); make one with prefill profile") from None
        if profile.completion is not None and (why := profile.completion.weakness()) is not None:
            profile.completion, profile.no_completion, profile.replays = None, why, []
        return profile

    def mismatch(self, model_hash: str, dtype: Any, device: Any) -> str | None:
        """Why the profile says nothing of this model here and now; None if it applies.

        `dtype` and `device` are torch's own or their names.
        """
        name, kind = str(dtype).removeprefix("torch."), str(device).partition(":")[0]
        torch_now, torch_then = version("torch"), self.versions.get("torch")
        if model_hash != self.model:
            return f"it was made for another model ({self.model_name})"
        if name != self.dtype:
            return f"it was made with dtype {self.dtype}, not {name}"
        if kind != self.device.partition(":")[0]:
            return f"it was made on {self.device}, not {kind}"
        if torch_then not in (None, torch_now):
            return f"it was made with torch {torch_then}, not {torch_now}"
        now, then = this_machine(str(device)), self.machine
        if kind != "cpu":
            return None if now.gpu == then.gpu else f"it was made on another device ({then.gpu}, not {now.gpu})"
        if now.cpu != then.cpu or now.cores != then.cores:
            return f"it was made on another machine ({then.cpu}, {then.cores} cores)"
        if abs(now.memory_bytes - then.memory_bytes) > _SAME_MEMORY * then.memory_bytes:
            return f"it was made on another machine ({then.memory_bytes / 2**30:.1f} GiB of memory)"
        if now.threads != then.threads:
            return f"it was made with {then.threads} threads, not {now.threads}"
        return None

    @property
    def times(self) -> CompletionModel:
        """The fit of completion times. Raises ValueError where there is none: `find_profile` gives no such profile."""
        if self.completion is None:
            raise ValueError(f"no completion times: {self.no_completion}")
        return self.completion

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of the model over `plan`."""
        return self.times.seconds(plan)

    def tokens_within(self, seconds: float, *, most: int) -> int:
        """Tokens, 1 to `most`, that the model computes in this time: of one prompt, or of as long ones as it takes."""
        longest, times = self.max_model_tokens, self.times

        def taken(tokens: int) -> float:
            return times.request_seconds(min(tokens, longest)) * max(1.0, tokens / longest)

        return bisect.bisect_right(range(2, most + 1), seconds, key=taken) + 1

    @property
    def token_bytes(self) -> float | None:
        """Bytes that the walk has taken for each token of a prompt; None if that was not measured."""
        hybrid = self.mode("hybrid")
        return None if hybrid is None else hybrid.fit_token

    def mode(self, name: str) -> ModeResult | None:
        """What was found about a mode, if it was profiled."""
        return next((each for each in self.modes if each.mode == name), None)
