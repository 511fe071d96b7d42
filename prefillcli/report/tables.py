"""Tables in the terminal. What they show is text, never markup: names come from users' files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: A header, and the rows below it.
TableRows = list[list[str]]

WIDTH = 80
"""Columns of the tables of results, however wide the terminal is."""


def stderr_console(width: int | None = None) -> Console:
    """Where tables go; without a `width`, lines are as long as they are."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=width is None, width=width)


def pairs_table(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and texts."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", min_width=10)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def numbers_table(rows: TableRows, *, text: int = 1, caption: str | None = None) -> Table:
    """A header and rows: `text` columns of text, then columns of numbers, which are aligned to the right."""
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", caption=caption, caption_justify="left"
    )
    for at, name in enumerate(rows[0]):
        table.add_column(Text(name), justify="left" if at < text else "right", no_wrap=at < text)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def print_numbers(console: Console, rows: TableRows) -> None:
    """A table with an empty line behind it."""
    console.print(numbers_table(rows))
    console.print()


def print_explained(console: Console, names: Sequence[str], explained: Mapping[str, str]) -> None:
    """A line for each name that has an explanation."""
    for name in names:
        if name in explained:
            console.print(f"  {name}: {explained[name]}", style="dim")
