"""The time of prefills on one machine: `profile.json`, and the one measured curve that predicts packs."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from prefillcli.errors import UsageError
from prefillcli.forecast.survey import Survey
from prefillcli.models.open import Opened
from prefillcli.models.shape import NoCostModel, prefill_flops, seen_pairs
from prefillcli.options.engines import ENGINES
from prefillcli.options.settings import JobSettings
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan
from prefillcli.rows.filesystems import MissingFileError, read_given
from prefillcli.rows.proof import hash_model, sealed_text, take_checksum
from prefillcli.runtime.cores import affinity, cpu_name
from prefillcli.runtime.memory import total_memory
from prefillcli.runtime.version import version_of

MOST_ERROR = 0.25  # of a curve that may predict: the end of an eight-hour job is then known to within two hours
SCHEMA_VERSION = 2
DEFAULT_PROFILE = "profile.json"

#: The modes, each with a line for readers of the tables.
MODES = {
    "full": "transformers in one piece, the K,V of all layers kept",
    "chunked": "transformers chunk by chunk, the K,V of all layers kept",
    "hybrid": "as prefill score does it",
}


class Curve(BaseModel):
    """Seconds of a pack by its work, measured for prompts of several lengths.

    The work of a pack is the cost of its tokens, its prompts' ends and its (query, key) pairs, if size brings a pack
    no advantage: `costs` are the seconds of one of each. So one curve holds for packs of one long prompt and of many
    short ones.
    """

    costs: tuple[float, float, float]
    windows: list[tuple[int | None, int]]  # sliding window (or none), and how many layers attend through it
    points: list[tuple[int, float, float]]  # of packs of one prompt: its tokens, its work, its seconds; none falls
    error: float  # mean relative error on packs that the curve was not made of
    rounds: int  # in which every pack was timed; the fastest counts

    def seconds(self, plan: Plan) -> float:
        """Return the predicted seconds of the model over `plan`, reading and writing not counted."""
        return sum(map(self.pack_seconds, plan.packs))

    def pack_seconds(self, pack: Pack) -> float:
        """Return the predicted seconds of one pack."""
        return self.at(features(pack, self.windows))

    def of_layers(self, share: float) -> Curve:
        """Return the curve of a model of which this share of the layers is read."""
        points = [(tokens, work, share * seconds) for tokens, work, seconds in self.points]
        return self.model_copy(update={"points": points})

    def request_seconds(self, input_tokens: int, cached_tokens: int = 0) -> float:
        """Return the predicted seconds of a pack of one prompt, of which `cached_tokens` need not be computed."""
        new = input_tokens - cached_tokens
        return self.at((new, 1, sum(layers * seen_pairs(cached_tokens, new, own) for own, layers in self.windows)))

    def at(self, counts: tuple[float, float, float]) -> float:
        """Return the predicted seconds of a pack with these `features`: in proportion to the work beyond the last
        point."""
        work, (_, works, seconds) = float(np.dot(self.costs, counts)), zip(*self.points, strict=True)
        if work > works[-1] > 0:
            return float(seconds[-1] * work / works[-1])
        return float(np.interp(work, works, seconds))

    def tokens_within(self, seconds: float, *, most: int, longest: int) -> int:
        """Return the number of tokens, 1 to `most`, that the model computes in this time: of one prompt, or of prompts
        of the `longest` length it takes."""

        def taken(tokens: int) -> float:
            return self.request_seconds(min(tokens, longest)) * max(1.0, tokens / longest)

        return bisect.bisect_right(range(2, most + 1), seconds, key=taken) + 1


def features(pack: Pack, windows: Iterable[tuple[int | None, int]]) -> tuple[float, float, float]:
    """Return what a pack's seconds depend on: computed tokens, prompts' ends, and (query, key) pairs over all
    layers."""
    nodes = list(zip(pack.starts, np.diff(pack.offsets).tolist(), strict=True))
    pairs = sum(layers * sum(seen_pairs(*node, window) for node in nodes) for window, layers in windows)
    return len(pack.tokens), len(pack.reads), pairs


def this_machine(device: str) -> dict[str, Any]:
    """Return what determines how fast a model runs here; `device` as torch writes it ("cpu", "cuda:0")."""
    import torch

    if device.startswith("cuda"):
        return {"gpu": torch.cuda.get_device_name(device)}
    memory = f"{total_memory() / 2**30:.0f} GiB"  # kernels count the same memory a little differently
    return {"cpu": cpu_name(), "cores": len(affinity()), "threads": torch.get_num_threads(), "memory": memory}


class Confirmation(BaseModel):
    """A run of a mode, and whether its memory is within the budget."""

    tokens: int
    fits: bool
    peak_bytes: int | None = None  # above the loaded model; None if the run did not reach its end
    seconds: float | None = None
    reason: str | None = None  # why it did not fit


class ModeResult(BaseModel):
    """The longest prompt of one mode. By the law its bytes are `law_base + law_token * tokens`."""

    mode: str
    law_base: float
    law_token: float
    predicted_tokens: int = 0  # by the law, in the budget, within the model's own limit
    limited_by: Literal["memory", "model"] = "memory"
    confirmations: list[Confirmation] = Field(default_factory=list)
    capped: bool = False  # the confirming run was shorter than predicted, to save time
    max_tokens: int | None = None  # longest that a confirming run has shown to fit
    notes: list[str] = Field(default_factory=list)

    @property
    def confirmed(self) -> Confirmation | None:
        """The longest run that stayed within the budget."""
        return max((each for each in self.confirmations if each.fits), key=lambda each: each.tokens, default=None)


class Profile(BaseModel):
    """The content of `profile.json`."""

    schema_version: int = SCHEMA_VERSION
    created: str = ""  # ISO 8601, UTC
    model: str  # digest, prefillcli.rows.proof.hash_model
    model_name: str  # as it was given
    family: str
    dtype: str  # "float32", ...
    device: str  # "cpu", "cuda", ...
    machine: dict[str, Any]  # of `this_machine`
    budget_bytes: int  # for activations and K,V
    chunk_tokens: int
    max_model_tokens: int  # the model's own limit
    modes: list[ModeResult] = Field(default_factory=list)
    completion: Curve
    # Operations of the vision tower in a second, as `TowerShape` counts them; None where it was not measured.
    tower_speed: float | None = None
    no_completion: str | None = None  # the reason if the curve is not good enough to predict with
    survey: Survey | None = None  # of the input, if one was given
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    seconds_taken: float = 0.0  # of the profile run

    @classmethod
    def load(cls, path: str) -> Profile:
        """Load the profile at a path or URL. Raises UsageError for a file that is missing or not a profile."""
        try:
            text = read_given("--profile", path, "make one with prefill profile")
            content = json.loads(text)
            number, sealed = content.get("schema_version"), take_checksum(content)
        except MissingFileError:
            raise UsageError(f"--profile {path}: no such file; `prefill profile` writes one") from None
        except (ValueError, AttributeError):  # including bytes that are not text
            raise UsageError(f"{path}: not a profile (not JSON); make one with prefill profile") from None
        if number != SCHEMA_VERSION:
            raise UsageError(
                f"{path}: a profile of version {number!r}, not {SCHEMA_VERSION}; make a new one with prefill profile"
            )
        if sealed is False:
            raise UsageError(f"{path}: not as prefill profile wrote it; make a new one with prefill profile")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise UsageError(f"{path}: not a profile ({where}); make one with prefill profile") from None

    def sealed(self) -> str:
        """Return the text of `profile.json`, for `load`."""
        return sealed_text(self.model_dump_json())

    def mismatch(self, model_hash: str, dtype: Any, device: Any) -> str | None:
        """Return the reason why the profile does not apply to this model here and now; None if it does.

        `dtype` and `device` are torch's own or their names.
        """
        if model_hash != self.model:
            return f"it was made for another model ({self.model_name})"
        kind, torch_now = str(device).partition(":")[0], version_of("torch")
        then = {"dtype": self.dtype, "device": self.device.partition(":")[0], "torch": self.versions.get("torch")}
        now = {"dtype": str(dtype).removeprefix("torch."), "device": kind, "torch": torch_now}
        if then == now:  # else the device may not be here
            then, now = self.machine, this_machine(str(device))
        different = (f"with {name} {was}, not {now.get(name)}" for name, was in then.items() if was != now.get(name))
        return next((f"it was made {how}" for how in different), None)

    def seconds(self, plan: Plan) -> float:
        """Return the predicted seconds of the model over `plan`, with those of its vision tower."""
        seen = sum(image.operations for pack in plan.packs for image in pack.images)
        return self.completion.seconds(plan) + (seen / self.tower_speed if self.tower_speed else 0.0)

    def tokens_within(self, seconds: float, *, most: int) -> int:
        """Return the number of tokens, 1 to `most`, that the model computes in this time."""
        return self.completion.tokens_within(seconds, most=most, longest=self.max_model_tokens)

    def mode(self, name: str) -> ModeResult | None:
        """Return the result of a mode, if it was profiled."""
        return next((each for each in self.modes if each.mode == name), None)


def find_profile(
    settings: JobSettings, opened: Opened, digest: str | None = None
) -> tuple[Profile | None, str, str | None]:
    """Find the profile that applies to a job of `ScoreSettings` here and has times to predict with, its path, and
    the reason if there is none. Where not all layers of the model are read, its times are of those that are.

    The `digest` is the model's, if it is known. For an engine that no profile describes, no reason is given. Without
    `--profile`, `profile.json` in the working directory is used. Raises UsageError if the named file is missing or is
    no profile.
    """
    path: str | None = settings.prediction.profile
    name = path or DEFAULT_PROFILE
    if "forecast" not in ENGINES[settings.engine.engine].can:
        return None, name, None
    if not path and not os.path.exists(name):
        return None, name, f"no {name} here; `prefill profile` with this model makes one"
    try:
        profile = Profile.load(name)
    except UsageError as error:
        if path:
            raise
        return None, name, str(error)  # nobody asked for this file
    why = profile.mismatch(digest or hash_model(opened.files.origin), opened.files.dtype, opened.device)
    if why is not None:
        return None, name, f"{name} does not fit: {why}; `prefill profile` makes a new one"
    if profile.no_completion is not None:
        why = f"{name} holds no completion times: {profile.no_completion}"
        return None, name, f"{why}; run `prefill profile` again on a quiet machine"
    if profile.tower_speed is None and opened.images.sees:
        profile = profile.model_copy(update={"tower_speed": _text_speed(profile.completion, opened)})
    if (read := opened.files.read_layers) is not None:
        curve = profile.completion.of_layers(read / opened.files.config.get_text_config().num_hidden_layers)
        profile = profile.model_copy(update={"completion": curve})
    return profile, name, None


def _text_speed(curve: Curve, opened: Opened) -> float | None:
    # The operations a second of the text model in its longest prompt, as about those of its vision tower.
    tokens, _, seconds = curve.points[-1]
    try:
        return prefill_flops(opened.files.config.get_text_config(), tokens).total / seconds if seconds else None
    except NoCostModel:
        return None
