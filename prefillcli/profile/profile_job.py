"""The job of `prefill profile`: completion times and their consequences, each mode's longest prompt, the files."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from prefillcli.core.inputs import Inputs
from prefillcli.errors import require_known, without_secrets
from prefillcli.forecast.profile import DEFAULT_PROFILE, MODES, CompletionModel, ModeResult, Profile
from prefillcli.forecast.survey import Alternatives, Survey, survey_section
from prefillcli.jobs.dry_run import survey
from prefillcli.jobs.opening import Opening
from prefillcli.jobs.path_table import require_apart, require_json
from prefillcli.jobs.shell import Ended, shell
from prefillcli.models.open import check_loadable, open_model
from prefillcli.options.commands import ProfileSettings
from prefillcli.report.run import versions, write_with_page
from prefillcli.report.section import (
    WIDTH,
    Bar,
    Part,
    Plot,
    Scale,
    Section,
    Strip,
    TableRows,
    byte_size,
    line_plot,
    mebibytes,
    page_html,
    page_of,
    percent_or_nothing,
    print_section,
    settings_section,
    small_seconds,
    stderr_console,
    three_digits,
)
from prefillcli.runtime.clock import Clock, Progress, StepLog
from prefillcli.runtime.cores import Threads


def _open_input(settings: ProfileSettings) -> Inputs:
    # Open INPUT and make prompts of its first rows, so that errors in it are found before the measurements. Raises the
    # errors of a survey for columns, template and labels.
    opening = Opening(settings)
    opening.open_source()
    opening.open_models()
    opening.inputs.check_first_rows()
    return opening.inputs


def survey_input(settings: ProfileSettings, given: Inputs, profile: Profile) -> Survey:
    """Survey the rows, with times by the fresh `profile` and in the budget that it found. Raises as `survey` does."""
    from prefillcli.models.weights import free_beside_draft  # takes torch along

    free = free_beside_draft(given.opened, profile.budget_bytes) if settings.memory is None else None
    known = profile if profile.completion is not None else None
    with Progress(given.source.expected_rows, interval=settings.progress_interval, quiet=settings.quiet) as progress:
        given.open_rows()
        plans = Alternatives(settings, given.opened, given.labels.names, free=free, profile=known)
        return survey(given, given.windows(given.builder.close), plans, progress.advance)


def profile_job(settings: ProfileSettings) -> dict[str, Any]:
    """Run the job; return the summary for the last line on stdout.

    Files are written when everything is measured, and once more with the cost of INPUT: if INPUT turns out to be
    damaged, no measurement is lost. Errors are reported on stderr, and become the exit code in the summary.
    """
    clock, ended, profile = Clock(), Ended(), None
    settings = settings.with_defaults()
    with shell(ended, debug=settings.debug) as stop:
        with stop.at_once(), StepLog(interval=settings.progress_interval, quiet=settings.quiet) as steps:
            steps.begin("reading the model")
            require_json(settings.output)
            require_apart(settings)
            require_known("--mode", settings.mode, MODES)
            given = _open_input(settings) if settings.inputs else None
            profile = _measured(settings, given, steps)
            _save(profile, settings.output, clock.total)
            steps.begin("")
            if given is not None:
                profile.survey = survey_input(settings, given, profile)
                _save(profile, settings.output, clock.total)
        ended.status, ended.exit_code = "complete", 0
        if profile.no_completion is not None:
            stderr_console().print(f"prefill: warning: {_no_times(profile)}", style="bold red")
        if not settings.quiet:
            print_profile(profile)
            print(without_secrets(f"\nnext: {_next(settings, profile)}"), file=sys.stderr)
            print(without_secrets(f"\nprefill: {settings.output}, {page_of(settings.output)}"), file=sys.stderr)
    return _summary(ended, profile, settings, clock.total)


def _measured(settings: ProfileSettings, given: Inputs | None, steps: StepLog) -> Profile:
    if given is not None:
        files, device = given.opened.files, given.opened.device
    else:
        files, device = open_model(settings)
        Threads(settings.threads)
        check_loadable(files, device)
    from prefillcli.profile.measuring import measured_profile  # takes torch along

    return measured_profile(settings, files, device, steps.announce)


def _save(profile: Profile, output: str, seconds: float) -> None:
    # Write `profile.json` and its page. Raises PrefillError.
    profile.created = datetime.now(UTC).isoformat(timespec="seconds")
    profile.seconds_taken, profile.versions = seconds, versions()
    write_with_page(output, profile.sealed(), profile_html(profile))


def _summary(ended: Ended, profile: Profile | None, settings: ProfileSettings, seconds: float) -> dict[str, Any]:
    line: dict[str, Any] = {"status": ended.status, "exit_code": ended.exit_code, "seconds": round(seconds, 3)}
    if profile is not None:
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
    # The next command to run.
    if profile.completion is None:
        return "prefill profile once more, when nothing else runs on this machine"
    words = ["prefill", "score", settings.inputs[0] if settings.inputs else "YOUR.parquet"]
    words += [] if settings.model is None else ["-m", settings.model]
    for name in ("dtype", "device", "threads"):  # with others the profile does not apply
        words += [f"--{name}", str(getattr(settings, name))] if settings.is_flag(name) else []
    if os.path.abspath(settings.output) != os.path.abspath(DEFAULT_PROFILE):
        words += ["--profile", settings.output]
    return f"{shlex.join([*words, '--dry-run'])} says what a run of these rows takes"


# The page: the charts of figures 3 and 10 of PrefillOnly, completion times, INPUT.


# The tables: for the terminal and for the page.


_DISTURBED = 1.5  # slowest round over the fastest; above this the machine was busy


def _profile_headline(profile: Profile) -> str:
    # The measured model and the machine.
    machine = profile.machine
    where = machine.gpu or f"{machine.cpu}, {machine.threads} threads"
    return f"{profile.family}, {profile.dtype} on {profile.device} ({where}), budget {byte_size(profile.budget_bytes)}"


def length_table(profile: Profile) -> TableRows:
    """Header and one row for each mode: how long a prompt may be."""
    rows = [["mode", "predicted", "limited by", "confirmed", "peak MiB", "of budget", "seconds", "times full"]]
    full = profile.mode("full")
    whole = None if full is None else full.predicted_tokens
    for each in profile.modes:
        run = next((c for c in reversed(each.confirmations) if c.fits), None)
        peak, seconds = (None, None) if run is None else (run.peak_bytes, run.seconds)
        rows.append(
            [
                each.mode,
                _count(each.predicted_tokens),
                each.limited_by or "",
                _count(each.max_tokens) + (" (capped)" if each.capped and each.max_tokens else ""),
                "" if peak is None else mebibytes(peak),
                "" if peak is None else f"{peak / profile.budget_bytes:.0%}",
                "" if seconds is None else f"{seconds:,.1f}",
                f"{each.predicted_tokens / whole:.1f}x" if whole and each.predicted_tokens else "",
            ]
        )
    return rows


def law_table(profile: Profile) -> TableRows:
    """Header and one row for each mode: measured bytes for each token beside the law's."""
    rows = [["mode", "bytes/token", "by the law", "ratio", "constant MiB", "by the law", "short runs"]]
    for each in profile.modes:
        runs = [point.tokens for point in each.points]
        rows.append(
            [
                each.mode,
                "" if each.fit_token is None else f"{each.fit_token:,.0f}",
                f"{each.law_token:,.0f}",
                "" if each.fit_over_law is None else f"{each.fit_over_law:.2f}",
                "" if each.fit_base is None else f"{each.fit_base / 2**20:,.1f}",
                f"{each.law_base / 2**20:,.1f}",
                f"{len(runs)}, {min(runs):,}-{max(runs):,}" if runs else "",
            ]
        )
    return rows


