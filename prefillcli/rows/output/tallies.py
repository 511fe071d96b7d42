"""Counts of an output: scored rows, the reasons why others were not scored, histograms, and single rows.

A tally is small however many rows it counts, and two tallies add up to the tally of both. So every part has its own,
and a resumed job adds up those that it finds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.rows.output.columns import ROW, TAKEN_OVER
from prefillcli.rows.records import SKIPPED_CODES, ErrorCode
from prefillcli.rows.values import text_of, to_python
from prefillcli.stats.arrays import Float64Array

SCORE_BINS = 50  # bins of equal width from 0 to 1
# Lower edges of the bins of prompt lengths in tokens: whole numbers, up to 16 an octave; the last bin is open.
LENGTH_EDGES = tuple(sorted({round(2 ** (step / 16)) for step in range(24 * 16 + 1)}))
TO_THE_END = "full"  # the name of rows that went through all layers, among those by exit layer
MOST = 20  # rows of each kind that are named
LEAST_SURE = 10  # rows that are named for each question
CLOSE_ODDS = 3.0  # odds between the two likeliest answers, up to which a call is a close one
_LONGEST = 200  # characters of an id or a detail


class LayerRows(NamedTuple):
    """Rows that went through the same number of layers, and the tokens of their prompts."""

    rows: int
    prompt_tokens: int


class OrderRows(NamedTuple):
    """Rows that were asked a question with its two values in both orders, and those whose prediction the order
    decided."""

    rows: int
    decided: int


@dataclass
class RationaleTally:
    """The rows that are written about, and their tokens."""

    tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)  # rows by the reason why their text ends
    sources: dict[str, int] = field(default_factory=dict)  # rows by the source of their text

    @property
    def rows(self) -> int:
        return sum(self.finish_reasons.values())


class MeanTally(NamedTuple):
    """The rows that have a mean of ordered labels, and the sum of their means."""

    rows: int
    total: float


@dataclass
class LikelihoodTally:
    """The texts whose likelihood is asked for."""

    logprob: float = 0.0  # of all together
    tokens: int = 0
    bytes: int = 0
    words: int = 0
    greedy: int = 0  # texts that greedy decoding would write


@dataclass
class AnswerTally:
    """The answers to a question, or the labels of a job's rows."""

    answers: dict[str, int] = field(default_factory=dict)  # rows by their answer
    mass_rows: int = 0  # rows with a label mass
    mass: float = 0.0  # their label masses together
    close: int = 0  # rows whose two likeliest answers differ in odds by a factor of `CLOSE_ODDS` at most
    # The rows whose answer is the least probable, the least first: row, id, answer, probability.
    least_sure: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.least_sure = sorted(self.least_sure, key=lambda row: (row["probability"], row["row"] or 0))[:LEAST_SURE]

    @classmethod
    def of_rows(
        cls,
        rows: pa.Table,
        shares: Float64Array,
        labels: Sequence[str],
        mass: str | None,
        id_name: str | None,
        json_id: bool,
    ) -> AnswerTally:
        """Return the tally of rows with the probability of each label [rows, labels], NaN where there is no answer.
        `mass` is the column with their label mass, if they have one."""
        known = np.flatnonzero(~np.isnan(shares).any(axis=1))
        told = shares[known]
        best, sure = told.argmax(axis=1), told.max(axis=1, initial=0.0)
        order = np.argsort(sure, kind="stable")[:LEAST_SURE]
        few = rows.take(pa.array(known[order]))
        few = few.append_column("__answer", pa.array([labels[at] for at in best[order]], pa.string()))
        few = few.append_column("__probability", pa.array(sure[order], pa.float64()))
        masses = [] if mass is None else rows[mass].drop_null()
        second = np.partition(told, -2, axis=1)[:, -2] if len(known) else sure
        counts = np.bincount(best, minlength=len(labels)).tolist()
        return cls(
            {label: count for label, count in zip(labels, counts, strict=True) if count},
            len(masses),
            pc.sum(masses).as_py() if len(masses) else 0.0,
            int((sure <= CLOSE_ODDS * second).sum()),
            _named(few, id_name, json_id, {"answer": "__answer", "probability": "__probability"}),
        )


