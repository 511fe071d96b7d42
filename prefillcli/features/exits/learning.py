"""The exits of a job: what it learns of them before its first window, what is done between layers, and when they end.

Some rows are read in full first, and looked at between layers. What is learnt stays in the work folder for when the
job goes on, and is written beside the report for later jobs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from prefillcli.core.request import Request, plan_requests, scored_row, thinning_of
from prefillcli.data.output.store import write_sealed
from prefillcli.data.rows import Int64Array, Prompt, ScoredRow
from prefillcli.engines.base import PLAIN, Answer, EarlyExits, Treatment
from prefillcli.errors import PrefillError
from prefillcli.features.exits.judging import (
    CalibrationRows,
    calibrate_exits,
    calibration_rows,
    drifted_classes,
    exit_costs,
    observed_layers,
    recheck_exits,
    rows_for_rarest,
    rows_to_learn,
)
from prefillcli.features.exits.policy import ExitPolicy, ExitProfile, exits_path, job_of_exits
from prefillcli.features.exits.report import ExitUse, ProvableFlips, UsedExit, provable_flips, provable_text
from prefillcli.jobs.opening import Opening
from prefillcli.plan.pack import carried_by_few, in_full
from prefillcli.runtime import log

if TYPE_CHECKING:
    from prefillcli.core.feature import Job, Pack, PlanEngine

EXITS = "exits"  # in the plan of a job
ENDED = ("reason", "stopped_window")  # what the plan has there once drift has ended the exits
FILE = "exits.json"  # in the work folder
CHECKED_ROWS = 300
MOST_BYTES = 1 << 30  # of readings in memory, where the number of rows is not asked for
_SEED = 20_262


@dataclass(eq=False, slots=True)
class JobExits:
    """What `--exit` does in a job."""

    policy: ExitPolicy | None  # None where rows do not leave: nothing could be proven, or the exits have ended
    use: ExitUse  # what the run reports
    known: Mapping[int, ScoredRow] = field(default_factory=dict)  # rows by number that need not be read again
    regroup_cost: float | None = None
    # Of the packs of this run: the seconds that they took and would have taken without exits, their layers in full
    # for a token, and how many fewer they went through.
    seconds: float = 0.0
    full_seconds: float = 0.0
    layers: float = 0.0
    skipped: float = 0.0
    kept_alive: Counter[str] = field(default_factory=Counter)  # token-layers of shared prefixes, by how few rows

    def treatment(self, in_full: frozenset[int]) -> Treatment:
        """What happens between layers; the prompts `in_full` go on to the end."""
        if self.policy is None:
            return PLAIN
        return Treatment(EarlyExits(self.policy, in_full), self.regroup_cost)

    def add(self, pack: Pack, answers: Sequence[Answer]) -> None:
        """Count what exits have spared a pack, by all of its answers."""
        if self.policy is None or not answers:
            return
        left = {answer.prompt: answer.exit_layer for answer in answers}
        through = [_layers_through([left[prompt] for prompt in prompts]) for _, prompts in pack.reads]
        self.seconds += sum(answer.seconds for answer in answers)
        self.full_seconds += sum(answer.full_seconds for answer in answers)
        self.layers += in_full(self.use.model_layers) * len(pack.tokens)
        self.skipped += sum(answer.skipped for answer in answers)
        self.kept_alive.update(carried_by_few(pack, through, self.use.model_layers))

    def watch(self, job: Job, window: int) -> None:
        """End the exits after a `window` where the audited rows that are written show that too many answers flip."""
        if self.policy is None:
            return
        sink, use = job.sink, self.use
        audited = sink.counts.audited_exits
        counts = {f"audited rows that are {label!r} in full": (own.flips, own.rows) for label, own in audited.items()}
        if use.flips_of == "all" and counts:
            counts = {"audited rows": (sum(flips for flips, _ in counts.values()), sum(n for _, n in counts.values()))}
        drifted = drifted_classes(list(counts.values()), use.max_flips)
        if not drifted:
            return
        of, (flips, rows) = list(counts.items())[drifted[0]]
        self.policy, use.status, use.stopped_window = None, "stopped", window + 1
        use.reason = (
            f"{flips:,} of {rows:,} {of} have flipped, more than --max-flips {use.max_flips:g} explains: the "
            "rows are not like those that the exits were learnt on"
        )
        sink.plan = sink.plan | {EXITS: sink.plan[EXITS] | {name: getattr(use, name) for name in ENDED}}
        log.warning(f"--exit: {use.reason}; all further rows are read in full")

    def report(self, tokens: Any) -> ExitUse:
        """What the run reports, with what its packs were spared; `tokens` (`report.run.Tokens`) are those of the run.

        The counts of the output are still missing: see `ExitUse.take`.
        """
        computed = tokens.computed * self.use.model_layers
        gains = {
            "layers_saved": tokens.skipped / computed if computed else None,
            "layers_gain": self.layers / (self.layers - self.skipped) if self.layers else None,
            "measured_gain": self.full_seconds / self.seconds if self.seconds else None,
            "kept_alive": dict(self.kept_alive),
        }
        return self.use.model_copy(update=gains)


def _layers_through(exit_layers: Sequence[int | None]) -> int | None:
    # How many layers a read goes through, by the layers after which its prompts leave. None: all, because a read ends
    # with its last prompt.
    numbers = [layer for layer in exit_layers if layer is not None]
    return max(numbers) + 1 if len(numbers) == len(exit_layers) else None


def stored_exit_use(plan: Mapping[str, Any]) -> ExitUse | None:
    """The exits of a job by its plan, without the gain, which is a run's own."""
    stored = plan.get(EXITS, {})
    return _use_of(stored) if "use" in stored else None


