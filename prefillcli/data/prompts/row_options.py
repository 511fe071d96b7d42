"""Options that a row sets for itself: how it is compressed, and by which adapter it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prefillcli.data.rows import ErrorCode, Prompt, RowBatch, RowError

COMPRESSION_COLUMNS = ("keep", "specprefill")


def with_compression(prompts: list[Prompt], batch: RowBatch, errors: dict[int, RowError]) -> list[Prompt]:
    """The prompts with what their rows say of compression; a row that says something else becomes an error."""
    keeps, choices = batch.columns.get("keep"), batch.columns.get("specprefill")
    place = {row: at for at, row in enumerate(batch.rows.tolist())}
    done = []
    for prompt in prompts:
        at = place[prompt.row]
        keep = None if keeps is None else keeps[at]
        choice = None if choices is None else choices[at]
        if isinstance(keep, float) and math.isnan(keep):
            keep = None
        if keep is not None and (type(keep) not in (int, float) or not 0 < keep <= 1):
            errors[prompt.row] = RowError(
                ErrorCode.INVALID_KEEP, f"keep is {keep!r}: it must be a rate above 0 and up to 1"
            )
        elif choice is not None and type(choice) is not bool:
            errors[prompt.row] = RowError(
                ErrorCode.INVALID_KEEP, f"specprefill is {choice!r}: it must be true, false or null"
            )
        else:
            prompt.keep, prompt.specprefill = keep, choice
            done.append(prompt)
    return done


def with_adapters(
    prompts: list[Prompt], batch: RowBatch, errors: dict[int, RowError], column: str, names: Sequence[str]
) -> list[Prompt]:
    """The prompts with the adapters that a column of their rows names; a row that names another becomes an error.

    A row without a value, or with an empty one, has no adapter.
    """
    values = batch.columns.get(column)
    if values is None:
        return prompts
    place = {row: at for at, row in enumerate(batch.rows.tolist())}
    known = frozenset(names)
    done = []
    for prompt in prompts:
        value = values[place[prompt.row]]
        if value is None or value == "":
            done.append(prompt)
        elif (name := str(value)) in known and type(value) in (str, int):
            prompt.adapter = name
            done.append(prompt)
        else:
            shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
            errors[prompt.row] = RowError(
                ErrorCode.UNKNOWN_ADAPTER, f"{column} is {shown}: --adapter does not give it"
            )
    return done
