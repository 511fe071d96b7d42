"""The exits of a job: learning them before its first window, the work between layers, and their end.

Some rows are read in full first, with readings between layers. The learnt exits stay in the work folder in case the
job is resumed, and are written beside the report for later jobs. In the report of a run, layers are numbered as users
count them: a row that left after layer 16 went through 16 layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from prefillcli.errors import PrefillError
from prefillcli.plan.pack import in_full
from prefillcli.reading.exits.first import Readers
from prefillcli.reading.exits.full_rows import FullRows, ReadRows
from prefillcli.reading.exits.policy import (
    ExitProfile,
    LearntExits,
    exits_path,
    identity_of,
    job_of_exits,
)
from prefillcli.reading.exits.proof import (
    ExitCosts,
    exit_costs,
    observed_layers,
    prove_exits,
    recheck_exits,
    rows_for_rarest,
    rows_to_learn,
)
from prefillcli.reading.exits.report import (
    ExitUse,
    FirstUse,
    ProvableFlips,
    QuestionExits,
    UsedExit,
    of_question_text,
    provable_flips,
    provable_text,
    state_of,
    with_ends,
)
from prefillcli.rows.output import ANSWER
from prefillcli.rows.output.store import write_sealed
from prefillcli.rows.records import ScoredRow
from prefillcli.runtime import log

if TYPE_CHECKING:
    from prefillcli.options.settings import JobSettings
    from prefillcli.prompts.labels import Labels
    from prefillcli.reading.exits.ways import Ways


EXITS = "exits"  # in the ledger of a job
ENDED = "ended"  # there, by question, what a report says once drift has ended its exits
FILE = "exits.json"  # in the work folder
CHECKED_ROWS = 300
MOST_BYTES = 1 << 30  # bytes of readings in memory, unless the user sets the number of rows
SEED = 20_262


def stored_exit_use(plan: Mapping[str, Any]) -> ExitUse | None:
    """Return the exits of a job by its plan, without the gain, which each run has for itself."""
    stored = plan.get(EXITS, {})
    return _use_of(stored) if "use" in stored else None


def _use_of(stored: Mapping[str, Any]) -> ExitUse:
    return with_ends(ExitUse.model_validate(stored["use"]), stored.get(ENDED, {}))


def _written(row: ScoredRow) -> dict[str, Any]:
    """Return a row as `_row_of` reads it."""
    return {**asdict(row), "logprobs": row.logprobs.tolist(), "parts": [_written(each) for each in row.parts]}


def _row_of(written: Mapping[str, Any]) -> ScoredRow:
    arrays = {"logprobs": np.array(written["logprobs"], np.float64)}
    return ScoredRow(**{**written, **arrays, "parts": tuple(map(_row_of, written["parts"]))})


def with_first(costs: ExitCosts, first: Sequence[FirstUse], depth: int) -> ExitCosts:
    """Return the costs of exits with those of `first` models before a model of so many layers. A layer inside one
    costs a share of it."""
    own = {each.layer - 1: each.cost * in_full(depth) for each in first}
    ends = {layer - 1: each.layer - 1 for each in first for layer in each.inner}
    inner = {layer: own[end] * (layer - end + depth) / depth for layer, end in ends.items()}
    return replace(costs, first=own | inner, ends=ends)


def bounded_classes(settings: JobSettings, asked: Sequence[Labels]) -> int:
    """Return the most classes of a question's answers whose flips are bounded."""
    return max(len(each.names) for each in asked) if settings.exits.flips_of == "each" else 1


