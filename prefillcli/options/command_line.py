"""The command line of a command, made from its settings."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand

from prefillcli.options.option import RUN, Settings, details_of


def parameters_of(settings: type[Settings]) -> list[inspect.Parameter]:
    """What is given by its place, an option for each other field of `settings`, and `--recipe`.

    None stands for "not given".
    """
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
