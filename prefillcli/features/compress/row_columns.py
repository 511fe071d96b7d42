"""What rows say of their own compression."""

from __future__ import annotations

import math

from prefillcli.data.prompts.builder import RowColumns
from prefillcli.data.rows import ErrorCode, Prompt, RowBatch, RowError


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


COMPRESSION_COLUMNS = RowColumns(("keep", "specprefill"), with_compression)
