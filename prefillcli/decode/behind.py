"""Texts behind the reads of a kept pack, in groups of rows that fit together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prefillcli.decode.continuations import Beginning, Continuation, DecodingReport, Writing
from prefillcli.decode.contracts import Drafter
from prefillcli.decode.forward import KeptForward
from prefillcli.decode.kept_pack import KeptPack
from prefillcli.decode.lockstep import write_texts
from prefillcli.prefill.walk import LayerWalk, Tick

MakeDrafter = Callable[[KeptForward], Drafter | None]
"""What guesses tokens for the rows of a forward, if anything does."""


def write_behind(
    walk: LayerWalk,
    kept: KeptPack,
    rows: Sequence[tuple[int, Beginning]],
    writing: Writing,
    *,
    longest: int | None = None,
    most_tokens: int | None = None,
    make_drafter: MakeDrafter = lambda forward: None,
    tick: Tick = lambda tokens: None,
    report: DecodingReport | None = None,
) -> list[Continuation]:
    """What the model writes behind reads of the pack that `kept` has walked: one text for each of the rows, which are
    given as (number of the read, beginning).

    No text goes beyond the `longest` places of the model. Rows are written together whose prompts and texts have
    `most_tokens` tokens at most, or a single row. `tick` is called after each layer of a pass and may raise to stop.
    What writing takes is added to the `report`.
    """
    report = report if report is not None else DecodingReport()
    begun = time.monotonic()
    found: dict[int, Continuation] = {}
    for group in _groups(kept, rows, writing, most_tokens):
        forward = KeptForward(walk, kept.select([rows[number][0] for number in group]), tick)
        texts = write_texts(
            forward,
            [rows[number][1] for number in group],
            writing,
            longest=longest,
            drafter=make_drafter(forward),
            report=report,
        )
        found |= dict(zip(group, texts, strict=True))
    report.seconds += time.monotonic() - begun
    return [found[number] for number in range(len(rows))]


def _groups(
    kept: KeptPack, rows: Sequence[tuple[int, Beginning]], writing: Writing, most: int | None
) -> Iterator[list[int]]:
    """Rows by number, those that share a prefix side by side."""
    group: list[int] = []
    nodes: dict[int, int] = {}
    own = 0
    for number in sorted(range(len(rows)), key=lambda number: kept.end_of(rows[number][0])):
        read, beginning = rows[number]
        text = len(beginning.tokens) + writing.tokens + writing.speculation.tokens
        together = nodes | kept.parts_of(read)
        if group and most is not None and sum(together.values()) + own + text > most:
            yield group
            group, together, own = [], kept.parts_of(read), 0
        group.append(number)
        nodes, own = together, own + text
    if group:
        yield group
