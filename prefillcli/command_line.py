"""The beginning and end of a command: its command line and help page, made of its settings, and its last line on
stdout."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from prefillcli.errors import Interrupted, PrefillError, shown
from prefillcli.options.commands import COMMANDS
from prefillcli.options.groups import PIPE
from prefillcli.options.load import load_settings, rare_options
from prefillcli.options.option import PANELS, RUN, STEPS, Settings, details_of, unescaped
from prefillcli.options.settings import ModelSettings
from prefillcli.runtime import log
from prefillcli.runtime.cores import prepare
from prefillcli.runtime.extras import quiet_imports
from prefillcli.runtime.log import survive_closed_streams
from prefillcli.runtime.memory import prepare_allocator
from prefillcli.runtime.signals import end_process, stop_before_the_job, stop_no_more

AnyOptions = TypeVar("AnyOptions", bound=Settings)
MOST_OPTIONS = 20  # on a help page
MOST_ON_TERMINAL = 2000  # characters of the last line on stdout
TEXT = r" \n is a line break, \t a tab."  # in the help of options with text of prompts
SET, HELP_ALL = "set", "help_all"  # parameters of commands that are no fields of their settings


# The command line of a command, made from its settings.


def parameters_of(settings: type[Settings]) -> list[inspect.Parameter]:
    """Return the argument that is given by its place, an option for each other field of `settings` that has a flag,
    and `--recipe`, `--set` and `--help-all`.

    None stands for "not given".
    """
    place = settings.given_by_place()
    recipe = typer.Option("--recipe", metavar="FILE", help="YAML with options by name.", rich_help_panel=RUN)
    chosen = typer.Option(
        "--set", metavar="NAME=VALUE", help="A rare option, see below; repeatable.", rich_help_panel=RUN
    )
    whole = typer.Option(
        "--help-all", help="Show all options.", rich_help_panel=RUN, is_eager=True, callback=_show_all
    )
    return [
        *([] if place is None else [_argument(settings, place)]),
        *(_option(settings, name) for name in settings.of_level("first", "more")),
        _parameter("recipe", str, recipe),
        *([_parameter(SET, list[str], chosen)] if settings.of_level("rare") else []),
        *([_parameter(HELP_ALL, bool, whole)] if is_long(settings) else []),
    ]


def is_long(settings: type[Settings]) -> bool:
    """Return whether a help page with all options would be too long to be read."""
    return len(settings.options()) > MOST_OPTIONS


def _show_all(context: typer.Context, asked: bool | None) -> None:
    if asked:
        context.meta[HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _argument(settings: type[Settings], name: str) -> inspect.Parameter:
    field = settings.options()[name]
    kind: Any = str if field.annotation is str else list[str]
    metavar = "INPUT" if name == "inputs" else name.upper()
    return _parameter(name, kind, typer.Argument(metavar=metavar, help=field.description))


def _option(settings: type[Settings], name: str) -> inspect.Parameter:
    field, details = settings.options()[name], details_of(settings, name)
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
    if details.short:
        names.append(details.short)
    option = typer.Option(
        *names,
        help=option_help(settings, name),
        rich_help_panel=details.panel,
        metavar=metavar,
        show_default=False,
        autocompletion=(lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None,
    )
    return _parameter(name, kind, option)


def option_help(settings: type[Settings], name: str) -> str:
    """Return the help text of an option, with its default."""
    field = settings.options()[name]
    help = field.description or ""
    if details_of(settings, name).text:
        help += TEXT
    if "(default" not in help and field.default not in (None, False, "", (), {}):
        default = field.default if not isinstance(field.default, tuple) else ", ".join(map(str, field.default))
        help += f" (default: {default})"
    return help


def _parameter(name: str, kind: Any, shown: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
    )


# The help page of a command: its options in groups, as plain text.
#
# Typer's own pages for rich terminals take as long to import and to draw as all the rest of a help page.


_NO_BREAK = "\N{NON-BREAKING HYPHEN}"  # lines are not broken at it, as they are at the hyphens of --keep-columns


class GroupedCommand(TyperCommand):
    """A command whose help page shows each option under the name of its panel: the first ones, or all of them."""

    settings: type[Settings] = Settings

    @classmethod
    def of(cls, settings: type[Settings]) -> type[GroupedCommand]:
        """Return a kind of command that takes these settings."""
        return type(cls.__name__, (cls,), {"settings": settings})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the words of the command line. An error explains how to give an option that has no flag, and names
        the commands that have an option which this one lacks."""
        own = {flag for param in self.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)}
        for word in (word for word in args if word.startswith("--")):
            flag = word.partition("=")[0]
            name = flag.removeprefix("--").replace("-", "_")
            if name in self.settings.of_level("rare"):
                ctx.fail(f"{word}: this option has no flag, give --set {name}=VALUE")
            others = [f"prefill {other}" for other, kind in COMMANDS.items() if name in kind.options()]
            if others and flag not in own:
                ctx.fail(f"{flag}: an option of {' and '.join(others)}, not of prefill {self.name}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options to the page: arguments first, then the options panel by panel."""
        short = is_long(self.settings) and HELP_ALL not in ctx.meta
        left_out = {SET, *self.settings.of_level("more")} if short else set()
        titles = {panel: step if short else panel for step, panels in STEPS.items() for panel in panels}
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{titles[panel]: [] for panel in PANELS}}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None and each.name not in left_out:
                names, help = record[0].partition(" <")[0], record[1]  # without the type that typer adds to arguments
                kind = "Arguments" if isinstance(each, TyperArgument) else RUN
                panel = getattr(each, "rich_help_panel", None) or kind
                rows = groups[titles.get(panel, panel)]
                rows.append((names, help.replace("-", _NO_BREAK)))
        rare = self.settings.of_level("rare")
        if left_out:
            more = len(left_out & set(self.settings.options()))
            all_options = f"prefill {self.name} --help-all".replace("-", _NO_BREAK)
            groups[f"{more} more options, and {len(rare)} rare ones"] = [(all_options, "")]
        elif rare:
            rows = [(f"{name}=", option_help(self.settings, name).replace("-", _NO_BREAK)) for name in rare]
            groups["Rare options, which have no flag (--set NAME=VALUE)"] = rows
        for name, rows in ((name, rows) for name, rows in groups.items() if rows):
            with formatter.section(name):
                formatter.write_dl(rows)

    def get_help(self, ctx: Any) -> str:
        """Return the page."""
        return super().get_help(ctx).replace(_NO_BREAK, "-")


