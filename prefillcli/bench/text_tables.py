"""The tables of the ways to write texts: for the terminal, and for the page."""

from __future__ import annotations

from collections.abc import Mapping

from prefillcli.bench.measured_range import Range
from prefillcli.bench.text_report import TEXT_METHODS, TextMethodResult, TextResult
from prefillcli.report.rendering import (
    WIDTH,
    TableRows,
    mebibytes,
    print_explained,
    print_numbers,
    stderr_console,
    three_digits,
)


def text_table(result: TextResult) -> TableRows:
    """Header and one row for each way of writing."""
    rows = [["method", "seconds", "speedup", "writing", "speedup", "tokens/s", "passes", "right", "same", "peak MiB"]]
    for each in result.methods:
        rows.append(
            [
                each.method,
                _range(each.seconds),
                _range(each.speedup),
                _range(each.decode_seconds),
                _range(each.decode_speedup),
                *_counts(each, named=True),
            ]
        )
    return rows


def quick_text_table(result: TextResult) -> TableRows:
    """The same with medians alone: as much as fits a terminal."""
    rows = [["method", "all, s", "x", "text, s", "x", "tok/s", "passes", "right", "same", "MiB"]]
    for each in result.methods:
        times = (each.seconds, each.speedup, each.decode_seconds, each.decode_speedup)
        rows.append([each.method, *(three_digits(value.median) for value in times), *_counts(each, named=False)])
    return rows


def _counts(method: TextMethodResult, *, named: bool) -> list[str]:
    return [
        three_digits(method.tokens_per_second),
        "" if method.passes_per_token is None else f"{method.passes_per_token:.2f}",
        _right(method, named=named),
        f"{method.same_texts:,}" + (f" + {method.near_ties:,}" if method.near_ties else ""),
        "" if method.peak_bytes is None else mebibytes(method.peak_bytes),
    ]


TEXT_LEGEND = (
    "seconds of scores and texts, and of the texts alone; speedups over plain; passes: of the model, for a token of a "
    "text; right: guesses that were accepted; same: texts as plain's (+ others where the two best tokens were once "
    "within 1e-4)"
)


def text_headline(result: TextResult) -> str:
    """Name and size in a line."""
    return (
        f"{result.workload}: {result.text_tokens:,} tokens behind {result.rows:,} prompts "
        f"({result.prompt_tokens / result.rows:,.0f} tokens each)"
    )


def print_texts(result: TextResult, machine: Mapping[str, str | int]) -> None:
    """The table of a workload on stderr."""
    console = stderr_console(WIDTH)
    console.print(f"\n{text_headline(result)}", style="bold")
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), style="dim")
    console.print()
    print_numbers(console, quick_text_table(result))
    print_explained(console, [each.method for each in result.methods], TEXT_METHODS)
    console.print(f"  {TEXT_LEGEND}", style="dim")
    for text in result.notes:
        console.print(f"note: {text}")


def _range(value: Range) -> str:
    return f"{three_digits(value.median)} ({three_digits(value.low)}-{three_digits(value.high)})"


def _right(method: TextMethodResult, *, named: bool) -> str:
    """The share of right guesses of each drafter."""
    shares = {name: each.accepted / each.proposed for name, each in method.guesses.items() if each.proposed}
    return " ".join(f"{name} {share:.0%}" if named else f"{share:.0%}" for name, share in shares.items())
