"""The heads of a job: they answer its questions after their layers, and nothing above the deepest is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prefillcli.asking.decisions import QuestionChoices
from prefillcli.core.request import Request, answer_requests
from prefillcli.core.roles import Judge, Reading
from prefillcli.engines.base import PLAIN, EarlyExits, Treatment
from prefillcli.errors import UsageError, counted, did_you_mean, without_secrets
from prefillcli.models.open import dtype_name
from prefillcli.models.shape import VERIFIED
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.reading.exits.full_rows import FullRows
from prefillcli.reading.heads.head import HEAD, FittedHead, HeadFile, HeadRule, head_file_at, moments
from prefillcli.reading.heads.use import HeadUse, QuestionHead
from prefillcli.rows.output.columns import added
from prefillcli.rows.output.shards import SUMS
from prefillcli.rows.proof import hash_value
from prefillcli.runtime import log
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs, OpenRows
    from prefillcli.core.request import Tick
    from prefillcli.core.run import Reached, Run
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.engines.base import Answer
    from prefillcli.models.open import Opened
    from prefillcli.options.settings import JobSettings
    from prefillcli.plan.pack import Pack
    from prefillcli.prompts.labels import Labels
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.destination import Manifest
    from prefillcli.rows.output.schema import OutputSchema
    from prefillcli.rows.records import Prompt, ScoredRow, Window
    from prefillcli.stats.arrays import Float32Array, Float64Array

    Read = Callable[..., tuple[list[Request], int]]

_FIT = "fit one for this job with prefill fit"


USE = "head_use"  # the key in a shard's ledger of the use of its heads, which `prefill merge` reads
LEDGER, FILE = "heads", "heads.json"  # in the ledger of a job, and in its work folder
ADAPTED_ROWS = 300  # to take mean and scale of
COMPARED_ROWS = 2_000  # of a question, at least: then no more is kept of rows
_SEED = 20_263
LEAST_ADAPTED = LEAST_COMPARED = 20  # rows: the features of one text go together, so few rows are far off by chance


class Features:
    """The `sums` of the features that a head has read of rows: how many rows, of each feature, and of its square."""

    def __init__(self, sums: Float64Array) -> None:
        self.sums = sums

    @classmethod
    def of(cls, rule: HeadRule) -> Features:
        """Return those of no row yet."""
        return cls(np.zeros(1 + 2 * len(rule.mean)))

    @property
    def rows(self) -> int:
        return int(self.sums[0])

    def add(self, features: Float64Array) -> None:
        """Add rows with these features [rows, features]."""
        of_squares = np.square(features).sum(axis=0)
        self.sums += np.concatenate([[len(features)], features.sum(axis=0), of_squares])

    def moved(self, fitted: int) -> tuple[float | None, float | None]:
        """Return `shift` and `spread` of `QuestionHead`, for a head fitted to this many rows."""
        if self.rows < LEAST_COMPARED:
            return None, None
        mean, of_squares = np.split(self.sums[1:] / self.rows, 2)
        by_chance = 1 / self.rows + 1 / fitted
        shift = float(np.sqrt(max(np.square(mean).mean() - by_chance, 0.0)))
        return shift, float(np.median(np.sqrt(np.maximum(of_squares - np.square(mean), 0.0))))

    def compared(self, head: QuestionHead) -> QuestionHead:
        """Return what is told of a head that has read them."""
        shift, spread = self.moved(head.fitted_rows)
        return head.model_copy(update={"compared": self.rows, "shift": shift, "spread": spread})


class Heads(Reading, Judge):
    """The heads of the file that `--head` names. Raises UsageError for a wrong file."""

    known: Mapping[int, ScoredRow] = {}

    def __init__(self, settings: JobSettings, path: str, read_as: Sequence[Any] = ()) -> None:
        self._settings, self._read_as = settings, read_as
        self.groups = added({"audit": settings.flips.audit})
        self.shown = f"--head {without_secrets(path)}"
        self.file: HeadFile = head_file_at(path)
        self._by_part: dict[int, FittedHead] = {}  # by the prompt of a row (`Prompt.part`); none for requests
        self._answering: dict[str, tuple[FittedHead, HeadRule]] = {}  # by the digest of their rules
        self._alone = False  # whether they answer all questions, and the model none
        self._loaded = self.file.layers
        self._features: dict[str, Features] = {}  # by the digest of a rule
        self._adapted: dict[str, HeadRule] = {}
        self._adapted_rows = 0

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        values.pop("head")
        return {"head": hash_value([[each.question, each.rule().digest] for each in self.file.heads])}

    def check(self, rows: OpenRows, labels: Labels, schema: OutputSchema) -> None:
        if not isinstance(labels, QuestionChoices):
            self._of_parts(labels)

    def _of_parts(self, labels: Labels) -> dict[int, FittedHead]:
        # The heads by the prompts that they answer. Raises UsageError where they are for other questions.
        heads, asked = self.file.by_question, [each.question for each in labels.asked]
        names = [each.name for each in asked]
        if labels.measure is not Measure.SHARES:
            raise UsageError(f"{self.shown}: it answers questions whose answers all rows share\n{_FIT}")
        found = {}
        for part, (name, question) in enumerate(zip(names, asked, strict=True)):
            own = heads.get(name)
            if own is None and len(names) == len(heads) == 1:  # one question needs no name
                own = next(iter(heads.values()))
            if own is None:
                continue
            if names.count(name) > 1:
                raise UsageError(
                    f"{self.shown}: the question {name} is asked in several orders or prompts, and a head knows one\n"
                    "ask it once"
                )
            if own.labels != question.names:
                raise UsageError(
                    f"{self.shown}: its answers are {', '.join(own.labels)}, not {', '.join(question.names)}\n"
                    f"name these answers in this order, or {_FIT}"
                )
            found[part] = own
        if not found:
            known = ", ".join(filter(None, heads)) or "one without a name"
            raise UsageError(
                f"{self.shown}: it is for other questions ({known}), not {', '.join(names) or 'this one'}"
                f"{did_you_mean(names[0], heads)}\n{_FIT}"
            )
        return found

    def take(self, opened: Opened, labels: Labels) -> Opened:
        """Let the heads answer the questions with these labels; return the model as far as they need it. Raises
        UsageError."""
        settings, files = self._settings, opened.files
        if files.head is not None or files.encoder:
            raise UsageError(
                f"{self.shown}: {files.origin} has a classification head of its own, and this one is for the hidden "
                "states of a causal language model\nread the model's own head, or take another model"
            )
        if isinstance(labels, QuestionChoices):
            self._take_requests(labels)
            return opened
        self._by_part = self._of_parts(labels)
        audited = bool(settings.flips.audit)
        self._alone = len(self._by_part) == len(labels.asked) and not audited
        for part, head in self._by_part.items():
            own = labels.asked[part]
            if audited and own.question.readout is not None:
                raise UsageError(
                    f"--audit: in the model's own layout the question {own.question.name} asks for something else "
                    "than its answers, which a head does not\nleave it out"
                )
            own.head, own.audited = self._rule(head), audited
        left = [each.question.name for part, each in enumerate(labels.asked) if part not in self._by_part]
        if left and not settings.run.quiet:
            log.info(f"{self.shown}: no head for {', '.join(left)}: answered by the model itself, through all layers")
        if not self._alone or self._deepest >= self.file.layers or files.family not in VERIFIED:
            return opened
        self._loaded = self._deepest
        return replace(opened, files=replace(files, read_layers=self._loaded))

    def _take_requests(self, labels: QuestionChoices) -> None:
        # Which questions there are is not known before the rows are: those that heads know are answered by them.
        for head in self.file.heads:
            known_by = head.question if self._settings.heads.any_wording else head.wording
            labels.heads[known_by] = len(head.labels), self._rule(head)

    def _rule(self, head: FittedHead) -> HeadRule:
        rule = replace(head.rule(), peek=self._alone and head.layer == self._deepest)
        self._answering[rule.digest] = head, rule
        self._features[rule.digest] = Features.of(rule)
        return rule

    @property
    def _deepest(self) -> int:
        # The layers that the answers of the heads need.
        return max(each.layer for each in self._by_part.values() or self.file.heads)

    def require_fitting(self, inputs: Inputs, digests: Mapping[str, str]) -> None:
        """Raise UsageError for heads of another model, by the `digests` of the job's fingerprint, another wording or
        number format."""
        self.require_model(inputs.opened, digests)
        self.require_wording(inputs)

    def require_model(self, opened: Opened, digests: Mapping[str, str]) -> None:
        """Raise UsageError for heads of another model, by these `digests` of its files."""
        if self.file.model != model_of(digests, self._read_as):
            beside = {"adapters": "adapters", "draft": "the draft"}
            also = "".join(f" or those of {own}" for name, own in beside.items() if name in digests)
            raise UsageError(
                f"{self.shown}: it was fitted to another model: the contents of {opened.files.origin}{also} differ"
                f"{'' if also else ', or an adapter or a draft is missing'}\n"
                f"give the model that it was fitted to, or {_FIT}"
            )

    def require_wording(self, inputs: Inputs) -> None:
        """Raise UsageError for heads of another wording or number format, unless the settings take them."""
        file, opened = self.file, inputs.opened
        if self._settings.heads.any_wording:
            return
        given = {
            "dtype": (file.dtype, dtype_name(opened.files), "--dtype"),
            "low precision": (file.compute, opened.narrow, "--compute"),
        }
        for what, (fitted, own, option) in given.items():
            if fitted != own:
                raise UsageError(
                    f"{self.shown}: it was fitted in {fitted or 'full precision'}, and this job computes in "
                    f"{own or 'full precision'} ({what})\n"
                    + (f"give {option} {fitted}" if fitted else f"leave {option} out")
                    + ", or --set any_wording=true to take it as it is"
                )
        for part, head in self._by_part.items():
            if head.wording != wording_of(inputs.builder, inputs.labels, part):
                name = f" of the question {head.question}" if head.question else ""
                raise UsageError(
                    f"{self.shown}: the words around a row's text{name} are not those that it was fitted to\n"
                    "ask with the same question, template and chat options, give --set any_wording=true to take it "
                    f"as it is, or {_FIT}"
                )

    # While rows are scored: an `EarlyReading` of the loop.

    def ahead(self, requests: Sequence[Request], tick: Tick) -> tuple[dict[int, ScoredRow], int]:
        """Return nothing: heads need the model."""
        return {}, 0

    def treatment(self, requests: Mapping[int, Request], in_full: frozenset[int]) -> Treatment:
        """See `EarlyReading`. What the first rows' heads have read is shown."""
        known = (self._features.get(digest) for digest in {_digest(request) for request in requests.values()})
        shown = not self._adapted and any(own is not None and own.rows < COMPARED_ROWS for own in known)
        return Treatment(EarlyExits(in_full=in_full, shown=shown)) if shown or in_full else PLAIN

    def answered(self, pack: Pack, answers: Sequence[Answer], requests: Sequence[Request]) -> None:
        """Compare what heads have read with their fit."""
        for digest, states in _by_head((requests[each.prompt], each) for each in answers if each.readings).items():
            if digest in self._features:
                self._features[digest].add(self._answering[digest][1].features(states))

    def reading(self, read: Read | None) -> Read | None:
        """Return how prompts are read where heads are adapted, by how they are read otherwise."""
        if not self._settings.heads.adapt:
            return read

        def adapted(
            scorer: ModelScorer, prompts: Sequence[Prompt], tick: Tick, window: Window | None, done: Collection[int]
        ) -> tuple[list[Request], int]:
            found, tokens = ([Request(each) for each in prompts], 0)
            if read is not None:
                found, tokens = read(scorer, prompts, tick, window, done)
            return [self._by_adapted(each) for each in found], tokens

        return adapted

    def _by_adapted(self, request: Request) -> Request:
        rule, prompt = self._adapted.get(_digest(request)), request.prompt
        if rule is None:
            return request
        return replace(request, prompt=replace(prompt, labels=replace(prompt.labels, head=rule)))

    def learn(self, run: Run, scorer: ModelScorer) -> None:
        """With `--adapt`, take mean and scale of the features of some rows, or those that an earlier attempt took."""
        if not self._settings.heads.adapt:
            return
        sink, kept = run.sink, None
        if LEDGER in sink.settled:
            with suppress(FileNotFoundError, ValueError):
                kept = json.loads(sink.work.read_bytes(FILE))
        if kept is None:
            kept = self._moments(run, scorer)
            sink.work.put_bytes(FILE, json.dumps(kept).encode())
            sink.settle(sink.settled | {LEDGER: {"rows": kept["rows"]}})
        self._adapted_rows = kept["rows"]
        for digest, (_, rule) in self._answering.items():
            if digest in kept["moments"]:
                mean, scale = (np.array(each) for each in kept["moments"][digest])
                self._adapted[digest] = replace(rule, mean=mean, scale=scale)

    def _moments(self, run: Run, scorer: ModelScorer) -> dict[str, Any]:
        # The mean and scale of what each head reads in random rows of the job.
        rows = FullRows(run, scorer)
        numbers = rows.numbers()
        drawn = np.sort(numbers[np.random.default_rng(_SEED).permutation(len(numbers))[:ADAPTED_ROWS]])
        prompts = [each for batch in rows.prompts(drawn) for each in batch if each.labels.head is not None]
        if not run.settings.run.quiet:
            log.info(f"{counted(len(drawn), 'row')} are read first, to adapt heads to (--adapt)")
        asked, _ = scorer.requests(prompts, run.tick)
        requests = [each for each in asked if each.size <= scorer.pool.limits.max_tokens]
        answers = answer_requests(scorer.pool, requests, run.tick, Treatment(EarlyExits(shown=True)))
        run.tokens.computed += sum(each.computed_tokens for each in answers)
        states = _by_head(zip(requests, answers, strict=True))
        least = min((len(own) for own in states.values()), default=0)
        if least < LEAST_ADAPTED:
            raise UsageError(
                f"--adapt: {counted(least, 'row')} can be read, and {LEAST_ADAPTED} are needed to know their mean and "
                "scale\nleave it out"
            )
        return {
            "rows": len({request.prompt.row for request in requests}),
            "moments": {digest: [each.tolist() for each in moments(own)] for digest, own in states.items()},
        }

    def finished(self, run: Run) -> None:
        """Remove what was kept for a resumed job, once all rows are written."""
        run.sink.work.delete(FILE)

    def ended(self, run: Run) -> None:
        use = self.use()
        run.report.add(use)
        if not self._by_part and not any(own.compared for own in use.questions.values()):
            log.warning(
                f"{self.shown}: no question of the requests of this run has the words that a head was fitted to: the "
                "model itself has answered"
            )
        _warn_of_shifts(use)

    def shard_use(self) -> Mapping[str, Any]:
        """Return what `merged` needs to know about a shard's job."""
        sums = {head.question: self._features[digest].sums.tolist() for digest, (head, _) in self._answering.items()}
        return {USE: self.use().model_dump(mode="json"), SUMS: sums}

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        settled = manifest.settled
        if USE in settled:
            use = HeadUse.model_validate(settled[USE])
            sums = {name: Features(np.array(own)) for name, own in settled[SUMS].items()}
            questions = {name: sums[name].compared(own) for name, own in use.questions.items()}
            report.add(use := use.model_copy(update={"questions": questions}))
            _warn_of_shifts(use)

    def reported(self, report: RunReport, reached: Reached) -> None:
        if reached.sink is not None:
            report.add(self.use())

    def use(self) -> HeadUse:
        """Return what is known of their use so far."""
        questions = {}
        for digest, (head, _) in self._answering.items():
            held = head.held_out.get(HEAD)
            own = QuestionHead(
                layer=head.layer,
                fitted_rows=len(head.truth),
                accuracy=None if held is None else held.accuracy,
                adapted=self._adapted_rows,
            )
            questions[head.question] = self._features[digest].compared(own)
        return HeadUse(
            file=self.shown.removeprefix("--head "),
            model_layers=self.file.layers,
            read_layers=self._deepest if self._alone else self.file.layers,
            loaded_layers=self._loaded,
            questions=questions,
        )


