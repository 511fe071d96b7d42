"""The job of `prefill profile`: completion times, what follows from them, each mode's longest prompt, the files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from prefillcli.data.proof import hash_model, sealed_text
from prefillcli.data.windows import windows
from prefillcli.errors import require_known, shown, without_secrets
from prefillcli.forecast.profile import MODES, Profile, this_machine
from prefillcli.forecast.survey import Alternatives, survey
from prefillcli.jobs.opening import Opening
from prefillcli.jobs.path_table import require_apart, require_json
from prefillcli.jobs.shell import shell
from prefillcli.models.open import check_loadable, open_model
from prefillcli.options.commands import ProfileSettings
from prefillcli.report.run import versions, write_with_page
from prefillcli.report.section import page_of
from prefillcli.report.survey import Survey
from prefillcli.runtime.clock import Clock, Progress, StepLog
from prefillcli.runtime.cores import Threads
from prefillcli.runtime.memory import parse_size

# INPUT: opened before the measurements, surveyed after them.


def open_input(settings: ProfileSettings) -> Opening:
    """Open INPUT and make prompts of its first rows, so that errors in it are found before the measurements.

    Raises what a survey would raise for columns, template and labels.
    """
    opening = Opening(settings)
    opening.open_source()
    opening.open_models()
    first = next(windows(opening.source, opening.builder, opening.labels, id_column=None, max_rows=1), None)
    if first is not None:
        opening.labels.check(first)
    return opening


def survey_input(settings: ProfileSettings, given: Opening, profile: Profile) -> Survey:
    """Survey the rows, with times by the fresh `profile` and in the budget that it found. Raises as `survey` does."""
    from prefillcli.models.law import FREE_SHARE
    from prefillcli.models.weights import weight_bytes

    source, opened = given.source, given.opened
    free = None
    if settings.memory is None:
        draft = weight_bytes(opened.draft, opened.device) if opened.draft is not None else 0
        free = max(round(profile.budget_bytes / FREE_SHARE) - draft, 0)
    known = profile if profile.completion is not None else None
    with Progress(source.selected_rows, interval=settings.progress_interval, quiet=settings.quiet) as progress:
        builder = given.new_builder()
        plans = Alternatives(settings, opened, free=free, profile=known)
        coming = windows(source, builder, given.labels, id_column=None)
        return survey(source, builder, given.labels, coming, plans, progress.advance)


@dataclass
class _ProfileEnd:
    """How the job ended, for the last line on stdout."""

    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    profile: Profile | None = None


def profile_job(settings: ProfileSettings) -> dict[str, Any]:
    """Run the job; return the summary for the last line on stdout.

    Files are written when everything is measured, and once more with what INPUT takes: if INPUT
    turns out to be damaged, no measurement is lost. Errors are reported on stderr, and become the exit code in the
    summary.
    """
    clock, ended = Clock(), _ProfileEnd()
    settings = settings.with_defaults()
    with shell(ended, debug=settings.debug) as stop:
        with stop.at_once(), StepLog(interval=settings.progress_interval, quiet=settings.quiet) as steps:
            steps.begin("reading the model")
            given = _check(settings)
            profile = _measure(settings, given, steps.announce)
            _save(profile, settings.output, clock.total)
            ended.profile = profile
            steps.begin("")
            if given is not None:
                profile.survey = survey_input(settings, given, profile)
                _save(profile, settings.output, clock.total)
        ended.status, ended.exit_code = "complete", 0
        from prefillcli.profile.profile_page import print_no_completion, print_profile

        if profile.no_completion is not None:
            print_no_completion(profile)
        if not settings.quiet:
            print_profile(profile)
            print(without_secrets(f"\nnext: {_next(settings, profile)}"), file=sys.stderr)
            print(without_secrets(f"\nprefill: {settings.output}, {page_of(settings.output)}"), file=sys.stderr)
    return _summary(ended, settings, clock.total)


def _check(settings: ProfileSettings) -> Opening | None:
    # Raise UsageError for wrong options before anything is measured; open INPUT if there is one.
    require_json(settings.output)
    require_apart(settings)
    require_known("--mode", settings.mode, MODES)
    return open_input(settings) if settings.inputs else None


def _measure(settings: ProfileSettings, given: Opening | None, announce: Callable[[str], None]) -> Profile:
    if given is not None:
        files, device = given.opened.files, given.opened.device
    else:
        files, device = open_model(settings)
        Threads(settings.threads)
        check_loadable(files, device)
    import torch

    from prefillcli.models.find import with_weights
    from prefillcli.profile.children import Subject
    from prefillcli.profile.measuring import Search, busy_with, profile_mode, time_model, traces

    files = with_weights(files)  # here, or each measuring process would dequantise them
    subject = Subject(
        path=files.path if files.saved else files.origin,
        dtype=str(files.dtype).removeprefix("torch."),
        device=str(device),
        trust_remote_code=settings.trust_remote_code,
        threads=torch.get_num_threads(),
        chunk_tokens=settings.chunk_tokens or 0,
        head=settings.head,
    )

    announce("completion times: packs of several lengths, with and without cached tokens")
    memory = parse_size(settings.memory) if settings.memory else None
    fit_seconds = settings.fit_seconds or 0.0
    budgeted, completion, no_completion = time_model(subject, files.config, memory, fit_seconds, announce)
    notes = busy_with(subject.threads)
    subject = replace(subject, chunk_tokens=budgeted.chunk_tokens)
    profile = Profile(
        model=hash_model(files.origin),
        model_name=settings.model or str(files.origin),
        family=files.family,
        dtype=subject.dtype,
        device=subject.device,
        machine=this_machine(subject.device),
        budget_bytes=budgeted.budget,
        chunk_tokens=budgeted.chunk_tokens,
        max_model_tokens=files.max_length,
        completion=completion,
        no_completion=no_completion,
        regroup_layers=budgeted.regroup_layers,
        keys_layers=budgeted.keys_layers,
        settings=shown(settings.model_dump(mode="json")),
        versions=versions(),
        notes=notes,
    )
    search = Search(subject, files, budgeted.budget, fit_seconds, settings.confirm_seconds or 0.0, announce)
    profile.modes = [profile_mode(name, search) for name in dict.fromkeys(settings.mode)]
    if settings.full:
        profile.traces = list(traces(profile.modes, search))
    return profile


def _save(profile: Profile, output: str, seconds: float) -> None:
    # Write `profile.json` and its page. Raises PrefillError.
    from prefillcli.profile.profile_page import profile_html

    profile.created = datetime.now(UTC).isoformat(timespec="seconds")
    profile.seconds_taken = seconds
    write_with_page(output, sealed_text(profile.model_dump_json()), profile_html(profile))


def _summary(ended: _ProfileEnd, settings: ProfileSettings, seconds: float) -> dict[str, Any]:
    line: dict[str, Any] = {"status": ended.status, "exit_code": ended.exit_code, "seconds": round(seconds, 3)}
    if ended.profile is not None:
        profile = ended.profile
        line |= {
            "output": settings.output,
            "page": page_of(settings.output),
            "budget_bytes": profile.budget_bytes,
            "modes": {
                each.mode: {"predicted_tokens": each.predicted_tokens, "max_tokens": each.max_tokens}
                for each in profile.modes
            },
            "pearson": None if profile.completion is None else round(profile.completion.pearson, 4),
        }
        if profile.no_completion is not None:
            line["no_completion"] = profile.no_completion
        if profile.survey is not None:
            plan = profile.survey.plan
            line |= {
                "rows": profile.survey.rows.model_dump(),
                "predicted_seconds": plan.seconds,
                "predicted_price": plan.price,
            }
    return line | ({"error": ended.error} if ended.error else {})


def _next(settings: ProfileSettings, profile: Profile) -> str:
    # What to run next.
    if profile.completion is None:
        return "prefill profile once more, when nothing else runs on this machine"
    rows = settings.inputs[0] if settings.inputs else "YOUR.parquet"
    model = "" if settings.model is None else f" -m {settings.model}"
    return f"prefill score {rows}{model} --dry-run says what a run of these rows takes"
