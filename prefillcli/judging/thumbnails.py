"""Small copies of images on the page of a run, beside the rows that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from prefillcli.core.roles import Judge
from prefillcli.errors import brief, without_secrets
from prefillcli.images.thumbnails import Thumbnail, thumbnails_of
from prefillcli.judging.evaluation import Evaluations
from prefillcli.rows.output.destination import Destination
from prefillcli.rows.values import id_texts
from prefillcli.runtime import log

if TYPE_CHECKING:
    from prefillcli.core.run import Run

MOST_ROWS = 100  # with thumbnails

Name = int | str | None


class Illustrating(Judge):
    """Puts small copies of images beside the rows near the threshold, the least sure and the surest wrong ones.

    These rows are read once more, one by one, when the output is finished. No failure of that fails the run.
    """

    def ended(self, run: Run) -> None:
        if not (run.settings.images.image_column or run.inputs.opened.image_numbers.given):
            return
        with run.clock.phase("evaluate"), run.stop.at_once():
            try:
                run.report.take_thumbnails(dict(_thumbnails(run, _numbers(run))))
            except Exception as error:
                log.warning(f"the page has no small copies of images: {without_secrets(brief(error))}")


def _numbers(run: Run) -> dict[int, Name]:
    """Return the rows to show by their numbers, with the names that they have on the page."""
    numbers: dict[Name, int | None] = {}
    evaluations = run.report.findings.get(Evaluations.key)
    found = evaluations.root.values() if isinstance(evaluations, Evaluations) else ()
    answers = run.sink.counts.tallies.answers.values()
    for row in (row for own in found for row in own.near_threshold):
        numbers[row.row if row.id is None else row.id] = row.row
    for least in (least for own in answers for least in own.least_sure):
        name = least["row"] if least["id"] is None else least["id"]
        numbers[name] = numbers.get(name) or least["row"]
    for row in (row for own in found for row in own.surest_wrong):
        numbers.setdefault(row.row if row.id is None else row.id, row.row)
    few = dict(list(numbers.items())[:MOST_ROWS])
    if unknown := {name for name, number in few.items() if number is None}:
        few |= _by_id(run, unknown)
    return {number: name for name, number in few.items() if number is not None}


def _by_id(run: Run, ids: set[Name]) -> Mapping[Name, int]:
    # The numbers of rows with these ids: an output has the rows that were selected, in their order.
    id_name, rows = run.sink.schema.id_name, 0
    places: dict[Name, int] = {}
    if id_name is None:
        return places
    json_text = Destination.parse(run.sink.location).file_format.json_text
    for table in run.sink.tables([id_name]):
        for at, own in enumerate(id_texts(table[id_name], json_text=json_text), start=rows):
            if own in ids:
                places.setdefault(own, at)
        rows += len(table)
        if len(places) == len(ids):
            break
    chosen = run.inputs.source.selection().chosen
    return places if chosen is None else {name: int(chosen[at]) for name, at in places.items()}


def _thumbnails(run: Run, names: Mapping[int, Name]) -> Iterator[tuple[Name, tuple[Thumbnail, ...]]]:
    if not names:
        return
    source, builder = run.inputs.again()
    try:
        for batch in source.rows(np.array(sorted(names), np.int64)):
            for at, row in enumerate(batch.rows.tolist()):
                prompts, _ = builder.build(batch.only(np.array([at], np.int64)), run.inputs.labels)
                images = next((prompt.images for prompt in prompts if prompt.images), ())
                if images:
                    yield names[row], thumbnails_of([each.image for each in images])
    finally:
        builder.close()
