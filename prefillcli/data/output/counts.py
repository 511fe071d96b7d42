"""How many rows were scored, why the others were not, and what the output looks like: histograms and single rows.

A tally is small however many rows it counts, and two of them add up to the tally of both: every part has its own, and
a resumed job adds up those that it finds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.rows import SKIPPED_CODES
from prefillcli.data.values import text_of, to_python

ROW = "__row"  # the row number in a part
DIGEST = "__digest"  # in a part: the digest of a row that has a score (`Prompt.digest`)
TAKEN_OVER = "__taken_over"  # in a part: whether the row's results are those of an earlier output
SCORE_BINS = 50  # bins of equal width from 0 to 1
# Lower edges of the bins of prompt lengths in tokens: whole numbers, up to 16 an octave; the last bin is open.
LENGTH_EDGES = tuple(sorted({round(2 ** (step / 16)) for step in range(24 * 16 + 1)}))
TO_THE_END = "full"  # the name of rows that went through all layers, among those by exit layer
MOST = 20  # rows of each kind that are named
_LONGEST = 200  # characters of an id or a detail


class LayerRows(NamedTuple):
    """Rows that went through the same number of layers, and the tokens of their prompts."""

    rows: int
    prompt_tokens: int


@dataclass
class RationaleTally:
    """The rows that are written about, and their tokens."""

    tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)  # rows by why their text ends
    sources: dict[str, int] = field(default_factory=dict)  # rows by what their text was written from

    @property
    def rows(self) -> int:
        return sum(self.finish_reasons.values())

    def add(self, other: RationaleTally) -> None:
        """Add what `other` tallied."""
        self.tokens += other.tokens
        _add(self.finish_reasons, other.finish_reasons)
        _add(self.sources, other.sources)


@dataclass
class Tallies:
    """Numbers and texts only, so that JSON gives back what it was given."""

    # By prediction, rows in each of the `SCORE_BINS`.
    scores: dict[str, list[int]] = field(default_factory=dict)
    # By kind (scored, truncated, error), rows in each bin that has any, under its lower edge.
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    methods: dict[str, int] = field(default_factory=dict)  # scored rows by method
    # Scored rows by the layers they went through, or `TO_THE_END`; empty for an output without exits.
    exit_layers: dict[str, LayerRows] = field(default_factory=dict)
    # Scored rows by adapter, those without one under an empty name; empty for an output without such a column.
    adapters: dict[str, int] = field(default_factory=dict)
    # What was written; empty for an output without rationales.
    rationales: RationaleTally = field(default_factory=RationaleTally)
    evidence: int = 0  # rows whose sections were weighed
    mass_rows: int = 0  # scored rows with a label mass
    mass_sum: float = 0.0  # their label masses together
    # Slowest first: row, id, seconds, prompt_tokens, computed_tokens, method.
    slowest: list[dict[str, Any]] = field(default_factory=list)
    # Error rows in the order of the input, some of every code: row, id, code, detail.
    failed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def chosen_rows(self) -> int:
        """Rows that were chosen to be written about or to have their sections weighed."""
        return max(self.rationales.rows, self.evidence)

    @property
    def mean_label_mass(self) -> float | None:
        """Of the scored rows that have one; None without any."""
        return self.mass_sum / self.mass_rows if self.mass_rows else None

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Tallies:
        """The tallies that `dataclasses.asdict` and JSON wrote. Raises TypeError for anything else."""
        layers = {name: LayerRows(*found) for name, found in content.get("exit_layers", {}).items()}
        rationales = RationaleTally(**content.get("rationales", {}))
        return cls(**content | {"exit_layers": layers, "rationales": rationales})

    def add_rows(self, rows: pa.Table, id_name: str | None = None, *, json_id: bool = False) -> None:
        """Tally output rows. `id_name` is the column with their ids, `json_id` whether it holds JSON.

        Rows of an output have no row number where they have an id; it is None then.
        """
        masses = rows["label_mass"].drop_null() if "label_mass" in rows.column_names else pa.chunked_array([[]])
        self.add(
            Tallies(
                scores=_score_bins(rows),
                lengths=_length_bins(rows),
                methods=_counted(rows["method"]),
                exit_layers=_exit_layers(rows),
                adapters=_adapters(rows),
                rationales=_rationales(rows),
                evidence=len(rows) - rows["evidence"].null_count if "evidence" in rows.column_names else 0,
                mass_rows=len(masses),
                mass_sum=pc.sum(masses).as_py() or 0.0,
                slowest=_slowest(rows, id_name, json_id),
                failed=_failed(rows, id_name, json_id),
            )
        )

    def add(self, other: Tallies) -> None:
        """Add what `other` tallied."""
        for name, bins in other.scores.items():
            mine = self.scores.get(name, [0] * SCORE_BINS)
            self.scores[name] = [a + b for a, b in zip(mine, bins, strict=True)]
        for kind, found in other.lengths.items():
            _add(self.lengths.setdefault(kind, {}), found)
        _add(self.methods, other.methods)
        _add(self.adapters, other.adapters)
        self.rationales.add(other.rationales)
        self.evidence += other.evidence
        self.mass_rows += other.mass_rows
        self.mass_sum += other.mass_sum
        for name, added in other.exit_layers.items():
            before = self.exit_layers.get(name, LayerRows(0, 0))
            self.exit_layers[name] = LayerRows(*(a + b for a, b in zip(before, added, strict=True)))
        self.slowest = sorted(self.slowest + other.slowest, key=lambda row: (-row["seconds"], row["row"] or 0))[:MOST]
        self.failed = _of_every_code(self.failed + other.failed)


def _add(mine: dict[str, int], other: dict[str, int]) -> None:
    for name, number in other.items():
        mine[name] = mine.get(name, 0) + number


def _counted(column: pa.ChunkedArray) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column.drop_null()).to_pylist()}


def _adapters(rows: pa.Table) -> dict[str, int]:
    if "adapter" not in rows.column_names:
        return {}
    return _counted(pc.fill_null(rows["adapter"].filter(pc.is_valid(rows["score"])), ""))


def _rationales(rows: pa.Table) -> RationaleTally:
    if "finish_reason" not in rows.column_names:
        return RationaleTally()
    tokens = pc.sum(rows["rationale_tokens"]).as_py() or 0
    return RationaleTally(tokens, _counted(rows["finish_reason"]), _counted(rows["rationale_source"]))


def _exit_layers(rows: pa.Table) -> dict[str, LayerRows]:
    if "exit_layer" not in rows.column_names:
        return {}
    scored = rows.filter(pc.is_valid(rows["score"])).select(["exit_layer", "prompt_tokens"])
    groups = scored.group_by("exit_layer").aggregate([([], "count_all"), ("prompt_tokens", "sum")]).to_pylist()
    return {
        TO_THE_END if group["exit_layer"] is None else str(group["exit_layer"]): LayerRows(
            group["count_all"], group["prompt_tokens_sum"] or 0
        )
        for group in sorted(groups, key=lambda group: (group["exit_layer"] is None, group["exit_layer"]))
    }


def _score_bins(rows: pa.Table) -> dict[str, list[int]]:
    found = {}
    for name in _counted(rows["prediction"]):
        if f"value_{name}" in rows.column_names:
            continue  # values are not from 0 to 1
        scores = rows["score"].filter(pc.equal(rows["prediction"], name)).to_numpy()
        found[name] = np.histogram(scores, SCORE_BINS, (0, 1))[0].tolist()
    return found


def _length_bins(rows: pa.Table) -> dict[str, dict[str, int]]:
    scored, truncated = pc.is_valid(rows["score"]), pc.fill_null(rows["truncated"], False)
    kinds = {
        "scored": pc.and_not(scored, truncated),
        "truncated": pc.and_(scored, truncated),
        "error": pc.invert(scored),
    }
    found = {}
    for kind, chosen in kinds.items():
        lengths = rows["prompt_tokens"].filter(chosen).drop_null().to_numpy()
        if len(lengths):
            bins, counts = np.unique(np.searchsorted(LENGTH_EDGES, lengths, "right") - 1, return_counts=True)
            names = [str(LENGTH_EDGES[at]) for at in np.maximum(bins, 0).tolist()]
            found[kind] = dict(zip(names, counts.tolist(), strict=True))
    return found


def _slowest(rows: pa.Table, id_name: str | None, json_id: bool) -> list[dict[str, Any]]:
    seconds = np.nan_to_num(rows["seconds"].cast(pa.float64()).to_numpy(), nan=-1.0)
    order = np.argsort(-seconds, kind="stable")[:MOST]
    return _named(
        rows.take(pa.array(order[seconds[order] >= 0])),
        id_name,
        json_id,
        {name: name for name in ("seconds", "prompt_tokens", "computed_tokens", "method")},
    )


def _failed(rows: pa.Table, id_name: str | None, json_id: bool) -> list[dict[str, Any]]:
    found = rows["error"].combine_chunks()
    chosen: list[int] = []
    for code in _counted(rows["error"]):
        if code not in SKIPPED_CODES:
            chosen += pc.indices_nonzero(pc.fill_null(pc.equal(found, code), False))[:MOST].to_pylist()
    few = rows.take(pa.array(sorted(chosen), pa.int64()))
    return _of_every_code(_named(few, id_name, json_id, {"code": "error", "detail": "error_detail"}))


def _of_every_code(failed: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    # At most `MOST` of the rows, the first ones of each code.
    seen: Counter[str] = Counter()
    ranked = []
    for row in sorted(failed, key=lambda row: row["row"] or 0):
        ranked.append((seen[row["code"]], row))
        seen[row["code"]] += 1
    few = [row for _, row in sorted(ranked, key=lambda pair: pair[0])[:MOST]]
    return sorted(few, key=lambda row: row["row"] or 0)


def _named(few: pa.Table, id_name: str | None, json_id: bool, columns: dict[str, str]) -> list[dict[str, Any]]:
    # Rows with number, id, and values of `columns` (name here: name there); long texts are cut.
    number = ROW if ROW in few.column_names else "row" if id_name is None else None
    numbers = [None] * len(few) if number is None else few[number].to_pylist()
    ids = [None] * len(few) if id_name is None else _texts(few[id_name], json_id)
    values = [few[there].to_pylist() for there in columns.values()]
    found = []
    for row, own, *rest in zip(numbers, ids, *values, strict=True):
        pairs = zip(columns, (_short(each) if isinstance(each, str) else each for each in rest), strict=True)
        found.append({"row": row, "id": own if own is None else _short(own), **dict(pairs)})
    return found


def _texts(ids: pa.ChunkedArray, json_id: bool) -> list[str | None]:
    if json_id:  # anything but a string reads best as it is written
        return [None if own is None else text_of(own) for own in ids.to_pylist()]
    try:
        texts: list[str | None] = ids.cast(pa.string()).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # binary, nested
        texts = [None if own is None else str(own) for own in to_python(ids)]
    return texts


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# The row's score, its score in full, whether the prediction differs, and the right answer as the input has it.
Audited = tuple[float, float, bool, str | int | float | bool | None]
_PLAIN = (str, int, float, bool)


class AuditedExits(NamedTuple):
    """Rows of the audit that have the same label in full: how many there are, have left early, and flipped by that."""

    rows: int
    left: int
    flips: int


@dataclass
class Counts:
    """Numbers of output rows: `total` = `scored` + `errors` + `skipped`."""

    total: int = 0
    scored: int = 0
    errors: int = 0
    skipped: int = 0  # rows left out for their length, as the user asked; not errors
    errors_by_code: dict[str, int] = field(default_factory=dict)
    score_sum: float = 0.0
    # Rows of `scored` whose results are those of an earlier output, as far as that is known.
    taken_over: int = 0
    # Compressed rows that were read in full as well; in a job with exits every row of the audit.
    audited: list[Audited] = field(default_factory=list)
    # Rows of the audit by the label that they have in full; empty for an output without exits.
    audited_exits: dict[str, AuditedExits] = field(default_factory=dict)
    tallies: Tallies = field(default_factory=Tallies)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Counts:
        """The counts that `dataclasses.asdict` and JSON wrote. Raises TypeError for anything else."""
        exits = {label: AuditedExits(*found) for label, found in content.get("audited_exits", {}).items()}
        tallies = Tallies.of_json(content.get("tallies", {}))
        return cls(**content | {"audited_exits": exits, "tallies": tallies})

    @property
    def mean_score(self) -> float | None:
        """Mean over the scored rows."""
        return self.score_sum / self.scored if self.scored else None

    def add_rows(
        self, rows: pa.Table, truth: str | None = None, *, id_name: str | None = None, json_carried: bool = False
    ) -> None:
        """Count output rows by their columns `error` and `score`, tally them, and collect those of the audit.

        `truth` and `id_name` are the carried columns with the right answer and the id, `json_carried` whether they
        hold JSON.
        """
        self.total += len(rows)
        scored = len(rows) - rows["score"].null_count
        self.scored += scored
        self.score_sum += pc.sum(rows["score"]).as_py() or 0.0
        if TAKEN_OVER in rows.column_names:
            self.taken_over += pc.sum(rows[TAKEN_OVER]).as_py() or 0
        for entry in pc.value_counts(rows["error"].drop_null()).to_pylist():
            code, number = entry["values"], entry["counts"]
            if code in SKIPPED_CODES:
                self.skipped += number
            else:
                self.errors += number
                self.errors_by_code[code] = self.errors_by_code.get(code, 0) + number

        self.tallies.add_rows(rows, id_name, json_id=json_carried)
        if "audit_score" in rows.column_names:
            audited = rows.filter(pc.is_valid(rows["audit_score"]))
            answers = to_python(audited[truth]) if truth is not None else [None] * len(audited)
            flips = pc.not_equal(audited["prediction"], audited["audit_prediction"]).to_pylist()
            if "exit_layer" in rows.column_names:
                left = pc.is_valid(audited["exit_layer"]).to_pylist()
                for label, gone, flipped in zip(audited["audit_prediction"].to_pylist(), left, flips, strict=True):
                    self._add_audited(label, AuditedExits(1, gone, gone and flipped))
            scores = zip(audited["score"].to_pylist(), audited["audit_score"].to_pylist(), flips, strict=True)
            for (score, full, flipped), answer in zip(scores, answers, strict=True):
                known = json.loads(answer) if json_carried and answer is not None else answer
                self.audited.append((score, full, flipped, known if isinstance(known, _PLAIN) else None))

    def add(self, other: Counts) -> None:
        """Add the rows that `other` counted."""
        self.total += other.total
        self.scored += other.scored
        self.errors += other.errors
        self.skipped += other.skipped
        self.score_sum += other.score_sum
        self.taken_over += other.taken_over
        self.audited += other.audited
        for label, found in other.audited_exits.items():
            self._add_audited(label, found)
        for code, number in other.errors_by_code.items():
            self.errors_by_code[code] = self.errors_by_code.get(code, 0) + number
        self.tallies.add(other.tallies)

    def _add_audited(self, label: str, found: AuditedExits) -> None:
        before = self.audited_exits.get(label, AuditedExits(0, 0, 0))
        self.audited_exits[label] = AuditedExits(*(a + b for a, b in zip(before, found, strict=True)))