def completion_table(profile: Profile) -> TableRows:
    """Header and one row for each model of completion times; empty if none is good enough."""
    model = profile.completion
    if model is None:
        return []
    cached = small_seconds(model.per_cached, "+")
    linear = f"{small_seconds(model.base)} + {small_seconds(model.per_input)} input {cached} cached"
    parts = {"pack": model.per_pack, "token": model.per_token, "prompt": model.per_read, "pair": model.per_pair}
    costs = ", ".join(f"{small_seconds(value)}/{name}" for name, value in parts.items())
    return [
        ["completion time", "model", "Pearson r", "error on new"],
        ["one prompt, linear", linear, f"{model.pearson:.4f}", percent_or_nothing(model.heldout_error)],
        [
            "one prompt, proxy",
            "linear in input - cached",
            f"{model.pearson_proxy:.4f}",
            percent_or_nothing(model.heldout_error_proxy),
        ],
        ["a plan", costs, "", percent_or_nothing(model.heldout_error_plan)],
    ]


def _profile_remarks(profile: Profile) -> list[str]:
    # Notes that a reader of the tables needs.
    return [*profile.notes, *(f"{each.mode}: {note}" for each in profile.modes for note in each.notes)]


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _no_times(profile: Profile) -> str:
    # The text for the case that no fit was good enough.
    return (
        f"no completion times: {profile.no_completion}. Other programs probably took the machine's time. Nothing is "
        "predicted from this profile, neither the end of a run nor its cost; run prefill profile again when the "
        "machine is quiet"
    )


