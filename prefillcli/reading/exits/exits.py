"""Early exit: rows leave the model once their answer is decided, as often as a bound on flips allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prefillcli.core.roles import Judge, Reading
from prefillcli.engines.base import PLAIN, EarlyExits, Treatment
from prefillcli.errors import UsageError
from prefillcli.models.open import WORDS
from prefillcli.options.reading import ExitOptions, FlipOptions
from prefillcli.options.requirements import spelled_out
from prefillcli.plan.pack import carried_by_few, in_full
from prefillcli.reading.exits.first import all_readers_of, readers_of, readings_of
from prefillcli.reading.exits.full_rows import FullRows
from prefillcli.reading.exits.learning import ENDED, EXITS, FILE, ExitLearning, Learning, learnt_once, stored_exit_use
from prefillcli.reading.exits.policy import ExitPolicy, exit_profile_at, job_of_exits, require_same_job
from prefillcli.reading.exits.proof import drifted_classes
from prefillcli.reading.exits.rare import SCORES, RareLearning
from prefillcli.reading.exits.report import ExitUse, of_question_text, with_ends
from prefillcli.reading.exits.ways import Ways, ways_of, ways_text
from prefillcli.rows.output.columns import added
from prefillcli.rows.proof import hash_value
from prefillcli.rows.records import BEFORE, FIRST, ScoredRow
from prefillcli.runtime import log

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.core.request import Request, Tick
    from prefillcli.core.run import Reached, Run
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.engines.base import Answer
    from prefillcli.models.open import Opened
    from prefillcli.plan.pack import Pack
    from prefillcli.reading.exits.first import FirstReading, Reader, Readers
    from prefillcli.reading.exits.policy import ExitProfile
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.destination import Manifest
    from prefillcli.rows.records import Prompt


class Exits(Reading, Judge):
    """The exits of a job: learnt before its first window, at work between layers, and watched. `read_as` states how
    prompts are read otherwise. Raises UsageError for a wrong exit profile."""

    def __init__(
        self, options: ExitOptions, flips: FlipOptions, read_as: Sequence[Any] = (), *, alone: bool = False
    ) -> None:
        """`alone`: --max-flips is given without a way to spend it."""
        self._options = options
        self.alone = alone
        self._ways: Ways | None = None
        self.groups = added({"exits": True, "label_scores": True, "audit": flips.audit})
        self.profile: ExitProfile | None = None
        """The profile that an earlier job has learnt."""
        self.policies: dict[int, ExitPolicy] = {}
        """By the prompt of a row (`Prompt.part`). Without one no answer leaves: nothing is learnt or could be proven,
        or the exits have ended."""
        self.use: ExitUse | None = None
        """The exits in the run's report, once they are learnt."""
        self.known: Mapping[int, ScoredRow] = {}
        """Rows by number that were scored before the first window, to learn from them."""
        # A profile of this is no other's: its layers before the model have other numbers.
        self._read_as = [*read_as, "all ways"] if alone else read_as
        self._readers: list[Reader] | None = None  # for callers that ask for a glance
        # The packs of this run: the seconds that they took and would have taken without exits; token-layers in full,
        # and those saved.
        self._seconds = self._full_seconds = self._layers = self._skipped = 0.0
        self._kept_alive: Counter[str] = Counter()  # token-layers of shared prefixes, by number of rows
        # The first models by layer with their names; their rows and seconds in this run, and the tokens of the prompts
        # that they decided.
        self._first: Readers = {}
        self._first_rows: Counter[int] = Counter()
        self._first_seconds: dict[int, float] = {}
        self._spared = 0
        if options.exit_profile is not None:
            self.profile = exit_profile_at(options.exit_profile)

    def require_models(self, opened: Opened) -> None:
        """Raise UsageError where these models cannot decide rows early."""
        narrow = self._options.narrow
        if narrow is not None:
            from prefillcli.models.dtype import require_faster
            from prefillcli.walk.narrow import check_narrow

            check_narrow(narrow, opened.device, str(opened.files.origin) if opened.files.encoder else None)
            require_faster(narrow, opened.files.dtype, opened.device)
        if opened.files.head is not None and self._options.first and any(not each.files.head for each in opened.small):
            raise UsageError(
                "--first: the model's classification head is read, and the first model has only tokens\n"
                "give a first model with a head, or read the model's next token with --head vocabulary"
            )

    def widened(self, run: Run) -> Run:
        """Return the run with all ways that may pay on this machine, where --max-flips is given alone.

        The job keeps its identity, in which --max-flips stands for any of them."""
        if not self.alone:
            return run
        inputs = run.inputs
        with run.clock.phase("exits"), run.stop.at_once():
            rows = len(inputs.source.selection().within(0, inputs.source.count()))
            self._ways = ways = ways_of(inputs, rows, self.profile, stored_exit_use(run.sink.settled))
        if ways.unable is not None:
            return run
        if not run.settings.run.quiet:
            log.info(f"--max-flips {run.settings.flips.max_flips:g} tries {ways_text(ways, inputs)}")
        opened, rows_as = replace(inputs.opened, small=ways.small(inputs)), spelled_out(run.settings)
        own = replace(inputs, opened=opened, rows=replace(inputs.rows, settings=rows_as))
        return replace(run, inputs=own)

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        own = [name for name in values if name in {**ExitOptions.model_fields, **FlipOptions.model_fields}]
        hashed = {name: values.pop(name) for name in own}
        if first := hashed.pop("first", None):  # a model is identified by its contents, as a draft is
            hashed["first"] = first == WORDS
        for name in ("recall", "precision", "compute"):
            if hashed.get(name) is None:
                hashed.pop(name, None)
        found = {"exit": hash_value(sorted(hashed.items()))}
        if self.profile is not None:
            found["exit_profile"] = hash_value(self.profile.model_dump(mode="json"))
        return found

    def require_same_job(self, inputs: Inputs, fingerprint: Mapping[str, str]) -> None:
        """Raise UsageError for an exit profile of another job, once the fingerprint is known."""
        if self.profile is not None:
            job = job_of_exits(inputs, fingerprint, self._read_as)
            require_same_job(self.profile, self._options.exit_profile, job)

    def learn(self, run: Run, scorer: ModelScorer) -> None:
        """Learn when rows are decided, from some of them that are read in full, or from those of an estimate."""
        if run.settings.estimate.estimate is not None:
            return
        with run.clock.phase("exits"):
            tries = self._ways is not None and self._ways.unable is None
            rows = FullRows(run, scorer, all_readers_of(scorer) if tries else readers_of(scorer))
            learning: Learning
            if self._options.rare_option is None:
                learning = ExitLearning(rows, self.profile, self._read_as, self._ways)
            else:
                learning = RareLearning(rows, self._read_as)
            profile, known, self.use = learnt_once(learning)
            if tries and self._ways is not None:
                self.use = self.use.model_copy(update={"left_out": dict(self._ways.left_out)})
            for part, learnt in enumerate(() if profile is None else profile.questions):
                own = list(self.use.questions.values())[part]
                if learnt.policy is not None and own.reason is None:
                    # An earlier attempt, or the job of the profile, may have had more readers.
                    self.policies[part] = learnt.policy.with_readers(rows.places)
            self.known = {row.row: row for row in known}
            self._first = learning.readers()
            self._first_seconds = {BEFORE: self._first[BEFORE][1].seconds} if self.use.rare is not None else {}

    def use_policies(self, policies: Mapping[int, ExitPolicy], readers: Readers) -> None:
        """Let answers leave by these policies, by the part of a row, with these first models."""
        self.policies, self._first = dict(policies), readers

    def ahead(self, requests: Sequence[Request], tick: Tick) -> tuple[dict[int, ScoredRow], int]:
        """Return the answers, by the places of these questions, that the model need not be asked for, and the tokens
        that first models have computed to find them."""
        rows: dict[int, ScoredRow] = {}
        computed = 0
        for layer, (_, reader) in sorted(self._first.items()):
            places = {layer, *reader.inner}
            asked = {part for part, policy in self.policies.items() if not places.isdisjoint(policy.layers)}
            if not asked:
                continue
            tokens, seconds = reader.tokens, reader.seconds
            left = [
                number
                for number, request in enumerate(requests)
                if number not in rows and request.prompt.part in asked
            ]
            for at in range(0, len(left), reader.block):
                rows |= self._decided(layer, reader, requests, left[at : at + reader.block], tick)
            self._first_rows[layer] += len(left)
            self._first_seconds[layer] = self._first_seconds.get(layer, 0.0) + reader.seconds - seconds
            computed += reader.tokens - tokens
        self._spared += sum(len(requests[number].tokens) for number in rows)
        return rows, computed

    def _decided(
        self, layer: int, reader: Reader, requests: Sequence[Request], numbers: Sequence[int], tick: Tick
    ) -> dict[int, ScoredRow]:
        # The answers to the questions with these `numbers` that a first model with its end at this layer decides.
        found = reader.read([requests[number].prompt for number in numbers], tick, self.policies)
        read: dict[tuple[int, int], list[tuple[int, FirstReading]]] = {}
        for number, each in zip(numbers, found, strict=True):
            if each is not None:
                place = layer if each.left is None else each.left
                read.setdefault((requests[number].prompt.part, place), []).append((number, each))
        rows = {}
        for (part, place), pairs in read.items():
            policy, logprobs = self.policies[part], np.stack([each.logprobs for _, each in pairs])
            if place == layer:
                decided, logprobs = policy.decide(place, readings_of([each for _, each in pairs]))
            else:  # after its last layer also those leave that are in doubt
                decided = policy.suffices(place, logprobs)
            for (number, each), leaves, own in zip(pairs, decided.tolist(), logprobs, strict=True):
                if leaves:
                    rows[number] = decided_row(requests[number], own, place, each.seconds)
        return rows

    def glance(
        self, scorer: ModelScorer, prompts: Sequence[Prompt], tick: Tick
    ) -> Sequence[Sequence[FirstReading | None]]:
        """Return the readings of these prompts by each first model; None where it cannot read one."""
        if self._readers is None:
            self._readers = [each for _, each in readers_of(scorer).values()]
        return [each.read(prompts, tick) for each in self._readers]

    def treatment(self, requests: Mapping[int, Request], in_full: frozenset[int]) -> Treatment:
        """Return the treatment between layers of the prompts with these `requests`. Those `in_full` go through all
        layers."""
        inside = {part: own for part, policy in self.policies.items() if (own := policy.inside) is not None}
        rules = {
            number: inside[request.prompt.part]
            for number, request in requests.items()
            if request.prompt.part in inside
        }
        return Treatment(EarlyExits(rules, in_full)) if rules else PLAIN

    def answered(self, pack: Pack, answers: Sequence[Answer], requests: Sequence[Request]) -> None:
        """Count the layers that exits saved in a pack whose prompts are all answered."""
        if self.use is None or not self.policies or not answers:
            return
        left = {answer.prompt: answer.exit_layer for answer in answers}
        through = [_layers_through([left[prompt] for prompt in prompts]) for _, prompts in pack.reads]
        self._seconds += sum(answer.seconds for answer in answers)
        self._full_seconds += sum(answer.full_seconds or answer.seconds for answer in answers)
        self._layers += in_full(self.use.model_layers) * len(pack.tokens)
        self._skipped += sum(answer.skipped for answer in answers)
        self._kept_alive.update(carried_by_few(pack, through, self.use.model_layers))

    def window_written(self, run: Run, window: int) -> None:
        """End the exits of a question after a window, with this index, if the written audited rows show that too many
        answers flip."""
        if self.use is None or (allowed := self.use.max_flips) is None:
            return
        sink = run.sink
        for part, name in enumerate(self.use.questions):
            if part not in self.policies:
                continue
            audited = sink.counts.audited_exits.get(name, {})
            counts = {
                f"audited rows that are {label!r} in full": (own.flips, own.rows) for label, own in audited.items()
            }
            if self.use.flips_of == "all" and counts:
                counts = {
                    "audited rows": (sum(own[0] for own in counts.values()), sum(own[1] for own in counts.values()))
                }
            drifted = drifted_classes(list(counts.values()), allowed)
            if not drifted:
                continue
            of, (flips, rows) = list(counts.items())[drifted[0]]
            del self.policies[part]
            ended = {
                "status": "stopped",
                "stopped_window": window + 1,
                "reason": f"{flips:,} of {rows:,} {of} have flipped, more than --max-flips {allowed:g} explains: the "
                "rows are not like those that the exits were learnt on",
            }
            before = sink.settled[EXITS]
            sink.settle(sink.settled | {EXITS: before | {ENDED: before.get(ENDED, {}) | {name: ended}}})
            self.use = with_ends(self.use, {name: ended})
            option = "--first" if self.use.first else "--exit"
            of = of_question_text(self.use.told_apart(name))
            log.warning(f"{option}{of}: {ended['reason']}; all further rows are read in full")

    def finished(self, run: Run) -> None:
        """Remove what was kept for a resumed job, once all rows are written."""
        run.sink.work.delete(FILE)
        run.sink.work.delete(SCORES)

    def reported(self, report: RunReport, reached: Reached) -> None:
        if reached.sink is None:
            return
        use = self.use
        use = stored_exit_use(reached.sink.settled) if use is None else self._in_this_run(use, report.tokens)
        if use is not None:
            use.take(reached.sink.counts)
        report.add(use)

    def _in_this_run(self, use: ExitUse, tokens: Any) -> ExitUse:
        # The exits with their savings in the packs of this run, whose `tokens` these are.
        computed = tokens.computed * use.model_layers
        spared = self._spared * use.first[0].token_seconds if use.first else 0.0
        taken = self._seconds + sum(self._first_seconds.values())
        gains = {
            "layers_saved": tokens.skipped / computed if computed else None,
            "layers_gain": self._layers / (self._layers - self._skipped) if self._layers else None,
            "measured_gain": (self._full_seconds + spared) / taken if taken else None,
            "kept_alive": dict(self._kept_alive),
        }
        if self._first:
            gains["first"] = [
                each.model_copy(
                    update={
                        "read_rows": self._first_rows[each.layer - 1],
                        "read_tokens": self._first[each.layer - 1][1].tokens,
                        "seconds": self._first_seconds.get(each.layer - 1, 0.0),
                    }
                )
                if each.layer - 1 in self._first
                else each
                for each in use.first
            ]
        return use.model_copy(update=gains)

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        use = stored_exit_use(manifest.settled)
        if use is not None and manifest.counts is not None:
            use.take(manifest.counts)
        report.add(use)


def decided_row(request: Request, logprobs: Any, layer: int, seconds: float) -> ScoredRow:
    """Return a row that a first model has decided; the model itself computes nothing of it."""
    return ScoredRow(request.prompt.row, logprobs, 0, 0, 0, seconds, method=FIRST, exit_layer=layer + 1)


def _layers_through(exit_layers: Sequence[int | None]) -> int | None:
    # The number of layers that a read goes through, by the layers after which its prompts leave. None means all: a
    # read ends with its last prompt.
    numbers = [layer for layer in exit_layers if layer is not None]
    return max(numbers) + 1 if len(numbers) == len(exit_layers) else None
