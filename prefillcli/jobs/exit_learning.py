"""What a job learns of exits before its first window: some of its rows are read in full, and between layers."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prefillcli.compress.answers import plan_requests, thinning_of
from prefillcli.compress.request import Request
from prefillcli.data.output.sink import Sink
from prefillcli.data.output.store import put_text
from prefillcli.data.rows import Int64Array, Prompt, ScoredRow
from prefillcli.engines.base import Answer, BetweenLayers, EarlyExits, PlanEngine
from prefillcli.errors import PrefillError
from prefillcli.exits.calibration_rows import CalibrationRows
from prefillcli.exits.costs import ExitCosts
from prefillcli.exits.judging import calibrate_exits
from prefillcli.exits.layer_readings import Readings
from prefillcli.exits.profile_file import ExitProfile
from prefillcli.exits.recheck import recheck_exits
from prefillcli.jobs.exit_profile_file import job_of_exits
from prefillcli.jobs.inputs import JobInputs, carried_columns, open_source, prompt_builder
from prefillcli.jobs.job_exits import EXITS, JobExits
from prefillcli.jobs.paths import exits_path
from prefillcli.jobs.window_scoring import scored_row
from prefillcli.models.flops import keys_share
from prefillcli.models.shape import NoCostModel
from prefillcli.options.score import ScoreSettings
from prefillcli.report.run import Tokens
from prefillcli.stats.audit import rows_for

if TYPE_CHECKING:  # takes torch along
    from prefillcli.compress.compressor import Compressor

log = logging.getLogger(__name__)

FILE = "exits.json"  # in the work folder
CHECKED_ROWS = 300
MOST_LAYERS = 12
"""Layers that are read of each row, at most."""
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


@dataclass(frozen=True, slots=True)
class ExitLearning:
    """Learns the exits of a job, once. What it finds stays in the work folder, for when the job goes on."""

    settings: ScoreSettings
    inputs: JobInputs
    engine: PlanEngine
    compressor: Compressor | None
    sink: Sink
    fingerprint: dict[str, str]
    report: str | None
    regroup_cost: float | None
    tick: Callable[[float], None]

    def exits(self) -> tuple[JobExits, Tokens]:
        """The exits, and the tokens that learning them took in this run."""
        found, tokens = self._stored(), Tokens()
        if found is None:
            found, tokens = self._learn()
            data = json.dumps(found.to_json()).encode()
            self.sink.work.put_bytes(FILE, data)
            self.sink.plan = self.sink.plan | {EXITS: {"digest": _digest(data)}}
            self._publish(found.profile)
            if found.reason is not None:
                print(f"prefill: warning: --exit: {found.reason}; all rows are read in full", file=sys.stderr)
        stored = self.sink.plan[EXITS]
        reason = stored.get("reason", found.reason)
        exits = JobExits(
            policy=found.profile.policy if reason is None else None,
            learnt=found.profile.findings,
            reused=self.inputs.exit_profile is not None,
            layers=self._layers,
            max_flips=self.settings.max_flips,
            known={row.row: row for row in found.rows},
            rows_read=found.rows_read,
            regroup_cost=self.regroup_cost,
            reason=reason,
            stopped_window=stored.get("stopped_window"),
        )
        return exits, tokens

    def _stored(self) -> LearntExits | None:
        """What an earlier attempt at the job has learnt."""
        if EXITS not in self.sink.plan:
            return None
        try:
            data = self.sink.work.read_bytes(FILE)
        except FileNotFoundError:
            data = b""
        if _digest(data) == self.sink.plan[EXITS]["digest"]:
            return LearntExits.of_json(json.loads(data))
        log.warning(
            "%s/%s is gone or damaged: the exits are learnt again, from the same rows", self.sink.work.location, FILE
        )
        return None

    def _publish(self, profile: ExitProfile) -> None:
        """Write what later jobs may use, beside the report."""
        if self.report is None or self.settings.exit_profile is not None:
            return
        path = exits_path(self.report)
        try:
            put_text(path, profile.to_json())
        except (OSError, PrefillError) as error:
            print(f"prefill: warning: cannot write {path}: {error}", file=sys.stderr)

    def _learn(self) -> tuple[LearntExits, Tokens]:
        """Read some rows in full, and learn from them; of a given profile, whether it still holds."""
        settings, given = self.settings, self.inputs.exit_profile
        requests = self._requests(
            settings.exit_rows
            or (rows_to_learn(settings.max_flips, len(self.inputs.labels.labels)) if given is None else CHECKED_ROWS)
        )
        policy = None if given is None else given.policy
        layers = observed_layers(self._layers) if policy is None else policy.layers
        if not settings.quiet:
            print(f"prefill: {len(requests):,} rows are read in full first, for --exit", file=sys.stderr)
        answers, unique = self._answers(requests, layers)
        rows = calibration_rows(requests, answers, layers, len(self.inputs.labels.names))
        if given is not None and policy is not None:
            check = recheck_exits(policy, rows, settings.max_flips, self.inputs.labels.names)
            profile, reason = given, check.reason
            if not settings.quiet:
                print(f"prefill: --exit-profile: {check.text}", file=sys.stderr)
        else:
            profile = self._profile(rows)
            reason = profile.findings.reason
        # A compressed prompt may keep other tokens beside those that it shares a prefix with.
        known = [] if settings.compresses else [scored_row(*each) for each in zip(requests, answers, strict=True)]
        computed = sum(answer.computed_tokens for answer in answers)
        return LearntExits(profile, known, len(answers), reason), Tokens(computed=computed, unique=unique)

    def _profile(self, rows: CalibrationRows) -> ExitProfile:
        """The exits that these rows prove."""
        labels = self.inputs.labels.names
        found = calibrate_exits(
            rows,
            layers=self._layers,
            max_flips=self.settings.max_flips,
            labels=labels,
            costs=exit_costs(self.inputs.opened.files.config),
        )
        return ExitProfile(
            **job_of_exits(self.inputs.opened, labels, self.fingerprint),
            max_flips=self.settings.max_flips,
            exits=None if found.policy is None else found.policy.to_json(),
            findings=found.findings,
        )

    @property
    def _layers(self) -> int:
        layers: int = self.inputs.opened.files.config.get_text_config().num_hidden_layers
        return layers

    def _requests(self, count: int) -> list[Request]:
        """How the model reads `count` random rows of the job, or half of its rows if that is less."""
        source = open_source(self.settings, carried_columns(self.settings))
        builder = prompt_builder(self.settings, self.inputs.opened, source, carried_columns(self.settings, source))
        try:
            numbers = _drawn(source.selection().within(0, source.count()), count)
            prompts: list[Prompt] = []
            for batch in source.rows(numbers):
                prompts += builder.build(batch, self.inputs.labels)[0]
                self.tick(0.0)
        finally:
            builder.close()
        requests = [Request(prompt) for prompt in prompts]
        if self.compressor is not None:
            requests = self.compressor.compress(prompts, self.tick)
        return [request for request in requests if len(request.tokens) <= self.engine.limits.max_tokens]

    def _answers(self, requests: Sequence[Request], layers: Sequence[int]) -> tuple[list[Answer], int]:
        """What the model answers in full, with what these layers show, and the tokens of the requests' trie."""
        if not requests:
            return [], 0
        plan = plan_requests(requests, self.engine.limits, self.settings.schedule)
        between = BetweenLayers(EarlyExits(observed=tuple(layers)), thinning=thinning_of(dict(enumerate(requests))))
        sets = self.inputs.labels.sets
        found: dict[int, Answer] = {}
        for answers in self.engine.answer_all(
            plan.packs, lambda i: sets[requests[i].prompt.labels], self.tick, between
        ):
            found |= {answer.prompt: answer for answer in answers}
        return [found[number] for number in range(len(requests))], plan.unique_tokens


def forget_exits(sink: Sink) -> None:
    """Remove what a job that is complete has learnt."""
    sink.work.delete(FILE)


def rows_to_learn(max_flips: float, labels: int) -> int:
    """How many rows prove the bound for each of the labels in spite of a flip, if all are as frequent."""
    return round(2 * _SPARE * rows_for(max_flips, flips=1) * labels)


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


def _drawn(rows: Int64Array, count: int) -> Int64Array:
    """Random ones of the rows, ascending: `count`, or half of all rows if that is less."""
    draw = np.random.default_rng(_SEED).permutation(len(rows))[: min(count, len(rows) // 2)]
    return rows[np.sort(draw)]


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
    """The rows of several readings."""
    return Readings(
        np.concatenate([each.hidden for each in readings]),
        np.concatenate([each.logits for each in readings]),
        np.concatenate([each.before for each in readings]),
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
