"""Windows scored by several workers: planned here, a few ahead, answered there, and recorded here by one writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from prefillcli.compress.answers import plan_requests
from prefillcli.data.rows import ErrorCode, RowError, Window
from prefillcli.engines.registry import ENGINES
from prefillcli.errors import UsageError
from prefillcli.jobs.load import compression_of
from prefillcli.jobs.runners.pool import MOST_LOSSES, Cost, Crew, Item, Outcome, Pool, WorkerSpec, answer_task
from prefillcli.jobs.window_scoring import Finished, PlannedWork, ScoringOptions, WindowWork, begin_window, follow_up
from prefillcli.models.open import Opened
from prefillcli.options.commands import ScoreSettings
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import FreePack, free_packs, groups_of
from prefillcli.plan.plan import Plan
from prefillcli.runtime.signals import Stop

if TYPE_CHECKING:
    from prefillcli.compress.compressor import Compressor
    from prefillcli.compress.window_compressor import WindowCompressor
    from prefillcli.forecast.profile import Profile
    from prefillcli.jobs.score import Job

AHEAD = 2
"""Packs for each worker that wait at least, while there are more windows."""


@dataclass(slots=True)
class _OpenWindow:
    """A window with what is answered of it now: first its rows, then what follows for some of them."""

    window: Window
    work: PlannedWork
    first: WindowWork
    left: int = 0
    """Items that are not done."""


class ParallelScoring:
    """Scores the windows of a job with the workers of a pool."""

    def __init__(
        self,
        pool: Pool,
        job: Job,
        compressor: WindowCompressor | None,
        options: ScoringOptions,
    ) -> None:
        self._pool = pool
        self._job = job
        self._sink, self._recorder, self._clock = job.sink, job.recorder, job.clock
        self._compressor = compressor
        self._options = options
        self.most_open = 0
        """Windows that were open at a time, at most."""
        self._open: dict[int, _OpenWindow] = {}  # by the window's index, in the order of the input
        self._carried: tuple[int, tuple[CarriedBlock, ...]] = (-1, ())  # of the window that was planned last

    def score(self, windows: Iterator[Window], ready: Callable[[], bool]) -> None:
        """Score and record all `windows`; `ready` tells whether the next one can be had at once.

        As many are begun as it takes for every worker to have something to do. Whatever stops this, finished rows are
        written.
        """
        dispatcher, more = self._pool.dispatcher, True
        with self._recorder.written_if_stopped():
            while more or self._open:
                hungry = more and dispatcher.waiting < AHEAD * self._pool.size
                if hungry and (dispatcher.idle or ready()):
                    if (window := next(windows, None)) is None:
                        more = False
                    else:
                        self._begin(window)
                else:
                    with self._clock.phase("model"):
                        self._pool.pump(0.05 if hungry else 0.5)

    def _begin(self, window: Window) -> None:
        sink, recorder, options = self._sink, self._recorder, self._options
        done = sink.done(window.index)
        before, carried = self._carried
        if before != sink.window_before(window.index):  # that one was scored by an earlier run
            carried = tuple(sink.carried_into(window.index))
        self._pool.fit(max((len(prompt.tokens) for prompt in window.prompts), default=0))
        recorder.begin(window, done)
        work, finished = begin_window(
            window,
            done,
            carried,
            self._pool,
            self._compressor,
            options,
            recorder,
            rows_open=sum(len(each.window.rows) for each in self._open.values()),
        )
        self._carried = window.index, work.plan.carried
        recorder.take(window, finished)
        opened = self._open[window.index] = _OpenWindow(window, work, work)
        self.most_open = max(self.most_open, len(self._open))
        self._add(opened, len(window.rows) - len(done))
        self._go_on(opened)

    def _add(self, opened: _OpenWindow, rows: int) -> None:
        """Give the workers what is to be answered of a window now, for so many rows."""
        free = list(self._free_packs(opened.work))
        self._recorder.planned([each.pack for each in free], rows)
        opened.left = len(free)
        self._pool.add([self._item(opened, each) for each in group] for group in groups_of(free))

    def _free_packs(self, work: PlannedWork) -> Iterator[FreePack]:
        """What is to be answered, with numbers that no other window's packs have."""
        plan, done = work.plan, set(work.done_prompts)
        for each in free_packs(self._pool.numbered([*plan.given, *plan.packs])):
            if not done.issuperset(each.pack.prompts):
                yield each

    def _item(self, opened: _OpenWindow, each: FreePack) -> Item:
        work, pack, sets = opened.work, each.pack, self._options.labels.sets
        treatment = work.treatment(pack)
        task = answer_task(each, lambda prompt: sets[work.requests[prompt].prompt.labels], treatment)
        begun = partial(self._recorder.pack_begins, pack)
        return self._pool.item(task, Plan([pack], 0), partial(self._take, opened, each), begun)

    def _take(self, opened: _OpenWindow, each: FreePack, outcome: Outcome) -> None:
        """What became of a pack."""
        work, pack, recorder = opened.work, each.pack, self._recorder
        if outcome.tokens and pack.prompts:
            rows, tokens = work.share(pack)
            recorder.step(pack, rows * outcome.tokens, tokens * outcome.tokens, outcome.tokens / len(pack.tokens))
        if outcome.result is not None:
            finished = work.take(pack, outcome.result.answers)
            finished.tokens.computed += outcome.result.refilled_tokens - pack.charged_tokens
            recorder.pack_ends(pack)
            self._finish(opened, finished)
        elif outcome.given_up:
            recorder.pack_ends(pack)
            if len(pack.prompts) == 1:
                self._finish(opened, work.fail(pack.prompts[0], _lost(outcome)))
            else:
                self._isolate(opened, pack.prompts)
                self._finish(opened, Finished())

    def _isolate(self, opened: _OpenWindow, prompts: list[int]) -> None:
        """Score rows one by one: what one of them does to a worker is no harm to the others."""
        for prompt in prompts:
            plan = plan_requests([opened.work.requests[prompt]], self._pool.limits)
            (pack,) = self._pool.numbered(plan.packs)
            item = self._item(opened, FreePack(replace(pack, reads=[(pack.reads[0][0], (prompt,))])))
            item.losses = MOST_LOSSES - 1
            opened.left += 1
            self._pool.add([[item]])

    def _finish(self, opened: _OpenWindow, finished: Finished) -> None:
        self._recorder.take(opened.window, finished)
        opened.left -= 1
        self._go_on(opened)

    def _go_on(self, opened: _OpenWindow) -> None:
        """Where all of a window is answered so far, begin what follows for some of its rows, or end it.

        Which of the wanted rows come first is known when all windows before are written.
        """
        if opened.left:
            return
        job = self._options.rationales
        waits = job is not None and job.limit is not None and next(iter(self._open)) != opened.window.index
        if waits and opened.work is opened.first and opened.first.wanted:
            return
        while not opened.left and opened.first.wanted:
            self._follow(opened)
        if opened.left:
            return
        self._recorder.end(opened.window)
        del self._open[opened.window.index]
        for each in self._job.features:
            each.window_written(self._job, opened.window.index)
        if job is not None and job.limit is not None and self._open:
            self._go_on(next(iter(self._open.values())))

    def _follow(self, opened: _OpenWindow) -> None:
        """Begin what is to be done for some of a window's wanted rows."""

        def tick() -> None:
            self._recorder.step(None, 0, 0, 0)

        following = follow_up(opened.first, self._pool.limits, self._options.schedule, tick)
        if following is not None:
            self._recorder.take(opened.window, Finished(rows=following.finished))
            opened.work = following
            self._add(opened, 0)