@dataclass
class Tallies:
    """Numbers and texts only, so that they survive JSON unchanged."""

    # By prediction, rows in each of the `SCORE_BINS`.
    scores: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # By kind (scored, truncated, error), rows in each bin that has any, under its lower edge.
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    methods: dict[str, int] = field(default_factory=dict)  # scored rows by method
    # By question, answers by the layers they went through, or `TO_THE_END`; empty for an output without exits.
    exit_layers: dict[str, dict[str, LayerRows]] = field(default_factory=dict)
    # Scored rows by adapter, those without one under an empty name; empty for an output without such a column.
    adapters: dict[str, int] = field(default_factory=dict)
    # The texts that were written; empty for an output without rationales.
    rationales: RationaleTally = field(default_factory=RationaleTally)
    evidence: int = 0  # rows whose sections were weighed
    # The texts whose likelihood is asked for; empty for an output with labels.
    likelihood: LikelihoodTally = field(default_factory=LikelihoodTally)
    means: dict[str, MeanTally] = field(default_factory=dict)  # by column
    orders: dict[str, OrderRows] = field(default_factory=dict)  # by question that is asked in both orders
    # By question, the answers; one without a name is called `ANSWER`.
    answers: dict[str, AnswerTally] = field(default_factory=dict)
    mass_rows: int = 0  # scored rows with a label mass
    mass_sum: float = 0.0  # their label masses together
    # Slowest first: row, id, seconds, prompt_tokens, computed_tokens, method.
    slowest: list[dict[str, Any]] = field(default_factory=list)
    # Error rows in the order of the input, some of every code: row, id, code, detail.
    failed: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # However many tallies were added up, few rows are named.
        self.slowest = sorted(self.slowest, key=lambda row: (-row["seconds"], row["row"] or 0))[:MOST]
        self.failed = _of_every_code(self.failed)

    @property
    def chosen_rows(self) -> int:
        """Rows that were chosen to be written about or to have their sections weighed."""
        return max(self.rationales.rows, self.evidence)

    @property
    def mean_label_mass(self) -> float | None:
        """The mean over the scored rows that have a label mass; None without any."""
        return self.mass_sum / self.mass_rows if self.mass_rows else None

    @classmethod
    def of_rows(
        cls,
        rows: pa.Table,
        id_name: str | None = None,
        *,
        json_id: bool = False,
        means: Sequence[str] = (),
        first: str = "",
    ) -> Tallies:
        """Return the tallies of output rows. `id_name` is the column with their ids, `json_id` whether it holds JSON,
        and `means` are the columns with means of ordered labels. With `first` begin the columns of the question whose
        score a row has.

        Rows of an output have no row number where they have an id; it is None then.
        """
        names, scored = rows.column_names, rows.filter(pc.is_valid(rows["score"]))
        found = cls(
            scores=_score_bins(rows, f"{first}prediction"),
            lengths=_length_bins(rows),
            methods=_counted(rows["method"]),
            slowest=_slowest(rows, id_name, json_id),
            failed=_failed(rows, id_name, json_id),
        )
        for name in means:
            numbers = rows[name].drop_null()
            found.means[name] = MeanTally(len(numbers), pc.sum(numbers).as_py() or 0.0)
        if (mass := f"{first}label_mass") in names:
            masses = rows[mass].drop_null()
            found.mass_rows, found.mass_sum = len(masses), pc.sum(masses).as_py() or 0.0
        if "adapter" in names:
            found.adapters = _counted(pc.fill_null(scored["adapter"], ""))
        if (reason := f"{first}finish_reason") in names:
            tokens = pc.sum(rows[f"{first}rationale_tokens"]).as_py() or 0
            reasons, sources = _counted(rows[reason]), _counted(rows[f"{first}rationale_source"])
            found.rationales = RationaleTally(tokens, reasons, sources)
        if "target_tokens" in names:
            summed = ("logprob", "target_tokens", "target_bytes", "target_words", "greedy")
            found.likelihood = LikelihoodTally(*(pc.sum(scored[name]).as_py() or 0 for name in summed))
        if (evidence := f"{first}evidence") in names:
            found.evidence = len(rows) - rows[evidence].null_count
        return found


