"""The forecast of exits and first models in a dry run: what they may save, and the rows that the proof takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from prefillcli.models.open import WORDS
from prefillcli.models.shape import NoCostModel, prefill_flops
from prefillcli.options.requirements import bounds_alone, first_readers
from prefillcli.reading.exits.learning import CHECKED_ROWS, bounded_classes
from prefillcli.reading.exits.policy import ExitProfile, identity_of, require_same_job
from prefillcli.reading.exits.proof import place_of, rows_to_learn
from prefillcli.reading.exits.rare import rows_to_fit
from prefillcli.reading.exits.report import ProvableFlips, provable_flips, provable_text
from prefillcli.reading.exits.ways import ways_of, ways_text
from prefillcli.report.section import mebibytes, visible
from prefillcli.runtime.clock import duration

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.forecast.survey import Survey
    from prefillcli.models.open import Opened, Small
    from prefillcli.reading.heads.heads import Heads


class HeadOutlook(BaseModel):
    """The layers of the model that a job with heads computes at most, and those that it loads, with the bytes of their
    weights and of what is around them."""

    model_layers: int
    read_layers: int
    loaded_layers: int
    model_bytes: int
    loaded_bytes: int

    @classmethod
    def of(cls, heads: Heads, opened: Opened) -> HeadOutlook:
        """Return that of a job with these heads and this model, as far as it is read."""
        from prefillcli.models.weights import layer_bytes  # takes torch along

        use, whole = heads.use(), replace(opened.files, read_layers=None)
        return cls(
            **use.model_dump(include={"model_layers", "read_layers", "loaded_layers"}),
            model_bytes=sum(layer_bytes(whole, opened.device).values()),
            loaded_bytes=sum(layer_bytes(opened.files, opened.device).values()),
        )

    @property
    def line(self) -> tuple[str, str]:
        """The line of name and text."""
        text = f"{self.read_layers} of {self.model_layers} layers computed"
        if self.loaded_layers == self.model_layers:
            return "head", text
        return "head", (
            f"{text}; those above are not loaded: {mebibytes(self.loaded_bytes)} of {mebibytes(self.model_bytes)} MiB"
        )


class ExitOutlook(BaseModel):
    """The exits of a job that has not begun. `gain` and `seconds` are those of the whole job; None without a profile
    of exits, or of the machine."""

    rows_in_full: int  # that are read first, to learn from or to check a profile
    reason: str | None = None  # why all rows are read in full
    # With --max-flips alone, the ways that are tried, and those that are not, with the reason.
    tries: list[str] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)
    most_gain: float | None = None  # if every other row were decided before the model
    int8_gain: float | None = None  # if int8 decided every other row at its end
    provable: ProvableFlips | None = None  # None with a profile, and where recall or precision is to be proven
    # Operations of each first model for a prompt of mean length, over the model's.
    first_cost: dict[str, float] = Field(default_factory=dict)
    leaving: dict[str, float] = Field(default_factory=dict)  # by the layers that rows go through, their expected share
    gain: float | None = None
    seconds: float | None = None


def outlook_of(
    inputs: Inputs, survey: Survey, profile: ExitProfile | None
) -> tuple[ExitOutlook, list[tuple[str, str]]]:
    """Return the outlook of a job with these rows, and lines of name and text. Raises UsageError where the profile is
    plainly of another job."""
    settings = inputs.settings
    asked, rows = inputs.labels.asked, survey.rows.prompts
    classes = bounded_classes(settings, asked)
    usual = CHECKED_ROWS if profile is not None else rows_to_learn(settings.flips.max_flips, classes)
    usual = usual if settings.exits.rare_option is None else rows_to_fit(rows)
    found = ExitOutlook(rows_in_full=min(settings.exits.exit_rows or usual, rows // 2))
    lines = []
    if bounds_alone(settings):
        ways = ways_of(inputs, rows, profile)
        if ways.unable is not None:
            unable = f"all rows are read in full: {ways.unable}"
            return ExitOutlook(rows_in_full=0, reason=ways.unable), [("--max-flips", unable)]
        lines.append(("tries", ways_text(ways, inputs)))
        found.tries, found.left_out = list(ways.tried), dict(ways.left_out)
        if profile is None:
            found.most_gain, found.int8_gain = _most_gains(found.rows_in_full, rows, ways.narrow_share)
            lines.append(("may gain", _most(found)))
    if settings.exits.rare_option is not None:
        first = f"{settings.exits.rare_option} reads {found.rows_in_full:,} rows in full first"
        text = f"{first}, and as many more as it draws"
        lines.append(("proof", f"{text}: that depends on how many have the answer"))
    elif profile is None:
        found.provable = provable_flips(found.rows_in_full, settings.flips.max_flips, classes)
        lines.append(
            ("proof", provable_text(found.provable, classes, settings.flips.max_flips, settings.exits.exit_option))
        )
    else:
        own = {"layers": inputs.opened.files.config.get_text_config().num_hidden_layers}
        own |= {
            "max_flips": settings.flips.max_flips,
            "flips_of": settings.exits.flips_of,
            "questions": [*map(identity_of, asked)],
        }
        require_same_job(profile, settings.exits.exit_profile, profile.model_dump() | own)
        findings = [each.findings for each in profile.questions]
        for each in (each for own in findings for each in own.exits):
            name = str(each.layer + 1)
            found.leaving[name] = found.leaving.get(name, 0.0) + each.leaving / len(findings)
        share = found.rows_in_full / rows if rows else 1.0
        work = sum(1 / (each.gain or 1.0) for each in findings) / len(findings)
        found.gain = 1 / (share + (1 - share) * work)
        if survey.plan.seconds is not None:
            found.seconds = survey.plan.seconds / found.gain
        lines.append(("expected", _expected(found, survey)))
    if any(map(_is_counted, inputs.opened.small)) and survey.lengths is not None:
        lines.append(("first model", _costs(found, inputs, round(survey.lengths.mean))))
    return found, lines


def _most_gains(learnt: int, rows: int, narrow_share: float | None) -> tuple[float, float | None]:
    # The gains if every other row were decided before the model, and if int8 alone decided them.
    if narrow_share is None:
        return rows / max(learnt, 1), None
    return rows / (learnt * (1 + narrow_share)), rows / (learnt + rows * narrow_share)


def _most(found: ExitOutlook) -> str:
    text = f"at most {found.most_gain:.2f}x, if words decide all other rows"
    if found.int8_gain is not None:
        text += f"; {found.int8_gain:.2f}x if int8 decides them at its end, and more where they leave it early"
    return f"{text}; these rows teach how many are decided, and where"


def _is_counted(small: Small) -> bool:
    # Whether operations show its cost: those of encoders are not counted, and in low precision they are faster.
    return not small.files.encoder and small.narrow is None


def _costs(found: ExitOutlook, inputs: Inputs, tokens: int) -> str:
    opened, settings = inputs.opened, inputs.settings
    names = [name for name in first_readers(settings) if name != WORDS]
    try:
        whole = prefill_flops(opened.files.config.get_text_config(), tokens).total
        for name, each in zip(names, opened.small, strict=True):
            if _is_counted(each):
                found.first_cost[name] = prefill_flops(each.files.config.get_text_config(), tokens).total / whole
    except NoCostModel as error:
        return f"operations are not counted: {error}"
    costs = ", ".join(f"{visible(name, line=True)} {cost:.1%}" for name, cost in found.first_cost.items())
    return (
        f"of the model's operations, a prompt of {tokens:,} tokens takes {costs}; one that decides no larger share of "
        "the rows that it reads does not pay"
    )


def _expected(found: ExitOutlook, survey: Survey) -> str:
    where = ", ".join(f"{share:.1%} {place_of(int(layer))}" for layer, share in found.leaving.items())
    text = (
        f"of the rows leave {where or 'none'} (by --exit-profile); {found.rows_in_full:,} are read in full first; "
        f"{found.gain:.2f}x for tokens that no two rows share"
    )
    if found.seconds is None or survey.plan.seconds is None:
        return text
    return f"{text}: {duration(found.seconds)} instead of {duration(survey.plan.seconds)}"