def _lost(outcome: Outcome) -> RowError:
    return RowError(ErrorCode.WORKER_LOST, f"{outcome.lost} whenever this row was scored, at last by itself")


# The workers of a `prefill score` job, begun.


# Where the workers of a job run: the runners, by name.


@dataclass(frozen=True, slots=True)
class RunnerKind:
    """A runner by name. `crew` makes its workers; none of them has begun. Raises UsageError or ResourceError."""

    name: str
    crew: Callable[[ScoreSettings, Opened], Crew]


def _local(settings: ScoreSettings, opened: Opened) -> Crew:
    from prefillcli.jobs.runners.processes import ProcessCrew, usable_devices

    device = opened.device.type if opened.device is not None else "cpu"
    devices = usable_devices(device)
    if devices is not None and settings.workers > devices:
        raise UsageError(
            f"--workers {settings.workers}: this machine has {devices} CUDA devices, one for each worker\n"
            f"take --workers {devices}, or --device cpu"
        )
    if devices is not None and opened.device.index is not None:
        raise UsageError(f"--device {settings.device}: each worker has a device of its own\ntake --device cuda")
    threads = None if settings.threads == "auto" else settings.threads
    return ProcessCrew(settings.workers, device=device, engine=settings.engine, threads=threads)


def _ray(settings: ScoreSettings, opened: Opened) -> Crew:
    from prefillcli.jobs.runners.ray import RayCrew

    return RayCrew(settings, opened)


