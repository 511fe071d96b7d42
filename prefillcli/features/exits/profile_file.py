"""The file of a job's exits: what a later job with the same model, labels and prompts may use again."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from prefillcli.errors import UsageError
from prefillcli.features.exits.policy import ExitPolicy, policy_of

# Whose flips are bounded: those of the rows of each label, or of all rows together.
FlipsOf = Literal["each", "all"]
ALL_ROWS: Final = "all rows"  # the name of the only class where the flips of all rows are bounded together


# What a calibration of exits found, as reports and profiles hold it.


class _Finding(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClassFinding(_Finding):
    """The rows that the model, read in full, answers with one label, or all rows, and how often exits answer them
    otherwise.

    `flips` of the `judged` rows flip at the tested `level`, and `bound` is the exact upper bound of the flip rate.
    `level` is None if no level passed: then no other label may leave early. `levels_passed` of those that were tried
    passed. It takes `rows_needed` judged rows to prove anything.
    """

    label: str
    fitted: int
    judged: int
    flips: int
    bound: float
    level: float | None
    levels_passed: int
    rows_needed: int


class ExitFinding(_Finding):
    """An exit layer, numbered from 0, and what its probe is worth.

    `correlation` is that of predicted and final margins of left-out rows, and `errors` are the roots of the mean
    squared error of a margin by kind of probe. `thresholds` are by label, None where rows with that label stay.
    `leaving` is the share of the judged rows that leave here.
    """

    layer: int
    probe: str
    correlation: float
    errors: dict[str, float]
    thresholds: tuple[float | None, ...]
    peek: bool
    leaving: float


class TradePoint(_Finding):
    """What the judged rows would have done at one level for all labels: this is an estimate and proves nothing.

    `flip_rates` are by label that the full read gives, None without such rows.
    """

    level: float
    leaving: float
    gain: float
    flip_rate: float
    flip_rates: tuple[float | None, ...]


class ExitFindings(_Finding):
    """All that a calibration of exits found.

    `reason` says why there are no exits. `layers` is the mean number of layers that a token of a judged row goes
    through, and `gain` what reading in full costs over what exits cost, for tokens that a row does not share.
    """

    max_flips: float
    confidence: float
    seed: int
    fitted: int
    judged: int
    dropped: int = 0  # rows with values that are not finite
    classes: tuple[ClassFinding, ...] = ()
    candidates: tuple[int, ...] = ()  # layers that exits were chosen among
    exits: tuple[ExitFinding, ...] = ()
    layers: float | None = None
    gain: float | None = None
    curve: tuple[TradePoint, ...] = ()
    reason: str | None = None


SCHEMA_VERSION: Final = 1
_AGAIN = "make one with prefill score --exit: it is written beside the report"


class ExitProfile(BaseModel):
    """The exits of a job, or why it has none, and whose they are. It has no date: the same rows make the same file.

    `model`, `prompt` and `label_tokens` are digests, `labels` the labels' names in their order. `layers` is the number
    of the model's layers. `exits` is a policy as `ExitPolicy.to_json` writes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["prefill exit profile"] = "prefill exit profile"
    schema_version: Literal[1] = SCHEMA_VERSION
    model: str
    prompt: str
    labels: tuple[str, ...] = Field(min_length=2)
    label_tokens: str = ""
    layers: int = Field(ge=2)
    max_flips: float = Field(gt=0, lt=1)
    flips_of: FlipsOf = "each"
    exits: list[dict[str, Any]] | None
    findings: ExitFindings

    @field_validator("exits")
    @classmethod
    def _is_a_policy(cls, exits: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if exits is not None:
            policy_of(exits)
        return exits

    @model_validator(mode="after")
    def _fits_together(self) -> ExitProfile:
        policy = self.policy
        for each in policy.exits if policy else ():
            if each.layer >= self.layers - 1:
                raise ValueError(f"layer {each.layer + 1} of {self.layers} is no exit layer")
            if not len(each.thresholds) == each.probe.labels == len(self.labels):
                raise ValueError(f"the exit after layer {each.layer + 1} is not for {len(self.labels)} labels")
        return self

    @property
    def policy(self) -> ExitPolicy | None:
        """The exits; None if there are none."""
        return None if self.exits is None else policy_of(self.exits)

    def to_json(self) -> str:
        """The content of the file: text that ends with a line feed."""
        return self.model_dump_json(indent=1) + "\n"


def exit_profile_of(content: bytes | str, path: str) -> ExitProfile:
    """The profile in a file's `content`. Raises UsageError, which names the `path`, if it is none or is damaged."""
    try:
        return ExitProfile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["loc"] == ("schema_version",):
            reason = f"it is of another version of prefill (schema_version is not {SCHEMA_VERSION})"
        elif first["type"] == "missing" or (first["loc"] in {(), ("kind",)} and first["type"] != "value_error"):
            reason = "it is no exit profile, or it is damaged"
        else:
            reason = f"it is damaged: {where + ': ' if where else ''}{first['msg']}"
        raise UsageError(f"--exit-profile {path}: {reason}\n{_AGAIN}") from None


def require_same_job(
    profile: ExitProfile,
    path: str,
    *,
    model: str,
    prompt: str,
    labels: tuple[str, ...],
    label_tokens: str,
    layers: int,
    max_flips: float,
    flips_of: FlipsOf = "each",
) -> None:
    """Raise UsageError if a profile is of another model, prompt or labels than a job, or proves less than it asks."""
    given = {
        "model": profile.model == model and profile.layers == layers,
        "prompt settings": profile.prompt == prompt,
        "labels": profile.labels == labels,
        "label spellings": profile.label_tokens == label_tokens,
    }
    other = [name for name, same in given.items() if not same]
    if other:
        raise UsageError(
            f"--exit-profile {path}: it was made for another job: different {', '.join(other)}\n"
            "leave it out: exits are then calibrated on rows of this job"
        )
    if profile.flips_of != flips_of:
        raise UsageError(
            f"--exit-profile {path}: it was learnt with --flips-of {profile.flips_of}, not {flips_of}\n"
            f"give --flips-of {profile.flips_of}, or leave the profile out"
        )
    if profile.max_flips > max_flips:
        raise UsageError(
            f"--exit-profile {path}: it proves at most {profile.max_flips:.2%} flips, --max-flips asks for "
            f"{max_flips:.2%}\ngive --max-flips {profile.max_flips:g}, or leave the profile out"
        )