def _use_of(stored: Mapping[str, Any]) -> ExitUse:
    use = ExitUse.model_validate(stored["use"])
    if "stopped_window" not in stored:
        return use
    return use.model_copy(update={"status": "stopped"} | {name: stored[name] for name in ENDED})


@dataclass(slots=True)
class _ReadRows:
    # Requests that were answered in full; `unique` is the size of their trie, in tokens.
    requests: list[Request]
    answers: list[Answer]
    unique: int

    def add(self, other: _ReadRows) -> None:
        self.requests += other.requests
        self.answers += other.answers
        self.unique += other.unique


@dataclass(frozen=True, slots=True)
class ExitLearning:
    """Learns the exits of a job, once. What it finds stays in the work folder, for when the job goes on."""

    job: Job
    engine: PlanEngine
    given: ExitProfile | None  # what `--exit-profile` names

    def exits(self) -> JobExits:
        """The exits. The tokens that learning them took in this run are counted in the job's recorder."""
        sink, found = self.job.sink, self._stored()
        if found is None:
            profile, known, use = self._learn()
            rows = [{**asdict(row), "logprobs": row.logprobs.tolist()} for row in known]
            data = json.dumps({"profile": profile.model_dump(mode="json"), "rows": rows}).encode()
            sink.work.put_bytes(FILE, data)
            before = sink.plan.get(EXITS, {})
            ended = {name: before[name] for name in ENDED if name in before}  # by drift, and learnt again since
            learnt = {"digest": _digest(data), "use": use.model_dump(mode="json")}
            sink.plan = sink.plan | {EXITS: learnt | ended}
            self._publish(profile)
            if use.reason is not None:
                log.warning(f"--exit: {use.reason}; all rows are read in full")
        else:
            profile, known = found
        use = _use_of(sink.plan[EXITS])
        return JobExits(
            policy=profile.policy if use.reason is None else None,
            use=use,
            known={row.row: row for row in known},
            regroup_cost=None if self.job.profile is None else self.job.profile.regroup_layers,
        )

    def _stored(self) -> tuple[ExitProfile, list[ScoredRow]] | None:
        # What an earlier attempt at the job has learnt.
        if "use" not in self.job.sink.plan.get(EXITS, {}):
            return None
        try:
            data = self.job.sink.work.read_bytes(FILE)
        except FileNotFoundError:
            data = b""
        if _digest(data) == self.job.sink.plan[EXITS]["digest"]:
            content = json.loads(data)
            rows = [ScoredRow(**{**row, "logprobs": np.array(row["logprobs"], np.float64)}) for row in content["rows"]]
            return ExitProfile.model_validate(content["profile"]), rows
        place = f"{self.job.sink.work.location}/{FILE}"
        log.warning(f"{place} is gone or damaged: the exits are learnt again, from the same rows")
        return None

    def _publish(self, profile: ExitProfile) -> None:
        if self.job.report.report is None or self.job.settings.exit_profile is not None:
            return
        path = exits_path(self.job.report.report)
        try:
            write_sealed(path, profile.to_json())
        except (OSError, PrefillError) as error:
            log.warning(f"cannot write {path}: {error}")

    def _learn(self) -> tuple[ExitProfile, list[ScoredRow], ExitUse]:
        # Read some rows in full, and learn from them; of a given profile, whether it still holds. Returns the rows
        # that need not be read again.
        settings, given, names = self.job.settings, self.given, self.job.labels.names
        policy = None if given is None else given.policy
        layers = observed_layers(self._layers) if policy is None else policy.layers
        provable = self._provable()
        read = self._read_rows(layers, provable)
        rows = calibration_rows(read.requests, read.answers, layers, len(names))
        if given is not None and policy is not None:
            check = recheck_exits(policy, rows, settings.max_flips, names, settings.flips_of)
            profile, reason = given, check.reason
            if not settings.quiet:
                log.info(f"--exit-profile: {check.text}")
        else:
            profile = self._profile(rows)
            reason = profile.findings.reason
        self.job.recorder.tokens.computed += sum(answer.computed_tokens for answer in read.answers)
        self.job.recorder.tokens.unique += read.unique
        # A compressed prompt may keep other tokens beside those that it shares a prefix with.
        rewritten = any(each.rewrites for each in self.job.features)
        pairs = [] if rewritten else zip(read.requests, read.answers, strict=True)
        known, learnt = [scored_row(*each) for each in pairs], profile.findings
        use = ExitUse(
            status="none" if reason is not None else "calibrated" if given is None else "reused",
            reason=reason,
            reused=given is not None,
            max_flips=settings.max_flips,
            flips_of=settings.flips_of,
            confidence=learnt.confidence,
            model_layers=self._layers,
            provable=provable,
            calibration_rows=len(read.answers),
            learnt_rows=len(known),
            classes=list(learnt.classes),
            layers=[
                UsedExit(
                    layer=each.layer + 1,
                    probe=each.probe,
                    peek=each.peek,
                    thresholds=dict(zip(names, each.thresholds, strict=True)),
                    expected=each.leaving,
                )
                for each in learnt.exits
            ],
            predicted_gain=learnt.gain,
            curve=list(learnt.curve),
        )
        return profile, known, use

    def _read_rows(self, layers: Sequence[int], provable: ProvableFlips | None) -> _ReadRows:
        # Random rows of the job, read in full: so many as are asked for, but no more than half of its rows.
        settings, classes, count = self.job.settings, self._classes, self._count
        rows = self._rows()
        drawn = rows[np.random.default_rng(_SEED).permutation(len(rows))[: len(rows) // 2]]
        if provable is not None and not settings.quiet:
            log.info(provable_text(provable, classes, settings.max_flips))
        read = self._read(drawn[:count], layers, "for --exit")
        if settings.exit_rows is None and provable is not None and classes > 1 and read.answers:
            bytes_of_row = 4 * len(layers) * self.job.opened.files.config.get_text_config().hidden_size
            most = min(len(drawn), MOST_BYTES // bytes_of_row)
            best = [int(answer.logprobs.argmax()) for answer in read.answers]
            total = rows_for_rarest(np.bincount(best, minlength=classes), settings.max_flips, most)
            read.add(self._read(drawn[count:total], layers, "too, because one of the answers is rare"))
        return read

    def _read(self, numbers: Int64Array, layers: Sequence[int], why: str) -> _ReadRows:
        # The rows with these numbers, read in full, with what these layers show; those that fit the memory.
        requests = self._requests(np.sort(numbers))
        if not requests:
            return _ReadRows([], [], 0)
        if not self.job.settings.quiet:
            log.info(f"{len(requests):,} rows are read in full first, {why}")
        plan = plan_requests(requests, self.engine.limits, self.job.settings.schedule)
        treatment = Treatment(EarlyExits(observed=tuple(layers)), thinning=thinning_of(dict(enumerate(requests))))
        sets = self.job.labels.sets
        found: dict[int, Answer] = {}
        for answers in self.engine.answer_all(
            plan.packs, lambda i: sets[requests[i].prompt.labels], self.job.tick, treatment
        ):
            found |= {answer.prompt: answer for answer in answers if answer.failure is None}
        answered = sorted(found)
        own = [requests[number] for number in answered]
        return _ReadRows(own, [found[number] for number in answered], plan.unique_tokens)

    def _profile(self, rows: CalibrationRows) -> ExitProfile:
        labels = self.job.labels.names
        found = calibrate_exits(
            rows,
            layers=self._layers,
            max_flips=self.job.settings.max_flips,
            labels=labels,
            costs=exit_costs(self.job.opened.files.config),
            flips_of=self.job.settings.flips_of,
        )
        return ExitProfile(
            **job_of_exits(self.job),
            max_flips=self.job.settings.max_flips,
            flips_of=self.job.settings.flips_of,
            exits=None if found.policy is None else found.policy.to_json(),
            findings=found.findings,
        )

    @property
    def _layers(self) -> int:
        layers: int = self.job.opened.files.config.get_text_config().num_hidden_layers
        return layers

    @property
    def _count(self) -> int:
        # How many rows are to be read at first, if half of the job's rows are so many.
        if self.job.settings.exit_rows is not None:
            return int(self.job.settings.exit_rows)
        if self.given is not None:
            return CHECKED_ROWS
        return rows_to_learn(self.job.settings.max_flips, self._classes)

    @property
    def _classes(self) -> int:
        # Of how many kinds of rows the flips are bounded.
        return len(self.job.labels.names) if self.job.settings.flips_of == "each" else 1

    def _provable(self) -> ProvableFlips | None:
        # What the rows could prove at best; None for a given profile, which they only check.
        if self.given is not None:
            return None
        rows = min(self._count, len(self._rows()) // 2)
        return provable_flips(rows, self.job.settings.max_flips, self._classes)

    def _rows(self) -> Int64Array:
        source = self.job.source
        found: Int64Array = source.selection().within(0, source.count())
        return found

    def _requests(self, numbers: Int64Array) -> list[Request]:
        # How the model reads the rows with these numbers, ascending.
        again = Opening(self.job.settings)  # the job's own source is being read
        again.open_source()
        again.use_models(self.job.opened)
        source, builder = again.source, again.new_builder()
        try:
            prompts: list[Prompt] = []
            for batch in source.rows(numbers) if len(numbers) else ():
                prompts += builder.build(batch, self.job.labels)[0]
                self.job.tick(0.0)
        finally:
            builder.close()
        requests, _ = self.job.requests(prompts, self.job.tick)
        return [request for request in requests if len(request.tokens) <= self.engine.limits.max_tokens]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
