"""How long prefills take: a model fitted to measured packs."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from prefillcli.data.filesystems import MissingFileError, read_given
from prefillcli.data.proof import hash_model, sealed_text, take_checksum
from prefillcli.engines.registry import ENGINES
from prefillcli.errors import UsageError
from prefillcli.forecast.survey import Survey
from prefillcli.models.open import Opened
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan
from prefillcli.runtime.cores import affinity, cpu_name
from prefillcli.runtime.memory import total_memory

#: The quality that a fit of completion times must reach before it predicts anything; docs/profile.md gives the
#: reasons.
LEAST_PEARSON = 0.9
MOST_MEAN_ERROR = 0.25
MOST_ERROR = 0.75


class CompletionPoint(BaseModel):
    """A prompt of `input_tokens`, of which the K,V of `cached_tokens` were held from the pack before."""

    input_tokens: int
    cached_tokens: int
    seconds: float  # least of the rounds
    predicted: float  # by the linear fit
    heldout: bool = False  # not used for the fits


class CompletionModel(BaseModel):
    """Seconds of prefills.

    For one prompt, linear as in PrefillOnly 6.3: `base + per_input * input + per_cached * cached`. Its proxy takes
    seconds to be proportional to `input - cached`, plus a constant. For a whole plan: `per_pack`, `per_token`,
    `per_read` (a prompt's own last layer, head and calls) and `per_pair` (a query that sees a key in one layer).
    """

    base: float
    per_input: float
    per_cached: float
    pearson: float  # correlation of the linear fit with the measured seconds
    pearson_proxy: float  # correlation of input - cached with the measured seconds
    heldout_error: float | None = None  # mean relative error of the linear fit on points that it has not seen
    heldout_error_proxy: float | None = None
    heldout_error_plan: float | None = None
    heldout_worst_plan: float | None = None  # the largest such error; None in older files
    rounds: int | None = None  # rounds in which every pack was timed; None in older files
    disturbance: float | None = None  # median over the packs of the slowest round over the fastest

    per_pack: float
    per_token: float
    per_read: float
    per_pair: float
    windows: list[tuple[int | None, int]]  # sliding window (or none), and how many layers attend through it
    points: list[CompletionPoint] = Field(default_factory=list)

    def weakness(self) -> str | None:
        """The reason not to predict with this fit; None if it may be used."""
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


def features(pack: Pack, windows: Iterable[tuple[int | None, int]]) -> tuple[float, float, float, float]:
    """The terms of a pack's seconds: 1, computed tokens, prompts' ends, and (query, key) pairs over all layers."""
    nodes = [
        (start, end - begin)
        for start, begin, end in zip(pack.starts, pack.offsets[:-1], pack.offsets[1:], strict=True)
    ]
    pairs = sum(layers * sum(_pairs(start, length, window) for start, length in nodes) for window, layers in windows)
    return 1.0, float(len(pack.tokens)), float(len(pack.reads)), pairs


def _pairs(start: int, length: int, window: int | None) -> float:
    # Keys that `length` queries see after `start` other tokens of their path, themselves included.
    return _triangle(start + length, window) - _triangle(start, window)


def _triangle(tokens: int, window: int | None) -> float:
    # The i-th token sees i keys, with a window at most `window`: a triangle, then a constant.
    ramp = min(tokens, window) if window else tokens
    return ramp * (ramp + 1) / 2 + (tokens - ramp) * ramp


# The machine of a profile.


class Machine(BaseModel):
    """The properties that determine how fast a model runs here."""

    cpu: str  # model name
    cores: int  # that this process may use
    threads: int  # that torch uses
    memory_bytes: int  # of the host, in all
    gpu: str | None = None  # name of the profiled device, if it is one


def this_machine(device: str) -> Machine:
    """The machine as it is now; `device` as torch writes it ("cpu", "cuda:0")."""
    import torch

    return Machine(
        cpu=cpu_name(),
        cores=len(affinity()),
        threads=torch.get_num_threads(),
        memory_bytes=total_memory(),
        gpu=torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    )


# How long a prompt may be in each mode: the measurements and the results.

#: The modes, each with a line for readers of the tables.
MODES = {
    "full": "transformers in one piece, the K,V of all layers kept",
    "chunked": "transformers chunk by chunk, the K,V of all layers kept",
    "hybrid": "as prefill score does it",
}

#: Modes that run transformers' own forward, which may fail on some architectures.
OF_TRANSFORMERS = ("full", "chunked")


class MemoryPoint(BaseModel):
    """One short run of a mode."""

    tokens: int
    peak_bytes: int  # above the loaded model
    seconds: float


class Confirmation(BaseModel):
    """A run of a mode under an enforced budget."""

    tokens: int
    fits: bool
    peak_bytes: int | None = None  # above the loaded model; None if the run did not reach its end
    seconds: float | None = None
    excess_bytes: int | None = None  # of a run that did not fit: the least number of missing bytes, if known
    reason: str | None = None  # why it did not fit


class ModeResult(BaseModel):
    """How long a prompt may be in one mode. Bytes are `fit_base + fit_token * tokens`."""

    mode: str
    points: list[MemoryPoint] = Field(default_factory=list)
    fit_base: float | None = None  # bytes
    fit_token: float | None = None  # bytes for each token
    law_base: float
    law_token: float
    law_terms: dict[str, float] = Field(default_factory=dict)  # bytes for each token, by their use
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


SCHEMA_VERSION = 1

DEFAULT_PROFILE = "profile.json"
_SAME_MEMORY = 0.05  # different kernels on one machine count its memory a little differently


class Profile(BaseModel):
    """The content of `profile.json`."""

    schema_version: int = SCHEMA_VERSION
    created: str = ""  # ISO 8601, UTC
    model: str  # digest, prefillcli.data.proof.hash_model
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
    completion: CompletionModel | None = None  # None if no fit was good enough to predict with
    no_completion: str | None = None  # then why
    regroup_layers: float | None = None  # cost of laying out a token anew after an early exit, in layers of a token
    keys_layers: float | None = None  # cost of only a layer's K,V, in layers of a token
    survey: Survey | None = None  # of the input, if one was given
    notes: list[str] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    seconds_taken: float = 0.0  # of the profile run

    @classmethod
    def load(cls, path: str) -> Profile | None:
        """The profile at a path or URL; None without one. Raises UsageError for a file that is not a profile.

        A fit that is too weak is left out.
        """
        try:
            text = read_given("--profile", path, "make one with prefill profile")
        except MissingFileError:
            return None
        try:
            content = json.loads(text)
        except ValueError:  # including bytes that are no text
            content = None
        if not isinstance(content, dict):
            raise UsageError(f"{path}: not a profile (not JSON); make one with prefill profile")
        if (number := content.get("schema_version")) != SCHEMA_VERSION:
            raise UsageError(
                f"{path}: a profile of version {number!r}, not {SCHEMA_VERSION}; make a new one with prefill profile"
            )
        if take_checksum(content) is False:
            raise UsageError(f"{path}: not as prefill profile wrote it; make a new one with prefill profile")
        try:
            profile = cls.model_validate_json(text)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise UsageError(f"{path}: not a profile ({where}); make one with prefill profile") from None
        if profile.completion is not None and (why := profile.completion.weakness()) is not None:
            profile.completion, profile.no_completion = None, why
        return profile

    def sealed(self) -> str:
        """The text of `profile.json`, for `load`."""
        return sealed_text(self.model_dump_json())

    def mismatch(self, model_hash: str, dtype: Any, device: Any) -> str | None:
        """The reason why the profile does not apply to this model here and now; None if it does.

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
        """The fit of completion times. Raises ValueError without one: `find_profile` gives no such profile."""
        if self.completion is None:
            raise ValueError(f"no completion times: {self.no_completion}")
        return self.completion

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of the model over `plan`."""
        return self.times.seconds(plan)

    def tokens_within(self, seconds: float, *, most: int) -> int:
        """Tokens, 1 to `most`, that the model computes in this time: of one prompt, or of prompts of the greatest
        length it takes."""
        longest, times = self.max_model_tokens, self.times

        def taken(tokens: int) -> float:
            return times.request_seconds(min(tokens, longest)) * max(1.0, tokens / longest)

        return bisect.bisect_right(range(2, most + 1), seconds, key=taken) + 1

    @property
    def token_bytes(self) -> float | None:
        """Bytes that the walk took for each token of a prompt; None if that was not measured."""
        hybrid = self.mode("hybrid")
        return None if hybrid is None else hybrid.fit_token

    def mode(self, name: str) -> ModeResult | None:
        """The result of a mode, if it was profiled."""
        return next((each for each in self.modes if each.mode == name), None)


def named_profile(path: str) -> Profile:
    """The profile of `--profile`. Raises UsageError if the file is missing or is no profile."""
    profile = Profile.load(path)
    if profile is None:
        raise UsageError(f"--profile {path}: no such file; `prefill profile` writes one")
    return profile


def find_profile(settings: Any, opened: Opened, digest: str | None = None) -> tuple[Profile | None, str, str | None]:
    """The profile that applies to a job of `ScoreSettings` here and has times to predict with, its path, and the
    reason if there is none.

    The `digest` is the model's, if it is known. For an engine that no profile describes, no reason is given. Without
    `--profile`, `profile.json` in the working directory is used. Raises UsageError if the named file is missing or is
    no profile.
    """
    path: str | None = settings.profile
    name = path or DEFAULT_PROFILE
    if "forecast" not in ENGINES[settings.engine].can:
        return None, name, None
    try:
        profile = named_profile(path) if path else Profile.load(name) if os.path.exists(name) else None
    except UsageError as error:
        if path:
            raise
        return None, name, str(error)  # nobody asked for this file
    if profile is None:
        return None, name, f"no {name} here; `prefill profile` with this model makes one"
    why = profile.mismatch(digest or hash_model(opened.files.origin), opened.files.dtype, opened.device)
    if why is not None:
        return None, name, f"{name} does not fit: {why}; `prefill profile` makes a new one"
    if profile.completion is None:
        why = f"{name} holds no completion times: {profile.no_completion}"
        return None, name, f"{why}; run `prefill profile` again on a quiet machine"
    return profile, name, None
