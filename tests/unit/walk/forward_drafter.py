"""A drafter that is a model: it writes ahead, in lock step, and may itself have a drafter, whose guesses it checks.

With the target's own weights over a retrieval cache it is TriForce's middle level, with a small model its first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.walk.continuations import DecodingReport, Writing
from prefillcli.walk.lockstep import Chooser, Drafter, Forward, LockStep, RowText


class ForwardDrafter:
    """Guesses what `forward` would write, which has read the prompts of the rows.

    It chooses by the same noise as the model that checks it, so it needs no likelihoods of what it guesses. `drafter`
    guesses for it in turn; how well it does is counted in `report`, under its own name.
    """

    def __init__(
        self,
        name: str,
        forward: Forward,
        chooser: Chooser,
        writing: Writing,
        report: DecodingReport,
        drafter: Drafter | None = None,
    ) -> None:
        self.name = name
        passes = DecodingReport(drafters=report.drafters)  # its passes are not the target's
        tokens = writing.speculation.tokens
        self._level = LockStep(forward, chooser, writing.stop_tokens, drafter, tokens, passes)
        self._ahead: dict[int, RowText] = {}  # each row as this model goes on with it
        self._agreed: dict[int, int] = {}  # how many tokens of it are certain

    def begin(self, rows: Sequence[RowText]) -> None:
        self._ahead = {row.number: RowText(row.number, row.beginning, list(row.written)) for row in rows}
        self._agreed = {row.number: len(row.written) for row in rows}
        self._level.begin(list(self._ahead.values()))

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        ahead = [self._follow(row) for row in rows]
        until = [row.position + tokens for row, tokens in zip(rows, most, strict=True)]
        while True:
            going = [
                (row, end - row.position)
                for row, end in zip(ahead, until, strict=True)
                if row.finish_reason is None and row.position < end
            ]
            if not going:
                return [other.written[row.position :] for row, other in zip(rows, ahead, strict=True)]
            self._level.advance([row for row, _ in going], [tokens for _, tokens in going])

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        """Nothing to do: what was wrong is forgotten when the row is written on."""

    def end(self, row: RowText) -> None:
        ahead = self._follow(row)
        self._level.end([ahead])
        del self._ahead[row.number], self._agreed[row.number]

    def _follow(self, row: RowText) -> RowText:
        """The row as it is now, after forgetting what was guessed for it and is not so."""
        ahead, agreed = self._ahead[row.number], self._agreed[row.number]
        for token, other in zip(row.written[agreed:], ahead.written[agreed:], strict=False):
            if token != other:
                break
            agreed += 1
        self._level.rewind(ahead, agreed)
        ahead.written += row.written[agreed:]
        self._agreed[row.number] = len(row.written)
        return ahead