# What makes a command: it returns the function that typer takes its options from, and the kind of command.
Maker = Callable[[], tuple[Callable[..., Any], type[GroupedCommand]]]


class Commands(TyperGroup):
    """The commands of the program by name, each made when it is asked for: making all of them takes longer than the
    rest of a help page."""

    makers: ClassVar[dict[str, Maker]] = {}
    said: ClassVar[dict[str, str]] = {}  # the first line of each command's help

    @classmethod
    def add(cls, name: str, help: str | None, make: Maker) -> None:
        """Add a command with this docstring."""
        cls.said[name], cls.makers[name] = (help or "").strip().partition("\n")[0], make

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.commands = cast("Any", _Made())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order in which they were added."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first line of each command's help to the page."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.said.items()))


class _Made(Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        return _made(name)

    def __iter__(self) -> Iterator[str]:
        return iter(Commands.makers)

    def __len__(self) -> int:
        return len(Commands.makers)


@cache
def _made(name: str) -> Any:
    function, kind = Commands.makers[name]()
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=kind)(function)
    return typer.main.get_command(alone)


def run(app: Callable[[], Any]) -> None:
    """Run the command that the command line names, and end the process with its exit code."""
    survive_closed_streams()
    stop_before_the_job()
    quiet_imports()
    try:
        app()
    except CommandEnded as end:
        if end.stopped:
            end_process(end.code)
        raise
    except Interrupted as stop:
        log.error(str(stop))
        print_summary({"status": "interrupted", "exit_code": stop.exit_code, "error": str(stop)})
        end_process(stop.exit_code)
    except SystemExit as stop:
        completes = "_PREFILL_COMPLETE" in os.environ  # the shell asks for words that complete the line
        if stop.code and not completes:  # typer has said what is wrong, and no job has printed a summary
            status = "interrupted" if stop.code == 130 else "failed"
            print_summary({"status": status, "exit_code": stop.code, "error": "see stderr"})
        raise


def load_options(kind: type[AnyOptions], recipe: str | None, flags: dict[str, Any]) -> AnyOptions:
    """Return the settings of a command, with this process prepared for them. Ends the command where they are wrong."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    given.pop(HELP_ALL, None)
    given = {name: value if name == SET else unescaped(kind, name, value) for name, value in given.items()}
    try:
        given |= rare_options(kind, given.pop(SET, []))
        settings = load_settings(kind, given, recipe=recipe)
    except PrefillError as error:
        log.error(str(error))
        summary = {"status": "failed", "exit_code": error.exit_code, "error": str(error)}
        piped = PIPE in ([flags["output"]] if flags.get("output") else flags.get("inputs") or ())
        finish(summary | ({"output": PIPE} if piped else {}))
    if isinstance(settings, ModelSettings) and settings.computes_here:
        prepare(settings.lm.threads)
        prepare_allocator()
    return settings


def finish(summary: dict[str, Any]) -> NoReturn:
    """End with the run's summary as the last line on stdout and its exit code."""
    stop_no_more()
    print_summary(summary)
    raise CommandEnded(summary["exit_code"], stopped=summary.get("status") == "interrupted")


def print_summary(summary: dict[str, Any]) -> None:
    """Print the last line on stdout, or on stderr if the scores go to stdout. A long one is for programs: a terminal,
    which has the tables, does not get it."""
    line = json.dumps(shown(summary), separators=(",", ":"), allow_nan=False)
    stream = sys.stderr if summary.get("output") == PIPE and "dry_run" not in summary else sys.stdout
    if len(line) <= MOST_ON_TERMINAL or not stream.isatty():
        print(line, file=stream, flush=True)


class CommandEnded(SystemExit):
    """The end of a command that has printed its summary."""

    def __init__(self, code: int, *, stopped: bool) -> None:
        super().__init__(code)
        self.code: int = code
        self.stopped = stopped  # whether a signal has ended it
