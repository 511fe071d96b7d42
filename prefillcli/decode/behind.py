"""Texts behind the reads of a kept pack, in groups of rows that fit together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from prefillcli.decode.continuations import Beginning, Continuation, DecodingReport, Writing
from prefillcli.decode.forward import KeptForward
from prefillcli.decode.kept_pack import KeptPack, Part
from prefillcli.decode.lockstep import Drafter, write_texts
from prefillcli.decode.row_attention import room_of_end, whole_steps
from prefillcli.errors import out_of_memory
from prefillcli.plan.pack import Pack
from prefillcli.prefill.forest import ForestAttention, WatchedLayer
from prefillcli.prefill.walk import LayerWalk, Tick

# Which rows of a kept pack are written on together: as many as there is memory for.


Row = tuple[int, Beginning]
"""A read of a pack by its number, and what a text begins behind."""


@dataclass(slots=True)
class RowRoom:
    """How many rows fit. What does not is learned from the device: `most_rows` is None until memory runs out.

    While texts are written, the K,V of `most_tokens` tokens may be on the device, those of prompts included; None: of
    any number. A row counts `row_tokens` beside its tokens.
    """

    most_tokens: int | None = None
    row_tokens: float = 0.0
    most_rows: int | None = None

    def after_running_out(self, rows: int) -> bool:
        """Memory has run out for so many rows. Whether fewer can be tried."""
        self.most_rows = max(rows // 2, 1)
        return rows > 1

    def of_text(self, beginning: Beginning, writing: Writing) -> float:
        """What a row takes beside its prompt."""
        return whole_steps(len(beginning.tokens) + writing.tokens + writing.speculation.tokens) + self.row_tokens

    def groups(
        self, kept: KeptPack, rows: Sequence[tuple[int, Row]], writing: Writing, pass_tokens: int
    ) -> Iterator[list[int]]:
        """The numbers of the rows that are written together, those that share a prefix side by side.

        `rows` are numbered reads and beginnings. One pass over several rows reads at most `pass_tokens` tokens. A row
        that does not fit alone is a group of its own where its prompt is on the device already; else it is left out.
        """
        group: list[int] = []
        parts: dict[Part, int] = {}
        own, longest = 0.0, 0
        for number, (read, beginning) in sorted(rows, key=lambda each: kept.end_of(each[1][0])):
            prompt = {} if kept.tokens_here else kept.parts_of(read)
            text = self.of_text(beginning, writing)
            first = max(len(beginning.tokens), writing.speculation.tokens + 1)
            if not kept.tokens_here and self._too_many(sum(prompt.values()) + text):
                continue
            together = parts | prompt
            text += writing.speculation.kept_twice(len(beginning.prompt))
            text += room_of_end(kept.parts_of(read)[kept.end_of(read)])
            tokens = kept.tokens_here + sum(together.values()) + own + text
            size = len(group) + 1
            if group and (
                self._too_many(tokens)
                or size * max(longest, first) > pass_tokens
                or (self.most_rows is not None and size > self.most_rows)
            ):
                yield group
                group, together, own, longest = [], prompt, 0.0, 0
            group.append(number)
            parts, own, longest = together, own + text, max(longest, first)
        if group:
            yield group

    def _too_many(self, tokens: float) -> bool:
        return self.most_tokens is not None and tokens > self.most_tokens


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


# Greedy decoding behind all reads of a pack in lock step, for the queries of the decoded tokens.
#
# This is SpecPrefill's lookahead: what the decoded tokens attend to is used, the tokens themselves are not. The
# pack's K,V in all layers are kept while it lasts, with those of the decoded tokens.


@dataclass(slots=True)
class Lookahead:
    """Queries of a pack's watched tokens, and of tokens decoded greedily behind its reads.

    `counts[i]` tokens were decoded behind read i before an end of text. `layers`, one for each of the model's that
    attend, begin with the queries of the watched tokens in their order; those of each read's first decoded token
    follow, then of the second.
    """

    counts: list[int]
    layers: Iterator[WatchedLayer]


@torch.inference_mode()
def look_ahead(
    walk: LayerWalk,
    pack: Pack,
    watched: Sequence[int],
    steps: int,
    stop_tokens: frozenset[int],
    tick: Tick = lambda tokens: None,
) -> Lookahead:
    """`walk.watch`, and decode `steps` tokens behind each read, greedily.

    All layers' K,V, and the states of recurrent layers behind each read, stay in memory as long as the result.
    Raises UnsupportedModelError for a model that is walked with its own cache.
    """
    walk.check_queries()
    state, hidden = walk.begin(pack, keep_ends=True), None
    kept, layers = KeptPack(pack), []
    with ForestAttention(len(pack.tokens), watched) as attention:
        for index, layer in walk.through_layers(state, attention, tick):
            if attention.attended:
                layers.append(attention.watched_layer(index))
            if index == len(walk.layers) - 1:
                hidden = walk.read_last(state, layer, attention)
            kept.take(index, state, attention)
    if hidden is None:
        raise ValueError("a model has at least one layer")
    reads = range(len(pack.reads))
    forward = KeptForward(walk, kept.select(reads), tick, watches_queries=True)
    logits = walk.logits(hidden)
    counts, going = torch.zeros(len(reads), dtype=torch.long), torch.ones(len(reads), dtype=torch.bool)
    for _ in range(steps):
        tokens = torch.cat([each.argmax(dim=-1) for each in logits]).cpu()
        going &= ~torch.isin(tokens, torch.as_tensor(sorted(stop_tokens), dtype=torch.long))
        if not going.any():
            break
        counts += going
        logits = forward([(read, [token]) for read, token in enumerate(tokens.tolist())])
    decoded = forward.queries
    with_decoded = (
        replace(layer, queries=torch.cat([layer.queries, *decoded[layer.number]], dim=1)) for layer in layers
    )
    return Lookahead(counts.tolist(), with_decoded)