def _warn_of_shifts(use: HeadUse) -> None:
    for name, shift in use.shifted.items():
        what = f" of {name}" if name else ""
        log.warning(
            f"--head {use.file}: the rows{what} are not like those that the head was fitted to: their mean features "
            f"are {shift:.2f} standard deviations away\n"
            "add some of them with right answers with prefill fit --add, or give --adapt"
        )


def _digest(request: Request) -> str:
    # That of the head that answers a question; empty without one.
    return "" if (head := request.prompt.labels.head) is None else head.digest


def _by_head(answered: Iterable[tuple[Request, Answer]]) -> dict[str, Float32Array]:
    # What each head has read [rows, hidden], by its digest.
    found: dict[str, list[Float32Array]] = {}
    for request, answer in answered:
        found.setdefault(_digest(request), []).append(answer.readings[-1].hidden)
    return {digest: np.concatenate(own) for digest, own in found.items() if digest}


def wording_of(builder: PromptBuilder, labels: Labels, part: int) -> str:
    """Return the digest of all words around a row's own in one of its prompts."""
    own, _ = builder.of_part(part, labels)
    return hash_value(own.words())


def model_of(digests: Mapping[str, str], read_as: Sequence[Any]) -> str:
    """Return the digest of what makes hidden states of tokens, by the `digests` of a job's fingerprint: the model, and
    what `read_as` states of how prompts are read otherwise."""
    return hash_value([*(digests.get(name) for name in ("model", "tokenizer", "draft", "adapters")), *read_as])
