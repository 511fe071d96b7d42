"""A few rationales for the report, with the evidence beside them, read from the finished output."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.data.output.columns import ROW_COLUMN, ColumnGroups
from prefillcli.data.output.scored_truth import id_texts
from prefillcli.data.output.target import Target
from prefillcli.report.rationale_use import SectionChange, WrittenRow

MOST_ROWS = 10
_TEXT = ("rationale", "finish_reason", "rationale_source")


def written_rows(output: str, groups: ColumnGroups, id_name: str | None) -> list[WrittenRow]:
    """The first rows of an output with these columns that are written about or weighed, at most `MOST_ROWS`."""
    target = Target.parse(output)
    names = [*(_TEXT if groups.rationales else ()), *(("evidence",) if groups.evidence else ())]
    found: list[WrittenRow] = []
    for table in target.tables([id_name or ROW_COLUMN, "score", "prediction", *names]):
        rows = table.to_pylist()
        chosen = [at for at, row in enumerate(rows) if any(row[name] is not None for name in names)]
        chosen = chosen[: MOST_ROWS - len(found)]
        ids: Sequence[str | None] = [None] * len(chosen)
        if id_name is not None:
            ids = id_texts(table[id_name].take(chosen), json_text=target.file_format.json_text)
        found += [_written(rows[at], own) for at, own in zip(chosen, ids, strict=True)]
        if len(found) == MOST_ROWS:
            break
    return found


def _written(row: dict[str, object], own: str | None) -> WrittenRow:
    evidence = row.get("evidence")
    return WrittenRow.model_validate(
        {
            "row": row.get(ROW_COLUMN) if own is None else None,
            "id": own,
            "score": row["score"],
            "prediction": row["prediction"],
            "rationale": row.get("rationale"),
            "finish_reason": row.get("finish_reason"),
            "source": row.get("rationale_source"),
            "evidence": None if evidence is None else [SectionChange.model_validate(each) for each in evidence],  # type: ignore[attr-defined]
        }
    )