def summed(mine: Any, other: Any) -> Any:
    """Return the sum of both: records, dicts and tuples are added entry by entry; lists are joined."""
    if is_dataclass(mine) and not isinstance(mine, type):
        added = {each.name: summed(getattr(mine, each.name), getattr(other, each.name)) for each in fields(mine)}
        return replace(mine, **added)
    if isinstance(mine, dict):
        return mine | {name: summed(mine[name], found) if name in mine else found for name, found in other.items()}
    if isinstance(mine, tuple):
        places = map(summed, mine, other)
        return mine._make(places) if hasattr(mine, "_make") else tuple(places)
    return mine + other


def _counted(column: pa.ChunkedArray) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column.drop_null()).to_pylist()}


def exit_layers_of(scored: pa.Table, prefix: str) -> dict[str, LayerRows]:
    """Return the scored rows by the layer that they left after; with `prefix` begin the columns of the question."""
    columns = scored.select([f"{prefix}exit_layer", "prompt_tokens"]).rename_columns(["layer", "prompt_tokens"])
    groups = columns.group_by("layer").aggregate([([], "count_all"), ("prompt_tokens", "sum")]).to_pylist()
    return {
        TO_THE_END if group["layer"] is None else str(group["layer"]): LayerRows(
            group["count_all"], group["prompt_tokens_sum"] or 0
        )
        for group in sorted(groups, key=lambda group: (group["layer"] is None, group["layer"]))
    }


