"""The command line: parse, call, exit code. Nothing here imports torch, so that `--help` answers at once."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand

from prefillcli import __version__
from prefillcli.core.feature import features
from prefillcli.errors import Interrupted, PrefillError, shown
from prefillcli.options.commands import (
    COMMANDS,
    BenchSettings,
    DoctorSettings,
    InspectSettings,
    MergeSettings,
    ProfileSettings,
    ScoreSettings,
)
from prefillcli.options.groups import ModelOptions
from prefillcli.options.load import load_settings
from prefillcli.options.option import RUN, Settings, details_of
from prefillcli.runtime import log
from prefillcli.runtime.cores import prepare
from prefillcli.runtime.extras import light_imports, quiet_imports
from prefillcli.runtime.log import survive_closed_streams
from prefillcli.runtime.memory import prepare_allocator
from prefillcli.runtime.signals import end_process, stop_before_the_job, stop_no_more

AnyOptions = TypeVar("AnyOptions", bound=Settings)
Summary = dict[str, Any]

app = typer.Typer(
    name="prefill",
    help="Offline, prefill-only LLM scoring: one probability per row.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},  # commands take it over
    rich_markup_mode=None,  # help pages are plain text: see GroupedCommand
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `prefill` command."""
    survive_closed_streams()
    stop_before_the_job()
    quiet_imports()
    try:
        app()
    except _Finished as end:
        if end.stopped:
            end_process(end.code)
        raise
    except Interrupted as stop:
        log.error(str(stop))
        _print_summary({"status": "interrupted", "exit_code": stop.exit_code, "error": str(stop)})
        end_process(stop.exit_code)
    except SystemExit as stop:
        completes = "_PREFILL_COMPLETE" in os.environ  # the shell asks for words that complete the line
        if stop.code and not completes:  # typer has said what is wrong, and no job has printed a summary
            status = "interrupted" if stop.code == 130 else "failed"
            _print_summary({"status": status, "exit_code": stop.code, "error": "see stderr"})
        raise


class _Finished(SystemExit):
    """The end of a command that has printed its summary."""

    def __init__(self, code: int, *, stopped: bool) -> None:
        super().__init__(code)
        self.code: int = code
        self.stopped = stopped  # whether a signal has ended it


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


# The command line of a command, made from its settings.


def _parameters_of(settings: type[Settings]) -> list[inspect.Parameter]:
    # What is given by its place, an option for each other field of `settings`, and `--recipe`.
    #
    # None stands for "not given".
    place = settings.given_by_place()
    recipe = typer.Option("--recipe", metavar="FILE", help="YAML with options by name.", rich_help_panel=RUN)
    return [
        *([] if place is None else [_argument(settings, place)]),
        *(_option(settings, name) for name in settings.model_fields if name != place),
        _parameter("recipe", str, recipe),
    ]


def _argument(settings: type[Settings], name: str) -> inspect.Parameter:
    field = settings.model_fields[name]
    kind: Any = str if field.annotation is str else list[str]
    metavar = "INPUT" if name == "inputs" else name.upper()
    return _parameter(name, kind, typer.Argument(metavar=metavar, help=field.description))


def _option(settings: type[Settings], name: str) -> inspect.Parameter:
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
    return _parameter(name, kind, option)


def _parameter(name: str, kind: Any, shown: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
    )


# The help page of a command: its options in groups, as plain text.
#
# Typer's own pages for rich terminals take as long to import and to draw as all the rest of a help page.


_NO_BREAK = "\N{NON-BREAKING HYPHEN}"  # lines are not broken at it, as they are at the hyphens of --keep-private