def _seconds_table(model: CompletionModel, longest: int) -> TableRows:
    # Header and one row for each length of a prompt, from a thousand tokens up to the `longest` that was timed.
    rows = [["prompt tokens", "seconds", "tokens/s", "seconds, half of it cached"]]
    lengths = [tokens for tokens in (500 * 2**n for n in range(12)) if tokens <= longest] or [longest]
    for tokens in lengths[-5:]:
        seconds = model.request_seconds(tokens)
        half = model.request_seconds(tokens, tokens // 2)
        rows.append([f"{tokens:,}", three_digits(seconds), three_digits(tokens / seconds), three_digits(half)])
    return rows


def _how_good(model: CompletionModel) -> str:
    # How reliable the times are.
    text = f"fit: Pearson r {model.pearson:.3f}"
    if model.heldout_error_plan is not None:
        text += f", mean error {model.heldout_error_plan:.0%} on packs that it had not seen"
    if model.disturbance is not None and model.disturbance > _DISTURBED:
        text += (
            f". The machine was busy: the slowest round took {model.disturbance:.1f} times the fastest, which counts; "
            "beside other programs all takes longer"
        )
    return text


def _leaving_costs(profile: Profile) -> str:
    # The costs of early exit on this machine; empty if they were not measured.
    if profile.regroup_layers is None or profile.keys_layers is None:
        return ""
    return (
        f"laying out anew what goes on takes {profile.regroup_layers:.2f} layers, "
        f"the keys and values of a peek {profile.keys_layers:.2f}"
    )


def print_profile(profile: Profile) -> None:
    """The tables on stderr."""
    explained = [(each.mode, MODES[each.mode]) for each in profile.modes]
    names = ["mode", "longest prompt", "limited by", "shown by a run", "its MiB", "times full"]
    lengths = [names, *([*row[:5], row[7]] for row in length_table(profile)[1:])]  # a terminal has room for so many
    parts = [Part(title="How long a prompt may be, in tokens", table=lengths, lines=explained)]
    if profile.completion is not None:
        longest = max((point.input_tokens for point in profile.completion.points), default=1000)
        seconds = _seconds_table(profile.completion, longest)
        parts.append(Part(title="How long it takes", table=seconds, note=_how_good(profile.completion)))
    parts.append(Part(title="Early exit", text=_leaving_costs(profile)))
    console = stderr_console(WIDTH)
    print_section(console, Section(title=_profile_headline(profile), parts=parts))
    if profile.survey is not None:
        print_section(stderr_console(), survey_section(profile.survey))
    print_section(console, Section(alarms=_profile_remarks(profile)))


def memory_chart(profile: Profile) -> Plot | None:
    """Memory above the loaded model over the time of one run, each mode scaled to its own duration."""
    traces = [each for each in profile.traces if len(each.points) > 1 and each.points[-1].seconds > 0]
    top = max((point.used_bytes for each in traces for point in each.points), default=0)
    if not top:
        return None
    lines = []
    for each in traces:
        length, peak = each.points[-1].seconds, max(point.used_bytes for point in each.points)
        points = [(100 * point.seconds / length, point.used_bytes) for point in each.points]
        lines.append((each.mode, f"peak {byte_size(peak)}, {length:.1f} s", points))
    return line_plot(lines, Scale.upto(100.0, "{:g} %"), Scale.upto(top, "{:,g} MiB", unit=2.0**20))


def _completion_chart(profile: Profile) -> Plot | None:
    # Seconds over input tokens: points as measured (hollow: not used for the fit), a fitted line for each prefix.
    points = [] if profile.completion is None else profile.completion.points
    if not points:
        return None
    lines, dots = [], []
    for number, cached in enumerate(sorted({p.cached_tokens for p in points})):
        own = sorted((p for p in points if p.cached_tokens == cached), key=lambda p: p.input_tokens)
        lines.append((f"{cached:,} cached", "", [(p.input_tokens, max(p.predicted, 0.0)) for p in own]))
        for p in own:
            title = f"{p.input_tokens:,} tokens, {p.cached_tokens:,} of them cached: {p.seconds:.3g} s"
            dots.append((number, p.input_tokens, p.seconds, title, p.heldout))
    longest, top = max(p.input_tokens for p in points), max(max(p.seconds, p.predicted) for p in points)
    return line_plot(lines, Scale.upto(longest, "{:,g}", end=1.03 * longest), Scale.upto(top, "{:g} s"), dots)


def _length_bars(profile: Profile) -> list[Bar]:
    def text(mode: ModeResult) -> str:
        if mode.predicted_tokens is None:
            return "does not fit"
        limit = " (the limit of the model)" if mode.limited_by == "model" else ""
        shown = "not confirmed" if mode.max_tokens is None else f"confirmed up to {mode.max_tokens:,}"
        return f"{mode.predicted_tokens:,} tokens{limit}, {shown}"

    longest = max((each.predicted_tokens or 0 for each in profile.modes), default=0) or 1
    return [
        Bar(
            each.mode,
            100 * (each.predicted_tokens or 0) / longest,
            text(each),
            "predicted",
            more=(Strip("confirmed", 0, 100 * min(1.0, (each.max_tokens or 0) / longest)),),
        )
        for each in profile.modes
    ]


def profile_html(profile: Profile) -> str:
    """The page of a profile."""
    exits = _leaving_costs(profile)
    head = Section(
        title="prefill profile",
        lines=[
            ("model", profile.model_name),
            ("what", _profile_headline(profile)),
            *([("early exit", exits)] if exits else []),
            ("created", f"{profile.created} (UTC), {profile.seconds_taken:.0f} seconds"),
            ("with", ", ".join(f"{name} {version}" for name, version in profile.versions.items())),
        ],
        alarms=[
            *([f"{_no_times(profile)}."] if profile.no_completion is not None else []),
            *_profile_remarks(profile),
        ],
    )
    lengths = Part(
        bars=_length_bars(profile),
        note="Pale: predicted from short runs. Strong: shown by a run under the enforced budget.",
    )
    traced = profile.traces[0].tokens if profile.traces else 0
    completion = Part(
        plot=_completion_chart(profile),
        note="Across: input tokens. Cached tokens are a prefix whose K,V were kept from the pack before. Lines: the "
        "linear fit; hollow points were not used for it.",
    )
    tables = {
        "Longest prompts": length_table(profile),
        "Memory for each token": law_table(profile),
        "Completion times": completion_table(profile),
    }
    laws = [
        (each.mode, ", ".join(f"{name} {size:,.0f}" for name, size in each.law_terms.items()))
        for each in profile.modes
    ]
    return page_html(
        head,
        [
            Section(title="Longest prompt of each mode", parts=[lengths]),
            Section(
                title=f"Memory over the time of a run of {traced:,} tokens",
                parts=[Part(plot=memory_chart(profile), note="Above the loaded model.")],
            ),
            Section(title="Completion time of a prompt", parts=[completion]),
            *([] if profile.survey is None else [survey_section(profile.survey)]),
            *(Section(title=title, parts=[Part(table=rows)]) for title, rows in tables.items()),
            Section(title="Laws, in bytes for each token", lines=laws),
            settings_section(profile.settings),
        ],
    )
