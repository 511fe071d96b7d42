"""What a job learns of exits before its first window: some of its rows are read in full, and between layers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prefillcli.core.request import Request, plan_requests, thinning_of
from prefillcli.data.output.store import put_text
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.proof import ModelContents, hash_value, sealed_text
from prefillcli.data.rows import Int64Array, Prompt, ScoredRow
from prefillcli.engines.base import Answer, EarlyExits, PlanEngine, Readings, Treatment
from prefillcli.errors import PrefillError, UsageError
from prefillcli.features.exits.judging import CalibrationRows, ExitCosts, calibrate_exits, recheck_exits
from prefillcli.features.exits.leaving import ENDED, EXITS, JobExits, Spared, exit_use
from prefillcli.features.exits.policy import ExitPolicy
from prefillcli.features.exits.profile_file import ExitProfile, exit_profile_of, require_same_job
from prefillcli.features.exits.report import ProvableFlips
from prefillcli.jobs.inputs import Opening
from prefillcli.jobs.sealed_file import read_sealed
from prefillcli.jobs.wanted_rows import scored_row
from prefillcli.models.open import Opened
from prefillcli.models.shape import NoCostModel, keys_share
from prefillcli.options.commands import ScoreSettings
from prefillcli.redaction import without_secrets
from prefillcli.report.run import Tokens
from prefillcli.runtime import log
from prefillcli.stats.audit import flip_bound, rows_for

if TYPE_CHECKING:
    from prefillcli.jobs.score import Job

# The file of `--exit-profile`: read before anything loads, and held against the job that it is used in.


AGAIN = "leave it out: the exits are then learnt on rows of this job"


def exit_profile_at(path: str) -> ExitProfile:
    """The profile at a local path or URL. Raises UsageError if it is none, or not as a job wrote it."""
    content, sealed = read_sealed("--exit-profile", path, AGAIN)
    profile = exit_profile_of(content, without_secrets(path))
    if not sealed:  # it is what proves the bound on flips
        raise UsageError(
            f"--exit-profile {without_secrets(path)}: it has no checksum: an older version of prefill or another "
            f"program wrote it\n{AGAIN}"
        )
    return profile


def require_same_exits(profile: ExitProfile, job: Job) -> None:
    """Raise UsageError if a profile was learnt in another kind of job, or proves less than this one asks."""
    settings = job.settings
    shown = without_secrets(settings.exit_profile or "")
    require_same_job(profile, shown, max_flips=settings.max_flips, flips_of=settings.flips_of, **job_of_exits(job))


def job_of_exits(job: Job) -> dict[str, Any]:
    """Whose the exits are that a job learns, by its fingerprint: what must be the same where they are used again."""
    digests = job.report.fingerprint
    # Not the digest of all options of compression: an audit changes nothing that a model reads.
    kept: list[Any] = [each for feature in job.features for each in feature.read_as()]
    if "adapters" in digests:
        kept.append(digests["adapters"])
    return {
        "model": digests["model"],
        "prompt": hash_value([*(digests.get(part) for part in ("tokenizer", "prompt", "draft")), *kept]),
        "labels": job.labels.names,
        "label_tokens": digests["labels"],
        "layers": job.opened.files.config.get_text_config().num_hidden_layers,
    }


def inspected_policy(path: str | None, opened: Opened, labels: Labels) -> ExitPolicy | None:
    """The exits of a profile, for a row whose job may have had other prompts; None without a path or exits.

    Raises UsageError if it is no profile, or is one of another model or other labels.
    """
    if path is None:
        return None
    profile = exit_profile_at(path)
    require_same_job(
        profile,
        without_secrets(path),
        model=ModelContents(opened.files.origin).model(),
        prompt=profile.prompt,
        labels=tuple(labels.names),
        label_tokens=hash_value([[label.name, label.variants] for label in labels.labels]),
        layers=opened.files.config.get_text_config().num_hidden_layers,
        max_flips=profile.max_flips,
        flips_of=profile.flips_of,
    )
    return profile.policy


def exits_path(report: str) -> str:
    """Where what a job has learnt of exits goes: `data.scores.run.json` -> `data.scores.exit.json`."""
    return report.removesuffix(".json").removesuffix(".run") + ".exit.json"


FILE = "exits.json"  # in the work folder
CHECKED_ROWS = 300
MOST_LAYERS = 12  # layers that are read of each row, at most
MOST_BYTES = 1 << 30  # what these may take of memory, where the number of rows is not asked for
_SPARE = 1.25  # rows that are read, over those that it takes if all answers are as frequent
_SEED = 20_262


@dataclass(frozen=True, slots=True)
class LearntExits:
    """What a job keeps of it: the exits, the rows that were read, and why there are no exits, if there are none."""

    profile: ExitProfile
    rows: list[ScoredRow]
    rows_read: int
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """What `of_json` makes the same of."""
        rows = [{**asdict(row), "logprobs": row.logprobs.tolist()} for row in self.rows]
        return {
            "profile": self.profile.model_dump(mode="json"),
            "rows": rows,
            "rows_read": self.rows_read,
            "reason": self.reason,
        }

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> LearntExits:
        rows = [ScoredRow(**{**row, "logprobs": np.array(row["logprobs"], np.float64)}) for row in content["rows"]]
        return cls(ExitProfile.model_validate(content["profile"]), rows, content["rows_read"], content["reason"])


@dataclass(slots=True)
class _ReadRows:
    """Requests that were answered in full; `unique` is the size of their trie, in tokens."""

    requests: list[Request]
    answers: list[Answer]
    unique: int

    @property
    def pairs(self) -> list[tuple[Request, Answer]]:
        return list(zip(self.requests, self.answers, strict=True))

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

    @property
    def settings(self) -> ScoreSettings:
        settings: ScoreSettings = self.job.settings
        return settings

    def exits(self) -> tuple[JobExits, Tokens]:
        """The exits, and the tokens that learning them took in this run."""
        found, tokens = self._stored(), Tokens()
        if found is not None:
            return self._job_exits(found), tokens
        found, tokens = self._learn()
        data = json.dumps(found.to_json()).encode()
        self.job.sink.work.put_bytes(FILE, data)
        before = self.job.sink.plan.get(EXITS, {})
        ended = {name: before[name] for name in ENDED if name in before}  # by drift, and learnt again since
        self.job.sink.plan = self.job.sink.plan | {EXITS: {"digest": _digest(data)} | ended}
        exits = self._job_exits(found)
        use = exit_use(exits, Spared(), Tokens())
        if use is not None:  # for who reports of the output without running the job
            stored = self.job.sink.plan[EXITS] | {"use": use.model_dump(mode="json")}
            self.job.sink.plan = self.job.sink.plan | {EXITS: stored}
        self._publish(found.profile)
        if found.reason is not None:
            log.warning(f"--exit: {found.reason}; all rows are read in full")
        return exits, tokens

    def _job_exits(self, found: LearntExits) -> JobExits:
        stored, profile = self.job.sink.plan[EXITS], self.job.profile
        reason = stored.get("reason", found.reason)
        return JobExits(
            policy=found.profile.policy if reason is None else None,
            learnt=found.profile.findings,
            reused=self.given is not None,
            layers=self._layers,
            max_flips=self.settings.max_flips,
            flips_of=self.settings.flips_of,
            labels=tuple(self.job.labels.names),
            provable=self._provable(),
            known={row.row: row for row in found.rows},
            rows_read=found.rows_read,
            regroup_cost=None if profile is None else profile.regroup_layers,
            reason=reason,
            stopped_window=stored.get("stopped_window"),
        )

    def _stored(self) -> LearntExits | None:
        if EXITS not in self.job.sink.plan:
            return None
        try:
            data = self.job.sink.work.read_bytes(FILE)
        except FileNotFoundError:
            data = b""
        if _digest(data) == self.job.sink.plan[EXITS]["digest"]:
            return LearntExits.of_json(json.loads(data))
        place = f"{self.job.sink.work.location}/{FILE}"
        log.warning(f"{place} is gone or damaged: the exits are learnt again, from the same rows")
        return None

    def _publish(self, profile: ExitProfile) -> None:
        if self.job.report.report is None or self.settings.exit_profile is not None:
            return
        path = exits_path(self.job.report.report)
        try:
            put_text(path, sealed_text(profile.to_json()))
        except (OSError, PrefillError) as error:
            log.warning(f"cannot write {path}: {error}")

    def _learn(self) -> tuple[LearntExits, Tokens]:
        # Read some rows in full, and learn from them; of a given profile, whether it still holds.
        settings, given = self.settings, self.given
        policy = None if given is None else given.policy
        layers = observed_layers(self._layers) if policy is None else policy.layers
        read = self._read_rows(layers)
        rows = calibration_rows(read.requests, read.answers, layers, len(self.job.labels.names))
        if given is not None and policy is not None:
            check = recheck_exits(policy, rows, settings.max_flips, self.job.labels.names, settings.flips_of)
            profile, reason = given, check.reason
            if not settings.quiet:
                log.info(f"--exit-profile: {check.text}")
        else:
            profile = self._profile(rows)
            reason = profile.findings.reason
        # A compressed prompt may keep other tokens beside those that it shares a prefix with.
        rewritten = any(each.rewrites for each in self.job.features)
        known = [] if rewritten else [scored_row(*each) for each in read.pairs]
        computed = sum(answer.computed_tokens for answer in read.answers)
        return LearntExits(profile, known, len(read.answers), reason), Tokens(computed=computed, unique=read.unique)

    def _read_rows(self, layers: Sequence[int]) -> _ReadRows:
        # Random rows of the job, read in full: so many as are asked for, but no more than half of its rows.
        settings, classes = self.settings, self._classes
        drawn, count, provable = self._draw(), self._count, self._provable()
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
        # The rows with these numbers, read in full; `why` is told.
        requests = self._requests(np.sort(numbers))
        if requests and not self.settings.quiet:
            log.info(f"{len(requests):,} rows are read in full first, {why}")
        return _ReadRows(*self._answers(requests, layers))

    def _profile(self, rows: CalibrationRows) -> ExitProfile:
        labels = self.job.labels.names
        found = calibrate_exits(
            rows,
            layers=self._layers,
            max_flips=self.settings.max_flips,
            labels=labels,
            costs=exit_costs(self.job.opened.files.config),
            flips_of=self.settings.flips_of,
        )
        return ExitProfile(
            **job_of_exits(self.job),
            max_flips=self.settings.max_flips,
            flips_of=self.settings.flips_of,
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
        if self.settings.exit_rows is not None:
            return int(self.settings.exit_rows)
        if self.given is not None:
            return CHECKED_ROWS
        return rows_to_learn(self.settings.max_flips, self._classes)

    @property
    def _classes(self) -> int:
        # Of how many kinds of rows the flips are bounded.
        return len(self.job.labels.names) if self.settings.flips_of == "each" else 1

    def _provable(self) -> ProvableFlips | None:
        # What the rows could prove at best; None for a given profile, which they only check.
        if self.given is not None:
            return None
        rows = min(self._count, len(self._rows()) // 2)
        return provable_flips(rows, self.settings.max_flips, self._classes)

    def _rows(self) -> Int64Array:
        source = self.job.source
        found: Int64Array = source.selection().within(0, source.count())
        return found

    def _draw(self) -> Int64Array:
        # The numbers of half of the job's rows, in random order.
        rows = self._rows()
        return rows[np.random.default_rng(_SEED).permutation(len(rows))[: len(rows) // 2]]

    def _requests(self, numbers: Int64Array) -> list[Request]:
        # How the model reads the rows with these numbers, ascending.
        again = Opening(self.settings)  # the job's own source is being read
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

    def _answers(self, requests: list[Request], layers: Sequence[int]) -> tuple[list[Request], list[Answer], int]:
        # The requests that fit the memory, what the model answers to them in full, with what these layers show, and
        # the tokens of their trie.
        if not requests:
            return [], [], 0
        plan = plan_requests(requests, self.engine.limits, self.settings.schedule)
        treatment = Treatment(EarlyExits(observed=tuple(layers)), thinning=thinning_of(dict(enumerate(requests))))
        sets = self.job.labels.sets
        found: dict[int, Answer] = {}
        for answers in self.engine.answer_all(
            plan.packs, lambda i: sets[requests[i].prompt.labels], self.job.tick, treatment
        ):
            found |= {answer.prompt: answer for answer in answers if answer.failure is None}
        answered = sorted(found)
        return [requests[number] for number in answered], [found[number] for number in answered], plan.unique_tokens


def rows_to_learn(max_flips: float, classes: int) -> int:
    """How many rows prove the bound for each of the classes in spite of a flip, if all are as frequent."""
    return round(2 * _SPARE * rows_for(max_flips, flips=1) * classes)


def provable_flips(rows: int, max_flips: float, classes: int) -> ProvableFlips:
    """What so many calibration rows prove at best, if all `classes` are as frequent and none of their rows flips."""
    judged = rows // (2 * classes)
    return ProvableFlips(
        rows=rows,
        judged=judged,
        max_flips=flip_bound(0, judged),
        rows_needed=rows_for(max_flips),
    )


def provable_text(found: ProvableFlips, classes: int, max_flips: float) -> str:
    """One line that says it, and where that is too little, what would do."""
    each = f" of each of {classes} answers, if these are equally frequent" if classes > 1 else ""
    text = (
        f"--exit reads {found.rows:,} rows in full first, and half of them judge: {found.judged:,}{each}. Without a "
        f"flip, so many prove at most {found.max_flips:.2%} flips"
    )
    if found.judged >= found.rows_needed:
        return text
    rows, of_each = 2 * classes * found.rows_needed, " of each" if classes > 1 else ""
    text += (
        f". --max-flips {max_flips:g} takes {found.rows_needed:,}{of_each}, {rows:,} rows of a job of twice as many"
    )
    smallest = math.ceil(found.max_flips * 1e4) / 1e4  # rounded up, as no smaller one is proven
    return text if smallest >= 1 else f"{text}; the smallest --max-flips that may be proven here is {smallest:g}"


def rows_for_rarest(counts: Int64Array, max_flips: float, most: int) -> int:
    """How many rows it takes to prove the bound for the rarest answer, in spite of a flip, if so many of the rows so
    far have each answer. At most `most`; no more than so far where these could not even prove it without a flip.
    """
    rows, rarest = int(counts.sum()), int(counts.min())
    if not rarest or 2 * rows_for(max_flips) * rows > most * rarest:
        return rows
    return max(rows, min(most, round(2 * _SPARE * rows_for(max_flips, flips=1) * rows / rarest)))


def exit_costs(config: Any) -> ExitCosts:
    """What exits cost for a model with this configuration.

    A profile has measured it, but exits are the same with and without one.
    """
    try:
        share = keys_share(config)
    except NoCostModel:
        return ExitCosts()
    return ExitCosts(keys=share, repeated=share)


def observed_layers(layers: int) -> tuple[int, ...]:
    """The layers that may become exits, numbered from 0: no more than `MOST_LAYERS`."""
    candidates = range(layers // 4, layers - 1)
    step = -(-len(candidates) // MOST_LAYERS) if candidates else 1
    return tuple(reversed(range(layers - 2, candidates.start - 1, -step)))


def calibration_rows(
    requests: Sequence[Request], answers: Sequence[Answer], layers: Sequence[int], labels: int
) -> CalibrationRows:
    """Requests that were answered in full, with what `layers` show of them; each answer has `labels`."""
    shown = {layer: [answer.readings[number] for answer in answers] for number, layer in enumerate(layers)}
    return CalibrationRows(
        readings={layer: _joined(readings) for layer, readings in shown.items() if readings},
        final=np.array([answer.logprobs for answer in answers], np.float64).reshape(-1, labels),
        weights=np.array([len(request.tokens) for request in requests], np.float64),
    )


def _joined(readings: Sequence[Readings]) -> Readings:
    return Readings(
        np.concatenate([each.hidden for each in readings]),
        np.concatenate([each.logits for each in readings]),
        np.concatenate([each.before for each in readings]),
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
