"""Which rows of a kept pack are written on together: as many as there is memory for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefillcli.decode.continuations import Beginning, Writing
from prefillcli.decode.kept_pack import KeptPack, Part
from prefillcli.decode.row_attention import whole_steps
from prefillcli.decode.row_tokens import room_of_end

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
