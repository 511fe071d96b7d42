"""The parts of a job, by its settings: read it, and you know what runs.

The `asking` puts questions to each row. Its prompts are read in full, unless `compression` leaves tokens out or
`exits` decide the row before the last layer; `earlier` rows are not read again. The `follow_ups` ask more about scored
rows. The `judges` report the worth of the answers, and the `gates` whether they are as expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefillcli.asking.batch_files import BatchAsking, is_batch_file
from prefillcli.asking.choices import ChoiceAsking
from prefillcli.asking.decisions import DecisionAsking, kind_of_requests
from prefillcli.asking.labels import LabelAsking
from prefillcli.asking.questions import QuestionAsking, WaitingQuestions
from prefillcli.asking.targets import TargetAsking
from prefillcli.core.asking import Asking
from prefillcli.core.further import Condition
from prefillcli.core.roles import FollowUp, JobPart, Judge, Reading
from prefillcli.followup.evidence import Evidence
from prefillcli.followup.rationale import RationaleFollowUp
from prefillcli.judging import gates
from prefillcli.judging.adapters import AdapterJudge
from prefillcli.judging.calibration import Calibrating, check_calibration
from prefillcli.judging.estimate import Estimating
from prefillcli.judging.evaluation import Evaluating
from prefillcli.judging.likelihood import LikelihoodJudge
from prefillcli.judging.questions import QuestionJudge
from prefillcli.judging.rejects import Rejects
from prefillcli.judging.review import Reviewing
from prefillcli.judging.thumbnails import Illustrating
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.requirements import asks_more, bounds_alone, compresses, leaves_early, spelled_out
from prefillcli.options.settings import JobSettings
from prefillcli.reading.compress.compress import Compress
from prefillcli.reading.earlier import Earlier
from prefillcli.reading.exits.exits import Exits
from prefillcli.reading.heads.heads import Heads
from prefillcli.rows.output.columns import Group, Probabilities
from prefillcli.rows.output.schema import OutputSchema


@dataclass(frozen=True)
class Parts:
    """The parts of a job."""

    asking: Asking
    gates: gates.Gates
    earlier: Earlier | None = None
    compression: Compress | None = None
    exits: Exits | None = None
    heads: Heads | None = None
    calibration: Calibrating | None = None
    estimate: Estimating | None = None
    evaluation: Evaluating | None = None
    rejects: Rejects | None = None
    review: Reviewing | None = None
    rationale: RationaleFollowUp | None = None
    follow_ups: tuple[FollowUp, ...] = ()
    judges: tuple[Judge, ...] = ()

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The ways to read prompts cheaper than in full, in the order in which they act."""
        return tuple(each for each in vars(self).values() if isinstance(each, Reading))

    @property
    def _all(self) -> tuple[Asking | JobPart, ...]:
        return (self.asking, *self.readings, *self.follow_ups, *self.judges)

    @property
    def groups(self) -> frozenset[Group]:
        """The columns that the output has besides those of every output."""
        return frozenset[Group]().union(*(each.groups for each in self._all))

    @property
    def carried(self) -> list[str]:
        """Columns of the input that go to the output because a part needs them there."""
        return [name for each in self._all for name in each.carried]

    @property
    def probabilities(self) -> Mapping[str, Probabilities]:
        """What makes the calibrated probabilities of the rows, by the name of the question."""
        return {} if self.calibration is None else self.calibration.probabilities

    def condition(self, schema: OutputSchema) -> Condition | None:
        """Return the condition by which scored rows of an output with this schema are asked about further; None for
        all."""
        return next(filter(None, (each.condition(schema) for each in self.follow_ups)), None)