def provable_of(settings: JobSettings, asked: Sequence[Labels], rows: int) -> ProvableFlips:
    """Return the best that a job of so many rows could prove by those that it reads in full first: at most half."""
    classes = bounded_classes(settings, asked)
    count = settings.exits.exit_rows or rows_to_learn(settings.flips.max_flips, classes)
    return provable_flips(min(count, rows // 2), settings.flips.max_flips, classes)


class Lesson(NamedTuple):
    """What was learnt: the exits as a profile, the rows that need not be read again, and the report. Without a profile
    all rows are read in full."""

    profile: ExitProfile | None
    known: list[ScoredRow]
    use: ExitUse


class Learning(Protocol):
    """A way to learn when rows are decided."""

    @property
    def rows(self) -> FullRows:
        """What reads rows in full."""

    def learn(self) -> Lesson:
        """Learn from rows that are read in full."""

    def keeps(self, use: ExitUse) -> bool:
        """Return whether what it has left in the work folder beside the exits is still there, by their report."""

    def readers(self) -> Readers:
        """Return the first models that decide rows once it has learnt, by layer with their names."""


def learnt_once(learning: Learning) -> Lesson:
    """Learn, or return what an earlier attempt at the job has learnt: that stays in the work folder.

    The job's recorder counts the tokens that learning took in this run. A profile is written beside the report.
    """
    run = learning.rows.run
    sink, found = run.sink, _stored(learning)
    if found is None:
        profile, known, use = learning.learn()
        rows = list(map(_written, known))
        written = None if profile is None else profile.model_dump(mode="json")
        data = json.dumps({"profile": written, "rows": rows}).encode()
        sink.work.put_bytes(FILE, data)
        before = sink.settled.get(EXITS, {})
        ended = {ENDED: before[ENDED]} if ENDED in before else {}  # ended by drift, and learnt again since
        learnt = {"digest": hashlib.sha256(data).hexdigest(), "use": use.model_dump(mode="json")}
        sink.settle(sink.settled | {EXITS: learnt | ended})
        option = run.settings.exits.exit_option
        if profile is None:
            log.warning(f"{option}: {use.reason}; all rows are read in full")
            return Lesson(profile, known, use)
        if run.report.report is not None and run.settings.exits.exit_profile is None and use.rare is None:
            path = exits_path(run.report.report)
            try:
                write_sealed(path, profile.to_json())
            except PrefillError as error:
                log.warning(str(error))
        for name, own in use.questions.items():
            if own.reason is not None:
                log.warning(
                    f"{option}{of_question_text(use.told_apart(name))}: {own.reason}; all rows are read in full"
                )
    else:
        profile, known = found
    return Lesson(profile, known, _use_of(sink.settled[EXITS]))


def _stored(learning: Learning) -> tuple[ExitProfile | None, list[ScoredRow]] | None:
    # The profile that an earlier attempt at the job learnt, and the rows that it scored.
    sink = learning.rows.run.sink
    stored = sink.settled.get(EXITS, {})
    if "use" not in stored:
        return None
    try:
        data = sink.work.read_bytes(FILE)
    except FileNotFoundError:
        data = b""
    if hashlib.sha256(data).hexdigest() == stored["digest"]:
        content = json.loads(data)
        profile = None if content["profile"] is None else ExitProfile.model_validate(content["profile"])
        return (profile, list(map(_row_of, content["rows"]))) if learning.keeps(_use_of(stored)) else None
    place = f"{sink.work.location}/{FILE}"
    log.warning(f"{place} is gone or damaged: the exits are learnt again, from the same rows")
    return None


@dataclass(frozen=True, slots=True)
class ExitLearning:
    """Learns exits whose flips are bounded, or tests those that are `given`, the profile that `--exit-profile`
    names. With `ways` --max-flips is given alone. It is a `Learning`."""

    rows: FullRows
    given: ExitProfile | None
    read_as: Sequence[Any] = ()
    ways: Ways | None = None

    def keeps(self, use: ExitUse) -> bool:
        return True

    def readers(self) -> Readers:
        return self.rows.first

    def learn(self) -> Lesson:
        """Read some rows in full and learn from them, or test whether a given profile still holds."""
        inputs, settings, given = self.rows.run.inputs, self.rows.run.settings, self.given
        if self.ways is not None and self.ways.unable is not None:
            return self._nothing(self.ways.unable)
        depth: int = inputs.opened.files.config.get_text_config().num_hidden_layers
        layers = observed_layers(depth) if settings.exits.exit else ()
        policies = [] if given is None else [each.policy for each in given.questions if each.policy is not None]
        if policies:
            own = (layer for each in policies if each.inside is not None for layer in each.inside.layers)
            layers = tuple(sorted(set(own)))
        # The best that the rows could prove. They only check a given profile.
        provable = None if given is not None else provable_of(settings, inputs.labels.asked, len(self.rows.numbers()))
        read = self._read_rows(layers, provable)
        first = read.first_use(inputs.opened, self.rows.first)
        found = [
            self._learnt(part, labels, read, first, given.questions[part] if given is not None and policies else None)
            for part, labels in enumerate(inputs.labels.asked)
        ]
        profile = given
        if profile is None or not policies:
            profile = ExitProfile(
                **job_of_exits(inputs, self.rows.run.report.fingerprint, self.read_as)
                | {"questions": [each for each, _ in found]}
            )
        known = self.rows.counted(read)
        reused = given is not None
        uses = {each.question or ANSWER: self._use(each, reason, reused) for each, reason in found}
        use = ExitUse(
            **state_of(uses),
            reused=reused,
            max_flips=settings.flips.max_flips,
            flips_of=settings.exits.flips_of,
            confidence=profile.questions[0].findings.confidence,
            model_layers=depth,
            provable=provable,
            rows_in_full=len({request.prompt.row for request in read.requests}),
            learnt_rows=len(known),
            first=first,
            tried=[] if self.ways is None else list(self.ways.tried),
            left_out={} if self.ways is None else dict(self.ways.left_out),
            questions=uses,
        )
        return Lesson(profile, known, use)

    def _nothing(self, reason: str) -> Lesson:
        # Nothing is read to learn from, because no row of this job could leave.
        settings, asked = self.rows.run.settings, self.rows.run.inputs.labels.asked
        own = {each.question.name or ANSWER: QuestionExits(status="none", reason=reason) for each in asked}
        use = ExitUse(
            status="none", reason=reason, max_flips=settings.flips.max_flips, flips_of=settings.exits.flips_of,
            model_layers=0, questions=own,
        )  # fmt: skip
        return Lesson(None, [], use)

    def _learnt(
        self, part: int, labels: Labels, read: ReadRows, first: Sequence[FirstUse], given: LearntExits | None
    ) -> tuple[LearntExits, str | None]:
        # What the rows teach of a question, or whether what is `given` still holds for them, and why it has no exits.
        settings, config, names = self.rows.run.settings, self.rows.run.inputs.opened.files.config, labels.names
        rows = read.of_part(part, len(names))
        if given is not None:
            if (policy := given.policy) is None:
                return given, given.findings.reason
            policy = policy.with_readers(self.rows.places)
            check = recheck_exits(policy, rows, settings.flips.max_flips, names, settings.exits.flips_of)
            if not settings.run.quiet:
                log.info(f"--exit-profile{of_question_text(given.question)}: {check.text}")
            return given, check.reason
        depth: int = config.get_text_config().num_hidden_layers
        found = prove_exits(
            rows,
            layers=depth,
            max_flips=settings.flips.max_flips,
            labels=names,
            costs=with_first(exit_costs(config), first, depth),
            flips_of=settings.exits.flips_of,
            of=self._drawn_from,
        )
        findings = found.findings
        if read.requests and not len(rows):
            findings = findings.model_copy(update={"reason": "whether it is asked depends on other answers"})
        exits = None if found.policy is None else found.policy.to_json()
        return LearntExits(**identity_of(labels), exits=exits, findings=findings), findings.reason

    def _use(self, learnt: LearntExits, reason: str | None, reused: bool) -> QuestionExits:
        findings = learnt.findings
        return QuestionExits(
            status="none" if reason is not None else "reused" if reused else "learnt",
            reason=reason,
            classes=list(findings.classes),
            layers=[
                UsedExit(
                    layer=each.layer + 1,
                    probe=each.probe,
                    peek=each.peek,
                    thresholds=dict(zip(learnt.labels, each.thresholds, strict=True)),
                    expected=each.leaving,
                    saves=each.saves,
                )
                for each in findings.exits
            ],
            predicted_gain=findings.gain,
            curve=list(findings.curve),
        )

    def _read_rows(self, layers: Sequence[int], provable: ProvableFlips | None) -> ReadRows:
        # Random rows of the job, read in full: as many as the user asks for, but no more than half of its rows.
        settings, classes, count = self.rows.run.settings, self._classes, self._count
        rows = self.rows.numbers()
        drawn = rows[np.random.default_rng(SEED).permutation(len(rows))[: len(rows) // 2]]
        if provable is not None and not settings.run.quiet:
            log.info(provable_text(provable, classes, settings.flips.max_flips, settings.exits.exit_option))
        read = self.rows.read(drawn[:count], layers, f"for {settings.exits.exit_option}")
        if settings.exits.exit_rows is None and provable is not None and classes > 1 and read.answers:
            asked = self.rows.run.inputs.labels.asked
            bytes_of_row = (
                4 * max(len(layers), 1) * self.rows.run.inputs.opened.files.config.get_text_config().hidden_size
            )
            bytes_of_row += sum(
                next((each.hidden.nbytes for each in own if each is not None), 0) for own in read.first.values()
            )
            most = min(len(drawn), MOST_BYTES // (bytes_of_row * len(asked)))
            best: list[list[int]] = [[] for _ in asked]
            for request, answer in zip(read.requests, read.answers, strict=True):
                best[request.prompt.part].append(int(answer.logprobs.argmax()))
            total = max(
                rows_for_rarest(np.bincount(own, minlength=len(each.names)), settings.flips.max_flips, most)
                for each, own in zip(asked, best, strict=True)
                if own
            )
            read.add(self.rows.read(drawn[count:total], layers, "too, because one of the answers is rare"))
        return read

    @property
    def _count(self) -> int:
        # The number of rows to read at first, if half of the job has that many.
        if self.rows.run.settings.exits.exit_rows is not None:
            return int(self.rows.run.settings.exits.exit_rows)
        if self.given is not None:
            return CHECKED_ROWS
        return rows_to_learn(self.rows.run.settings.flips.max_flips, self._classes)

    @property
    def _drawn_from(self) -> int | None:
        # The number of rows from which those read in full are drawn. None if it is their labels that decide how many,
        # or if the job is a part of a file: its exits may be meant for the rest.
        settings, total = self.rows.run.settings, len(self.rows.numbers())
        fixed = settings.exits.exit_rows is not None or self._classes == 1 or self._count >= total // 2
        return total if fixed and settings.input.limit is None and settings.input.sample is None else None

    @property
    def _classes(self) -> int:
        return bounded_classes(self.rows.run.settings, self.rows.run.inputs.labels.asked)
