"""The job of `prefill profile`: the measurements, their meaning for INPUT, the files."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from prefillcli.core.inputs import Inputs
from prefillcli.errors import require_known, without_secrets
from prefillcli.forecast.profile import DEFAULT_PROFILE, MODES, Curve, Profile
from prefillcli.forecast.survey import Costs, survey_section
from prefillcli.options.commands import ProfileSettings
from prefillcli.report.run import versions, write_with_page
from prefillcli.report.section import (
    Part,
    Section,
    byte_size,
    mebibytes,
    page_html,
    page_of,
    print_section,
    settings_section,
    stderr_console,
    three_digits,
)
from prefillcli.runtime.clock import Clock, Progress, StepLog
from prefillcli.scoring.dry_run import survey
from prefillcli.scoring.opening import open_inputs, open_rows, open_without_rows
from prefillcli.scoring.path_table import require_apart, require_json
from prefillcli.scoring.shell import Ended, shell


def profile_job(settings: ProfileSettings) -> dict[str, Any]:
    """Run the job; return the summary for the last line on stdout.

    Files are written when everything is measured, and once more with the cost of INPUT: if INPUT turns out to be
    damaged, no measurement is lost. Errors are reported on stderr, and become the exit code in the summary.
    """
    clock, ended, profile = Clock(), Ended(), None
    settings = settings.with_defaults()
    with shell(ended, debug=settings.run.debug) as stop:
        with stop.at_once(), StepLog(interval=settings.run.progress_interval, quiet=settings.run.quiet) as steps:
            steps.begin("reading the model")
            require_json(settings.measured.output)
            require_apart(settings)
            require_known("--mode", settings.measured.mode, MODES)
            inputs = open_inputs(*open_rows(settings)) if settings.input.inputs else None
            if inputs is not None:
                inputs.check_first_rows()  # its errors are reported before the measurements
            opened = open_without_rows(settings)[0] if inputs is None else inputs.opened
            from prefillcli.tools.profile.measuring import measured_profile  # takes torch along

            profile = measured_profile(settings, opened.files, opened.device, steps.announce)
            _save(profile, settings.measured.output, clock.total)
            steps.begin("")
            if inputs is not None:
                _survey(settings, inputs, profile)
                _save(profile, settings.measured.output, clock.total)
        ended.status, ended.exit_code = "complete", 0
        if profile.no_completion is not None:
            stderr_console().print(f"prefill: warning: {_no_times(profile)}", style="bold red")
        if not settings.run.quiet:
            for section in profile_sections(profile):
                print_section(stderr_console(), section)
            print(without_secrets(f"\nnext: {_next(settings, profile)}"), file=sys.stderr)
            print(
                without_secrets(f"\nprefill: {settings.measured.output}, {page_of(settings.measured.output)}"),
                file=sys.stderr,
            )
    return _summary(ended, profile, settings, clock.total)


def _survey(settings: ProfileSettings, given: Inputs, profile: Profile) -> None:
    # Survey the rows, with times by the fresh `profile` and in the budget that it found. Raises as `survey` does.
    from prefillcli.models.weights import free_beside_draft  # takes torch along

    free = free_beside_draft(given.opened, profile.budget_bytes) if settings.packs.memory is None else None
    known = profile if profile.no_completion is None else None
    with Progress(
        given.source.expected_rows, interval=settings.run.progress_interval, quiet=settings.run.quiet
    ) as progress:
        costs = Costs(settings, given.opened, given.labels.names, free=free, profile=known)
        profile.survey = survey(given, given.windows(given.builder.close), costs, progress.advance)


def _save(profile: Profile, output: str, seconds: float) -> None:
    # Write `profile.json` and its page. Raises PrefillError.
    profile.created = datetime.now(UTC).isoformat(timespec="seconds")
    profile.seconds_taken, profile.versions = seconds, versions()
    write_with_page(output, profile.sealed(), profile_html(profile))


def _summary(ended: Ended, profile: Profile | None, settings: ProfileSettings, seconds: float) -> dict[str, Any]:
    line: dict[str, Any] = {"status": ended.status, "exit_code": ended.exit_code, "seconds": round(seconds, 3)}
    if profile is not None:
        known = {"predicted_tokens", "max_tokens"}
        line |= {
            "output": settings.measured.output,
            "page": page_of(settings.measured.output),
            "budget_bytes": profile.budget_bytes,
        }
        line["modes"] = {each.mode: each.model_dump(include=known) for each in profile.modes}
        line |= {"error_on_new": profile.completion.error, "no_completion": profile.no_completion}
        if profile.survey is not None:
            plan, rows = profile.survey.plan, profile.survey.rows.model_dump()
            line |= {"rows": rows, "predicted_seconds": plan.seconds, "predicted_price": plan.price}
    return line | ({"error": ended.error} if ended.error else {})


def _next(settings: ProfileSettings, profile: Profile) -> str:
    # The next command to run.
    if profile.no_completion is not None:
        return "prefill profile once more, when nothing else runs on this machine"
    words = ["prefill", "score", settings.input.inputs[0] if settings.input.inputs else "YOUR.parquet"]
    words += [] if settings.lm.model is None else ["-m", settings.lm.model]
    for name in ("dtype", "device", "threads"):  # with others the profile does not apply
        words += [f"--{name}", str(settings.value(name))] if settings.is_flag(name) else []
    if os.path.abspath(settings.measured.output) != os.path.abspath(DEFAULT_PROFILE):
        words += ["--profile", settings.measured.output]
    return f"{shlex.join([*words, '--dry-run'])} shows what a run of these rows takes"


def _no_times(profile: Profile) -> str:
    # The text for the case that no curve was good enough.
    return (
        f"no completion times: {profile.no_completion}. Other programs probably took the machine's time. Nothing is "
        "predicted from this profile, neither the end of a run nor its cost; run prefill profile again when the "
        "machine is quiet"
    )


def profile_html(profile: Profile) -> str:
    """Return the page of a profile."""
    head, *sections = profile_sections(profile)
    head.title = "prefill profile"
    return page_html(head, [*sections, settings_section(profile.settings)])


def profile_sections(profile: Profile) -> list[Section]:
    """Return the sections of a profile, for the terminal and the page; first the head."""
    machine = profile.machine
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    head = Section(
        lines=[
            ("model", f"{profile.model_name}: {profile.family}, {profile.dtype}"),
            ("machine", f"{profile.device}: {where}"),
            ("budget", byte_size(profile.budget_bytes)),
            ("created", f"{profile.created} (UTC), {profile.seconds_taken:.0f} seconds"),
        ],
        alarms=[
            *([f"{_no_times(profile)}."] if profile.no_completion is not None else []),
            *(f"{each.mode}: {note}" for each in profile.modes for note in each.notes),
        ],
    )
    rows = [["mode", "longest prompt", "limited by", "shown by a run", "its MiB", "seconds", "times full"]]
    full = profile.mode("full")
    for each in profile.modes:
        run, shown = each.confirmed, f"{each.max_tokens:,}" if each.max_tokens else ""
        measured = ["", ""] if run is None else [mebibytes(run.peak_bytes or 0), f"{run.seconds or 0:,.1f}"]
        times = f"{each.predicted_tokens / full.predicted_tokens:.1f}x" if full and full.predicted_tokens else ""
        shown += " (capped)" if shown and each.capped else ""
        rows.append([each.mode, f"{each.predicted_tokens:,}", each.limited_by, shown, *measured, times])
    explained = [(each.mode, MODES[each.mode]) for each in profile.modes]
    title = "How long a prompt may be, in tokens"
    sections = [head, Section(title=title, parts=[Part(table=rows, lines=explained)])]
    if profile.no_completion is None:
        sections.append(_times_section(profile.completion))
    return sections if profile.survey is None else [*sections, survey_section(profile.survey)]


def _times_section(curve: Curve) -> Section:
    rows = [["prompt tokens", "seconds", "tokens/s", "seconds, half of it cached"]]
    for tokens, _, _ in curve.points[-5:]:
        seconds, half = curve.request_seconds(tokens), curve.request_seconds(tokens, tokens // 2)
        rows.append([f"{tokens:,}", three_digits(seconds), three_digits(tokens / seconds), three_digits(half)])
    note = f"Mean error {curve.error:.0%} on packs of other shapes, of which the curve was not made."
    return Section(title="How long it takes", parts=[Part(table=rows, note=note)])