def compose(settings: JobSettings, available: Sequence[str] = (), first: Mapping[str, Any] = {}) -> Parts:
    """Return the parts of a job with these settings of a command, over rows with the `available` columns, of which
    this is the `first`. Raises UsageError for options that are wrong whatever the rows hold."""
    asking = _asking(settings, available, first)
    compression = Compress(settings.compression, settings.flips, settings.input.seed) if compresses(settings) else None
    read_as = [] if compression is None else compression.read_as()
    more = RationaleFollowUp(settings.rationales, settings.chosen) if asks_more(settings) else None
    follow_ups = _follow_ups(settings, asking, more, plain=not compression)
    head = settings.lm.head_file
    heads = None if head is None else Heads(settings, head, read_as)
    if not isinstance(settings, ScoreSettings):  # other commands write nothing about rows
        return Parts(asking, gates.Gates(settings.gates), compression=compression, heads=heads, follow_ups=follow_ups)
    leaving = None
    if leaves_early(settings):
        leaving = Exits(settings.exits, settings.flips, read_as, alone=bounds_alone(settings))
    taken = Earlier(settings.earlier, settings.files)
    check_calibration(settings)
    # The answers to requests are divided by what is asked with them.
    calibrates = settings.probabilities.calibrates and not isinstance(asking, DecisionAsking)
    probabilities = Calibrating(settings.probabilities) if calibrates else None
    shares = Estimating(settings.estimate) if _estimates(settings) else None
    judged = None
    if truths := settings.truth.columns:
        judged = Evaluating(settings.evaluation, truths, settings.choices.choices_column)
    rejects = Rejects(settings.files.rejects) if settings.files.rejects is not None else None
    floors = settings.review.review_below
    reviewing = None if floors is None else Reviewing(settings.review, floors)
    judges: tuple[Judge | None, ...] = (
        LikelihoodJudge() if settings.likelihood.target_column is not None else None,
        QuestionJudge(asking.named) if isinstance(asking, QuestionAsking) else None,
        *(more, taken, probabilities, compression, leaving, heads, shares),
        judged,
        rejects,
        reviewing,
        AdapterJudge(settings.adapters) if settings.adapters.adapter else None,
        None if settings.thumbnails.no_thumbnails else Illustrating(),
    )
    return Parts(
        asking,
        gates.Gates(settings.gates, settings.heads.max_shift),
        earlier=taken,
        compression=compression,
        exits=leaving,
        heads=heads,
        calibration=probabilities,
        estimate=shares,
        evaluation=judged,
        rejects=rejects,
        review=reviewing,
        rationale=more,
        follow_ups=follow_ups,
        judges=tuple(each for each in judges if each is not None),
    )


def _asking(settings: JobSettings, available: Sequence[str], first: Mapping[str, Any]) -> Asking:
    if (column := settings.likelihood.target_column) is not None:
        return TargetAsking(settings, column)
    if settings.asking.questions is not None:
        return QuestionAsking(settings, settings.asking.questions)
    if (column := settings.choices.choices_column) is not None:
        return ChoiceAsking(settings, column)
    if kind_of_requests(settings, available, first) and "requests" in settings.groups():
        return DecisionAsking(settings, available)
    if is_batch_file(settings, available) and "requests" in settings.groups():
        return BatchAsking(settings)
    return LabelAsking(settings)


def _estimates(settings: JobSettings) -> bool:
    exits = spelled_out(settings).exits
    return settings.estimate.estimate is not None or bool(settings.flips.audit and (exits.exit or exits.first))


def _follow_ups(
    settings: JobSettings, asking: Asking, more: RationaleFollowUp | None, *, plain: bool
) -> tuple[FollowUp, ...]:
    if more is not None:
        return (Evidence(), more) if settings.rationales.evidence else (more,)
    # A question that is compressed, audited or followed up is asked together with all others.
    scores = (
        plain
        and isinstance(settings, ScoreSettings)
        and not settings.flips.audit
        and settings.engine.engine == "torch"
    )
    if isinstance(asking, QuestionAsking) and scores:
        return (WaitingQuestions(asking),) if asking.file.waiting else ()
    return ()


# All judges: what they find is computed anew for an output merged from shards, where it can be.
JUDGES: tuple[type[Judge], ...] = (
    *(LikelihoodJudge, QuestionJudge, RationaleFollowUp, Earlier, Calibrating, Compress, Exits, Heads, Estimating),
    *(Evaluating, Rejects, Reviewing, AdapterJudge, Illustrating),
)
