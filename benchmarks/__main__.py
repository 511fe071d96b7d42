"""`python -m benchmarks`: the layer walk against a plain transformers loop.

Progress goes to stderr, the table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, Row
from benchmarks.console import log


def main(
    model: Annotated[str, typer.Option(help="Size of the random Llama: 25M or 100M.")] = "100M",
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds after the warm-up.")] = 3,
    scale: Annotated[float, typer.Option(help="Shrinks prompts and rows, for a quick look.")] = 1.0,
) -> None:
    """Measure speed, shared work and memory of the walk."""
    rows: list[Row] = []
    for name in dtype or ["float32"]:
        for which in case or list(CASES):
            log(f"{which}, {model}, {name}")
            rows.append(CASES[which](model, getattr(torch, name), rounds, scale))
    table = Table("case", "dtype", "plain loop", "layer walk", "ratio", "goal")
    for row in rows:
        table.add_row(*(str(row[column]) for column in ("case", "dtype", "plain", "walk", "ratio", "goal")))
    Console(width=150).print(table)
    print(json.dumps({"model": model, "threads": torch.get_num_threads(), "rows": rows}, default=str))


if __name__ == "__main__":
    typer.run(main)
