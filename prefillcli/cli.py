"""The command line: parse, call, exit code. Nothing here imports torch, so that `--help` answers at once."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer

from prefillcli import __version__
from prefillcli.engines.registry import ENGINES
from prefillcli.errors import PrefillError
from prefillcli.options.bench import BenchSettings
from prefillcli.options.commands import COMMANDS
from prefillcli.options.groups import ModelOptions
from prefillcli.options.inspect import InspectSettings
from prefillcli.options.load import AnySettings, load_settings
from prefillcli.options.option import RUN, Settings, details_of
from prefillcli.options.profile import ProfileSettings
from prefillcli.options.score import ScoreSettings
from prefillcli.redaction import shown
from prefillcli.runtime.streams import survive_closed_streams
from prefillcli.runtime.threads import prepare

app = typer.Typer(
    name="prefill",
    help="Offline, prefill-only LLM scoring: one probability per row.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands take it over
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `prefill` command."""
    survive_closed_streams()
    try:
        app()
    except _Finished:
        raise
    except SystemExit as stop:
        if stop.code and not _is_completion():  # typer has said what is wrong, and no job has printed a summary
            status = "interrupted" if stop.code == 130 else "failed"
            _print_summary({"status": status, "exit_code": stop.code, "error": "see stderr"})
        raise


def _is_completion() -> bool:
    """Whether the shell asks for words that complete the line."""
    return "_PREFILL_COMPLETE" in os.environ


class _Finished(SystemExit):
    """The end of a command that has printed its summary."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    pass


def score(inputs: list[str] | None, recipe: str | None, **flags: Any) -> None:
    """Score every row of INPUT and write one row for each: a probability, or an error with a stable code.

    The last line on stdout is one JSON object that sums the run up; everything else goes to stderr.
    """
    settings = _settings(ScoreSettings, inputs, recipe, flags)
    from prefillcli.jobs.score import score_job

    finish(score_job(settings))


def bench(inputs: list[str] | None, recipe: str | None, **flags: Any) -> None:
    """Compare full prefill, compressed prefill and others on INPUT, or on made workloads: speed, memory, answers.

    Tables go to stderr; the last line on stdout is one JSON object that sums the run up.
    """
    settings = _settings(BenchSettings, inputs, recipe, flags)
    from prefillcli.bench.bench_job import bench_job

    finish(bench_job(settings))


def profile(inputs: list[str] | None, recipe: str | None, **flags: Any) -> None:
    """Measure what fits and how fast it runs on this machine: the longest prompt of each mode, and completion times.

    From these it tells what a server would make of the papers' workloads, and with INPUT what scoring it takes.
    Tables go to stderr; the last line on stdout is one JSON object that sums the run up.
    """
    settings = _settings(ProfileSettings, inputs, recipe, flags)
    from prefillcli.profile.profile_job import profile_job

    finish(profile_job(settings))


def inspect_(inputs: list[str] | None, recipe: str | None, **flags: Any) -> None:
    """Show one prompt of INPUT as the engine sees it: its tokens, what is shared, what is kept and why, its answers.

    The last line on stdout is one JSON object that sums it up; everything else goes to stderr.
    """
    settings = _settings(InspectSettings, inputs, recipe, flags)
    from prefillcli.jobs.inspect import inspect_job

    finish(inspect_job(settings))


_Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="What prefill score wrote: a file, a folder or a URL.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only.", rich_help_panel=RUN)]


def verify(
    output: _Output,
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="INPUT...", help="What it was made of; its rows are compared.")
    ] = None,
    quiet: _Quiet = False,
) -> None:
    """Check that OUTPUT is whole and as its job wrote it, and with INPUT that it is of that input, row by row.

    Exit code 0, or 1 with what is wrong on stderr. The last line on stdout is one JSON object that sums it up.
    """
    from prefillcli.jobs.verify import verify_job

    finish(verify_job(output, inputs or (), quiet=quiet))


def status(output: _Output, quiet: _Quiet = False) -> None:
    """Tell whether the job of OUTPUT is running, with its rate and expected end, has stopped, or is complete.

    The last line on stdout is one JSON object that says the same; nothing is changed.
    """
    from prefillcli.jobs.status import status_job

    finish(status_job(output, quiet=quiet))


def _settings(
    kind: type[AnySettings], inputs: list[str] | None, recipe: str | None, flags: dict[str, Any]
) -> AnySettings:
    given = {name: value for name, value in flags.items() if value is not None}
    if inputs:
        given["inputs"] = inputs
    try:
        settings = load_settings(kind, given, recipe=recipe)
    except PrefillError as error:
        print(f"prefill: {error}", file=sys.stderr)
        finish({"status": "failed", "exit_code": error.exit_code, "error": str(error)})
    if isinstance(settings, ModelOptions) and (
        not isinstance(settings, ScoreSettings) or "threads" in ENGINES[settings.engine].can
    ):
        prepare(settings.threads)
    return settings


def finish(summary: dict[str, Any]) -> NoReturn:
    """End with the run's summary as the last line on stdout and its exit code."""
    _print_summary(summary)
    raise _Finished(summary["exit_code"])


def _print_summary(summary: dict[str, Any]) -> None:
    print(json.dumps(shown(summary), separators=(",", ":"), allow_nan=False), flush=True)


def _parameter(settings: type[Settings], name: str) -> inspect.Parameter:
    """The command-line option of a settings field; None stands for "not given"."""
    field, details = settings.model_fields[name], details_of(settings, name)
    flag = "--" + name.replace("_", "-")
    kind: Any = field.annotation
    if kind is bool:
        names = [f"{flag}/--{details.negative}" if details.negative else flag]
    elif kind == bool | None:
        names, kind = [f"{flag}/--no-{flag.removeprefix('--')}"], bool
    else:
        names = [flag]
        kind = list[str] if details.repeatable else {int: int, float: float, int | None: int}.get(kind, str)
    metavar, words = details.metavar or None, []
    if get_origin(field.annotation) is Literal:
        words = list(get_args(field.annotation))
        metavar = "|".join(words)
    help = field.description or ""
    if "(default" not in help and field.default not in (None, False, (), {}):
        default = field.default if not isinstance(field.default, tuple) else ", ".join(map(str, field.default))
        help += f" (default: {default})"
    if details.short:
        names.append(details.short)
    option = typer.Option(
        *names,
        help=help,
        rich_help_panel=details.panel,
        metavar=metavar,
        show_default=False,
        autocompletion=(lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _with_options(command: Callable[..., None], settings: type[Settings]) -> Callable[..., None]:
    """Give `command` the inputs, `--recipe` and one option for each field of `settings`."""
    fields = settings.model_fields
    required = fields["inputs"].is_required()
    inputs = typer.Argument(metavar="INPUT..." if required else "[INPUT]...", help=fields["inputs"].description)
    recipe = typer.Option("--recipe", metavar="FILE", help="YAML with options by name.", rich_help_panel=RUN)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("inputs", keyword, default=None, annotation=Annotated[list[str] | None, inputs]),
        *(_parameter(settings, name) for name in fields if name != "inputs"),
        inspect.Parameter("recipe", keyword, default=None, annotation=Annotated[str | None, recipe]),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


for _name, _command in (("score", score), ("profile", profile), ("bench", bench), ("inspect", inspect_)):
    app.command(_name)(_with_options(_command, COMMANDS[_name]))
app.command()(verify)
app.command()(status)