def _score_bins(rows: pa.Table, prediction: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    if prediction not in rows.column_names or pa.types.is_integer(rows.schema.field(prediction).type):
        return found  # rows with their own choices, or without labels
    for name in _counted(rows[prediction]):
        if f"value_{name}" in rows.column_names:
            continue  # values need not lie between 0 and 1
        scores = rows["score"].filter(pc.equal(rows[prediction], name)).to_numpy()
        found[name] = tuple(np.histogram(scores, SCORE_BINS, (0, 1))[0].tolist())
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
    ids = [None] * len(few) if id_name is None else shown_ids(few[id_name], json_id)
    values = [few[there].to_pylist() for there in columns.values()]
    found = []
    for row, own, *rest in zip(numbers, ids, *values, strict=True):
        pairs = zip(columns, (_short(each) if isinstance(each, str) else each for each in rest), strict=True)
        found.append({"row": row, "id": own if own is None else _short(own), **dict(pairs)})
    return found


def shown_ids(ids: pa.ChunkedArray, json_id: bool) -> list[str | None]:
    """Return ids as a report names rows, None for null; with `json_id` they are JSON text."""
    if json_id:  # anything but a string reads best as it is written
        return [None if own is None else text_of(own) for own in ids.to_pylist()]
    try:
        texts: list[str | None] = ids.cast(pa.string()).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # binary, nested
        texts = [None if own is None else str(own) for own in to_python(ids)]
    return texts


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# The row's score, its score from the whole prompt, whether the prediction differs, and the right answer as in the
# input.
Audited = tuple[float, float, bool, str | int | float | bool | None]
_PLAIN = (str, int, float, bool)


def audited_of(rows: pa.Table, prefix: str, truth: str | None = None, json_carried: bool = False) -> list[Audited]:
    """Return the rows of the audit; with `prefix` begin the columns of the question."""
    audited = rows.filter(pc.is_valid(rows[f"{prefix}audit_score"]))
    answers = to_python(audited[truth]) if truth is not None else [None] * len(audited)
    flips = pc.not_equal(audited[f"{prefix}prediction"], audited[f"{prefix}audit_prediction"])
    columns = (audited[f"{prefix}score"], audited[f"{prefix}audit_score"], flips)
    found: list[Audited] = []
    for *numbers, answer in zip(*(each.to_pylist() for each in columns), answers, strict=True):
        known = json.loads(answer) if json_carried and answer is not None else answer
        found.append((*numbers, known if isinstance(known, _PLAIN) else None))
    return found


class AuditedExits(NamedTuple):
    """Audited rows whose whole prompts get the same label: their number, and how many left early and flipped by
    that."""

    rows: int
    left: int
    flips: int


def audited_exits_of(rows: pa.Table, prefix: str) -> dict[str, AuditedExits]:
    """Count the rows of the audit by the label that they have in full; with `prefix` begin the columns of the
    question."""
    audited = rows.filter(pc.is_valid(rows[f"{prefix}audit_score"]))
    left = pc.is_valid(audited[f"{prefix}exit_layer"]).to_pylist()
    labels = audited[f"{prefix}audit_prediction"].to_pylist()
    found: dict[str, AuditedExits] = {}
    for label, gone, (_, _, flipped, _) in zip(labels, left, audited_of(rows, prefix), strict=True):
        found = summed(found, {label: AuditedExits(1, int(gone), int(gone and flipped))})
    return found


@dataclass
class Counts:
    """Numbers of output rows: `total` = `scored` + `errors` + `skipped` + `empty`."""

    total: int = 0
    scored: int = 0
    errors: int = 0
    skipped: int = 0  # rows left out for their length, as the user asked; not errors
    empty: int = 0  # rows without text, which are no errors either
    errors_by_code: dict[str, int] = field(default_factory=dict)
    score_sum: float = 0.0
    # Rows of `scored` whose results are those of an earlier output, as far as that is known.
    taken_over: int = 0
    # By question, compressed rows that were read in full as well; in a job with exits, all rows of the audit.
    audits: dict[str, list[Audited]] = field(default_factory=dict)
    # By question, rows of the audit by the label that they have in full; empty for an output without exits.
    audited_exits: dict[str, dict[str, AuditedExits]] = field(default_factory=dict)
    tallies: Tallies = field(default_factory=Tallies)

    @property
    def mean_score(self) -> float | None:
        """Mean over the scored rows."""
        return self.score_sum / self.scored if self.scored else None

    def add_rows(
        self,
        rows: pa.Table,
        *,
        id_name: str | None = None,
        json_carried: bool = False,
        means: Sequence[str] = (),
        first: str = "",
    ) -> None:
        """Count output rows by their columns `error` and `score`, and tally them.

        `id_name` is the carried column with the id, `json_carried` whether it holds JSON. `means` and `first` are as
        for `Tallies.of_rows`.
        """
        codes = _counted(rows["error"])
        scored, score_sum = len(rows) - rows["score"].null_count, pc.sum(rows["score"]).as_py() or 0.0
        found = Counts(len(rows), scored, score_sum=score_sum)
        found.skipped, found.empty = codes.pop(ErrorCode.SKIPPED_TOO_LONG, 0), codes.pop(ErrorCode.SKIPPED_EMPTY, 0)
        found.errors, found.errors_by_code = sum(codes.values()), codes
        found.tallies = Tallies.of_rows(rows, id_name, json_id=json_carried, means=means, first=first)
        if TAKEN_OVER in rows.column_names:
            found.taken_over = pc.sum(rows[TAKEN_OVER]).as_py() or 0
        self.add(found)

    def add(self, other: Counts) -> None:
        """Add the rows that `other` counted."""
        vars(self).update(vars(summed(self, other)))