RUNNERS: dict[str, RunnerKind] = {kind.name: kind for kind in (RunnerKind("local", _local), RunnerKind("ray", _ray))}


PACK_SHARE = 1 / 4
"""Size of the packs of several workers, as a share of a single process's."""


def start_pool(
    settings: ScoreSettings,
    opened: Opened,
    stop: Stop,
    *,
    keep: float,
    before: Mapping[str, Any],
    profile: Profile | None,
    digests: Mapping[str, str],
) -> Pool:
    """The workers of a job, of which one is ready. `keep` and `before` as in `load_models`.

    `digests` are those of the contents of the models' folders. Raises as loading a model does.
    """
    from prefillcli.models.law import PACK_TOKENS

    kind = opened.device.type if opened.device is not None else "cpu"
    crew = RUNNERS[settings.runner].crew(settings, opened)
    folders = {"model": str(opened.files.origin), "revision": None}
    if opened.draft is not None:
        folders["draft"] = str(opened.draft.origin)
    spec = WorkerSpec(
        number=0,
        settings=settings.model_copy(update=folders),
        keep=keep,
        share=1.0 if kind == "cuda" else 1 / crew.size,
        plan=before,
        measured=profile,
        digests=digests if crew.digests_needed else {},
    )
    pool = Pool(crew, spec, lambda spec, number: replace(spec, number=number), cost=_cost(opened, profile), stop=stop)
    try:
        tokens = None if settings.pack_tokens else int(PACK_TOKENS[kind] * PACK_SHARE)
        pool.begin(plans="packs" in ENGINES[settings.engine].can, pack_tokens=tokens)
    except BaseException:
        pool.close()
        raise
    return pool


def pool_compressor(settings: ScoreSettings, opened: Opened, pool: Pool, keep: float) -> Compressor | None:
    """What compresses the windows of the job, with the drafts of the pool."""
    from prefillcli.compress.load import make_compressor
    from prefillcli.compress.pickers import PickerResources

    if not opened.compresses:
        return None
    picker = "self-draft" if opened.drafts_itself else "specprefill"
    resources = PickerResources(settings=compression_of(settings), draft=pool)
    return make_compressor(picker, resources, opened, pool.plan.get("keep", keep))


def _cost(opened: Opened, profile: Profile | None) -> Cost:
    """What a plan takes: seconds by the profile, else operations, else tokens."""
    if profile is not None:
        return profile.seconds
    from prefillcli.models.shape import NoCostModel, walk_flops

    def operations(plan: Plan) -> float:
        try:
            return walk_flops(opened.files.config, plan)
        except (NoCostModel, AttributeError):
            return float(plan.computed_tokens)

    return operations