class GroupedCommand(TyperCommand):
    """A command whose help page shows each option under the name of its panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what the command takes to the page: arguments first, then the options panel by panel."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None:
                names, help = record
                kind = "Arguments" if isinstance(each, TyperArgument) else "Options"
                rows = groups.setdefault(getattr(each, "rich_help_panel", None) or kind, [])
                rows.append((names, help.replace("-", _NO_BREAK)))
        for name, rows in groups.items():
            with formatter.section(name):
                formatter.write_dl(rows)

    def get_help(self, ctx: Any) -> str:
        """The page."""
        return super().get_help(ctx).replace(_NO_BREAK, "-")

    def get_short_help_str(self, limit: int = 45) -> str:
        """What `prefill --help` says of this command: the first line of its help, whole."""
        return (self.help or "").strip().partition("\n")[0]


def _job(run: Callable[[AnyOptions], Summary]) -> Callable[[AnyOptions], Summary]:
    # Make `run` a command of its name: `--recipe`, and an argument or an option for each field of its settings.
    name = run.__name__.strip("_")
    kind = cast("type[AnyOptions]", COMMANDS[name])

    def command(recipe: str | None, **given: Any) -> None:
        _finish(run(_load(kind, recipe, given)))

    parameters = _parameters_of(kind)
    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name, cls=GroupedCommand)(command)
    return run


@_job
def score_(settings: ScoreSettings) -> Summary:
    """Score every row of INPUT and write one row for each: a probability, or an error with a stable code.

    The last line on stdout is one JSON object that sums the run up; everything else goes to stderr.
    """
    from prefillcli.jobs.score import score_job

    return score_job(settings)


@_job
def profile(settings: ProfileSettings) -> Summary:
    """Measure what fits and how fast it runs on this machine: the longest prompt of each mode, and completion times.

    From these it tells what a server would make of the papers' workloads, and with INPUT what scoring it takes.
    Tables go to stderr; the last line on stdout is one JSON object that sums the run up.
    """
    from prefillcli.profile.profile_job import profile_job

    return profile_job(settings)


@_job
def bench(settings: BenchSettings) -> Summary:
    """Compare full prefill, compressed prefill and others on INPUT, or on made prompts: speed, memory, answers.

    Tables go to stderr; the last line on stdout is one JSON object that sums the run up.
    """
    from prefillcli.bench.bench_job import bench_job

    return bench_job(settings)


@_job
def inspect_(settings: InspectSettings) -> Summary:
    """Show one prompt of INPUT as the engine sees it: its tokens, what is shared, what is kept and why, its answers.

    The last line on stdout is one JSON object that sums it up; everything else goes to stderr.
    """
    from prefillcli.jobs.inspect import inspect_job

    return inspect_job(settings)


@_job
def merge(settings: MergeSettings) -> Summary:
    """Join the shards that lie beside OUTPUT to the output that one process would have written.

    Every row must be there exactly once. The last line on stdout is one JSON object that sums it up.
    """
    from prefillcli.jobs.merge import merge_job

    return merge_job(settings)


@_job
def doctor(settings: DoctorSettings) -> Summary:
    """Show what this machine has and what will be used, and check each path of attention against explicit scores.

    A path that is wrong here is not used by later runs. Tables go to stderr; the last line on stdout is one JSON
    object that says the same. Exit code 0, or 1 where a path is wrong.
    """
    with light_imports():
        from prefillcli.jobs.doctor import doctor_job

    return doctor_job(settings)


for _feature in features():
    for _command in _feature.commands.values():
        _job(_command.run)


_Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="What prefill score wrote: a file, a folder or a URL.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only.", rich_help_panel=RUN)]


@app.command(cls=GroupedCommand)
def verify(
    output: _Output,
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="INPUT", help="What it was made of; its rows are compared.")
    ] = None,
    quiet: _Quiet = False,
) -> None:
    """Check that OUTPUT is whole and as its job wrote it, and with INPUT that it is of that input, row by row.

    Exit code 0, or 1 with what is wrong on stderr. The last line on stdout is one JSON object that sums it up.
    """
    from prefillcli.jobs.verify import verify_job

    _finish(verify_job(output, inputs or (), quiet=quiet))


@app.command(cls=GroupedCommand)
def status(output: _Output, quiet: _Quiet = False) -> None:
    """Tell whether the job of OUTPUT is running, with its rate and expected end, has stopped, or is complete.

    The last line on stdout is one JSON object that says the same; nothing is changed.
    """
    from prefillcli.jobs.status import status_job

    _finish(status_job(output, quiet=quiet))


def _load(kind: type[AnyOptions], recipe: str | None, flags: dict[str, Any]) -> AnyOptions:
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        settings = load_settings(kind, given, recipe=recipe)
    except PrefillError as error:
        log.error(str(error))
        _finish({"status": "failed", "exit_code": error.exit_code, "error": str(error)})
    if isinstance(settings, ModelOptions) and settings.computes_here:
        prepare(settings.threads)
        prepare_allocator()
    return settings


def _finish(summary: dict[str, Any]) -> NoReturn:
    # End with the run's summary as the last line on stdout and its exit code.
    stop_no_more()
    _print_summary(summary)
    raise _Finished(summary["exit_code"], stopped=summary.get("status") == "interrupted")


def _print_summary(summary: dict[str, Any]) -> None:
    print(json.dumps(shown(summary), separators=(",", ":"), allow_nan=False), flush=True)
