"""Texts behind the reads of a kept pack, in groups of rows that fit together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch

from prefillcli.decode.continuations import Continuation, DecodingReport, Writing
from prefillcli.decode.contracts import Drafter
from prefillcli.decode.forward import KeptForward
from prefillcli.decode.kept_pack import KeptPack
from prefillcli.decode.lockstep import write_texts
from prefillcli.decode.row_groups import Row, RowRoom
from prefillcli.errors import out_of_memory
from prefillcli.prefill.walk import LayerWalk, Tick

MakeDrafter = Callable[[KeptForward], Drafter | None]
"""What guesses tokens for the rows of a forward, if anything does."""


def write_behind(
    walk: LayerWalk,
    kept: KeptPack,
    rows: Sequence[Row],
    writing: Writing,
    *,
    longest: int | None = None,
    room: RowRoom | None = None,
    make_drafter: MakeDrafter = lambda forward: None,
    tick: Tick = lambda tokens: None,
    report: DecodingReport | None = None,
) -> list[Continuation | None]:
    """What the model writes behind reads of the pack that `kept` has walked: one text for each of the rows, which are
    given as (number of the read, beginning).

    No text goes beyond the `longest` places of the model. Rows that do not fit in the `room` together are written one
    group after the other, and so they are when memory runs out: then the room is smaller from there on. A row for
    which there is no room alone has None. `tick` is called after each layer of a pass and may raise to stop. What
    writing takes is added to the `report`. The pack is let go of.
    """
    report, room = report or DecodingReport(), room or RowRoom()
    begun = time.monotonic()
    kept.drop_others([read for read, _ in rows])
    found: dict[int, Continuation] = {}
    waiting = dict(enumerate(rows))
    while waiting:
        group = next(room.groups(kept, list(waiting.items()), writing, walk.chunk_tokens), [])
        if not group:
            break
        together = [rows[number] for number in group]
        texts = _written_together(walk, kept, together, writing, longest, make_drafter, tick, report)
        if texts is None:
            _let_go(walk.device)
            if room.after_running_out(len(group)):
                continue
        for number, text in zip(group, texts or [], strict=False):
            found[number] = text
        for number in group:
            del waiting[number]
    kept.release()
    report.seconds += time.monotonic() - begun
    return [found.get(number) for number in range(len(rows))]


def _written_together(
    walk: LayerWalk,
    kept: KeptPack,
    rows: Sequence[Row],
    writing: Writing,
    longest: int | None,
    make_drafter: MakeDrafter,
    tick: Tick,
    report: DecodingReport,
) -> list[Continuation] | None:
    """The texts of one group; None where memory runs out. Then all that it made is let go of with its frame."""
    try:
        forward = KeptForward(walk, kept.select([read for read, _ in rows]), tick)
        beginnings, drafter = [beginning for _, beginning in rows], make_drafter(forward)
        return write_texts(forward, beginnings, writing, longest=longest, drafter=drafter, report=report)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None


def _let_go(device: torch.device) -> None:
    """Give memory that nothing uses back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
