"""What an output says of rows that left before the last layer: their columns, and how they are counted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from prefillcli.data.output.columns import AuditedExits, Counts, LayerRows
from prefillcli.data.output.parts import is_part, read_part
from prefillcli.data.output.sink import Sink, of_schema, to_schema
from prefillcli.data.output.target import Target
from prefillcli.data.prompts.labels import Label
from prefillcli.data.rows import ScoredRow, Window, early_exit_method, left_early, reading_method
from prefillcli.judging.calibration import Calibration, TemperatureScaling
from prefillcli.judging.evaluation import EvaluationPlan, read_scored_truth
from prefillcli.reading.compress.selection import compressed_rows, fallbacks_of_useless_draft
from prefillcli.reading.exits.exits import Exits
from tests.data.outputs import LABELS, make_window, open_sink, read

FULL = np.log(np.array([0.02, 0.01, 0.01]))  # over the vocabulary: Yes
EARLY = np.log(np.array([0.2, 0.7, 0.1]))  # among the labels: No
CALIBRATION = Calibration(labels=LABELS, scaling=TemperatureScaling(temperature=2.0))


def row_of(row: int, *, layer: int | None = None, audit: Any = None) -> ScoredRow:
    """A row that leaves says No; in full it would say Yes."""
    method = "full" if layer is None else early_exit_method("full", layer)
    return ScoredRow(row, FULL if layer is None else EARLY, 0, 5, 5, 0.1, method, audit, layer)


def write_all(sink: Sink, windows: list[Window], rows: dict[int, ScoredRow], **given: Any) -> None:
    """Two rows a part."""
    for window in windows:
        numbers = [prompt.row for prompt in window.prompts if prompt.row not in sink.done(window.index)]
        for at in range(0, len(numbers), 2):
            sink.write(window, [rows[n] for n in numbers[at : at + 2]], {}, temperature=1.0, **given)


def test_a_row_that_left_has_its_layer_and_a_score_but_no_log_probabilities(tmp_path: Path) -> None:
    output = str(tmp_path / "o.parquet")
    window = make_window(0, [0, 1, 2], bad=(2,))
    with open_sink(output, groups=frozenset({"exits", "label_scores", "calibrated"})) as sink:
        write_all(sink, [window], {0: row_of(0), 1: row_of(1, layer=7)}, probabilities=CALIBRATION.probabilities)
        sink.finish(1)
    stayed, gone, failed = read(output)
    assert [each["exit_layer"] for each in (stayed, gone, failed)] == [None, 7, None]
    assert [each["method"] for each in (stayed, gone, failed)] == ["full", "early-exit", None]
    assert stayed["logprob_Yes"] == pytest.approx(FULL[0])
    assert stayed["label_mass"] == pytest.approx(0.04)
    assert [gone[f"logprob_{label}"] for label in LABELS] == [None] * 3
    assert gone["label_mass"] is None
    assert (gone["score"], gone["prediction"]) == (pytest.approx(0.2), "No")
    assert [gone[f"score_{label}"] for label in LABELS] == pytest.approx([0.2, 0.7, 0.1])
    assert [stayed[f"score_{label}"] for label in LABELS] == pytest.approx([0.5, 0.25, 0.25])
    weights = np.sqrt([0.2, 0.7, 0.1])
    assert gone["probability"] == pytest.approx(weights[0] / weights.sum())
    assert failed["score_Yes"] is None


@pytest.mark.parametrize("labels", [2, 3])
def test_without_exits_an_output_has_none_of_their_columns(tmp_path: Path, labels: int) -> None:
    found = []
    for exits in (False, True):
        output = str(tmp_path / f"{exits}.parquet")
        with open_sink(output, labels=LABELS[:labels], groups=frozenset(Exits.columns if exits else ())) as sink:
            own = ScoredRow(0, FULL[:labels], 0, 1, 1, 0.1)
            sink.write(make_window(0, [0]), [own], {}, temperature=1.0)
            sink.finish(1)
        found.append(set(read(output)[0]))
    assert found[1] - found[0] == {"exit_layer"} | ({f"score_{label}" for label in LABELS} if labels == 3 else set())
    assert found[0] < found[1]


def test_rows_and_tokens_are_counted_by_layer_over_parts_and_attempts(tmp_path: Path) -> None:
    output = str(tmp_path / "o.parquet")
    windows = [make_window(0, list(range(7)), bad=(3,)), make_window(1, list(range(7, 12)))]
    rows = {row: row_of(row, layer={0: None, 1: 4, 2: 11}[row % 3]) for row in range(12)}
    wanted: dict[str, list[int]] = {}
    for window in windows:
        for prompt in window.prompts:
            name = {0: "full", 1: "4", 2: "11"}[prompt.row % 3]
            before = wanted.get(name, [0, 0])
            wanted[name] = [before[0] + 1, before[1] + len(prompt.tokens)]
    with open_sink(output, groups=frozenset({"exits"})) as sink:
        write_all(sink, windows[:1], rows)
    # Counts of the first attempt come from its parts.
    with open_sink(output, groups=frozenset({"exits"}), resume=True) as sink:
        write_all(sink, windows, rows)
        assert sink.counts.tallies.exit_layers == {name: tuple(found) for name, found in wanted.items()}
        sink.finish(2)
    with open_sink(output, groups=frozenset({"exits"}), resume=True) as sink:  # and then from the manifest
        assert sink.counts.tallies.exit_layers == {name: LayerRows(*found) for name, found in wanted.items()}


def test_flips_of_the_audit_are_counted_by_the_label_of_the_full_read(tmp_path: Path) -> None:
    """Whichever part and attempt a row is of, and whether or not it would have left."""
    output = str(tmp_path / "o.parquet")
    window = make_window(0, list(range(8)))
    no = np.log(np.array([0.01, 0.02, 0.01]))
    rows = {
        0: row_of(0, layer=4, audit=FULL),  # No instead of Yes
        1: row_of(1, audit=FULL),
        2: row_of(2, layer=4, audit=no),  # No as in full
        3: row_of(3, layer=9),
        4: row_of(4, layer=9, audit=FULL),
        5: row_of(5),
        6: row_of(6, layer=9, audit=no),
        7: row_of(7, layer=9, audit=no),
    }
    wanted = {"Yes": AuditedExits(rows=3, left=2, flips=2), "No": AuditedExits(rows=3, left=3, flips=0)}
    with open_sink(output, groups=frozenset({"audit", "exits"})) as sink:
        for row in (0, 1, 2):
            sink.write(window, [rows[row]], {}, temperature=1.0)
        assert sink.counts.audited_exits == {"Yes": AuditedExits(2, 1, 1), "No": AuditedExits(1, 1, 0)}
    with open_sink(output, groups=frozenset({"audit", "exits"}), resume=True) as sink:
        write_all(sink, [window], rows)
        assert sink.counts.audited_exits == wanted
        sink.finish(1)
        assert sink.counts.audited_exits == wanted
        assert len(sink.counts.audited) == 6
    assert [each["audit_prediction"] for each in read(output)[:4]] == ["Yes", "Yes", "No", None]


def test_counts_of_older_parts_are_read_and_new_ones_come_back_from_json(tmp_path: Path) -> None:
    with open_sink(tmp_path / "o.parquet", groups=frozenset({"audit", "exits"})) as sink:
        sink.write(make_window(0, [0, 1]), [row_of(0, layer=4, audit=FULL), row_of(1)], {}, temperature=1.0)
        (name,) = filter(is_part, sink.work.names())
        counts = read_part(sink.work, name)[0].counts
    content = json.loads(json.dumps(asdict(counts)))
    assert TypeAdapter(Counts).validate_python(content) == counts
    assert counts.tallies.exit_layers == {"4": LayerRows(1, 1), "full": LayerRows(1, 2)}
    del content["audited_exits"], content["tallies"]["exit_layers"]
    older = TypeAdapter(Counts).validate_python(content)
    assert (older.audited_exits, older.tallies.exit_layers) == ({}, {})
    older.add(counts)
    assert (older.audited_exits, older.tallies.exit_layers) == (counts.audited_exits, counts.tallies.exit_layers)


def test_an_evaluation_of_several_labels_has_the_rows_that_left(tmp_path: Path) -> None:
    target = Target.parse(str(tmp_path / "o.parquet"))
    carried = pa.schema([("id", pa.string()), ("kept", pa.int64())])
    with open_sink(target.path, groups=frozenset(Exits.columns), carried=carried) as sink:
        sink.write(make_window(0, [1, 2]), [row_of(1), row_of(2, layer=3)], {}, temperature=1.0)
        sink.finish(1)
    labels = tuple(Label(name, (str(10 + 10 * number),)) for number, name in enumerate(LABELS))
    found = read_scored_truth(target, EvaluationPlan("kept", labels, 1.0, None, calibrated=False, told=True))
    np.testing.assert_allclose(found.probabilities, [[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]])


def test_a_shard_remembers_that_its_rows_may_leave(tmp_path: Path) -> None:
    for exits in (False, True):
        with open_sink(tmp_path / f"{exits}.parquet", groups=frozenset({"exits"} if exits else ())) as sink:
            schema = sink.schema
            assert to_schema(of_schema(schema), json_text=schema.json_text) == schema
            assert of_schema(schema).get("exits", False) is exits


@pytest.mark.parametrize("reading", ["full", "specprefill", "fallback:draft_memory", "random"])
def test_a_method_says_how_a_row_was_read_and_whether_it_left(reading: str) -> None:
    method = early_exit_method(reading, 3)
    assert method == ("early-exit" if reading == "full" else f"{reading}+early-exit")
    assert reading_method(method) == reading_method(reading) == reading
    assert left_early(method)
    assert not left_early(reading)


def test_a_row_that_left_is_compressed_or_not_as_any_other() -> None:
    assert compressed_rows({"early-exit": 5, "full": 2, "specprefill+early-exit": 3, "specprefill": 4}) == 7
    useless = {"fallback:draft_error+early-exit": 2, "fallback:draft_error": 1, "early-exit": 9}
    assert fallbacks_of_useless_draft(useless) == {"fallback:draft_error": 3}
