"""The help page of a command: its options in groups, as plain text.

Typer's own pages for rich terminals take as long to import and to draw as all the rest of a help page.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand

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
