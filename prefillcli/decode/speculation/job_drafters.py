"""The drafter that a job asks for, made anew for each group of rows that is written together."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.decode.continuations import DecodingReport, Writing
from prefillcli.decode.forward import KeptForward
from prefillcli.decode.lockstep import Chooser, Drafter, RowText
from prefillcli.decode.speculation.draft_model import DraftModel, StreamingDrafter
from prefillcli.decode.speculation.free_drafters import EarlierTexts, PromptLookup, SuffixDrafter
from prefillcli.decode.speculation.retrieval import RetrievalDrafter

# TriForce's hierarchy (arXiv 2404.11912, algorithm 1): three levels.
#
# A cheap drafter guesses for the model over its retrieval cache, and what comes together there is checked by the
# model over all K,V. All levels choose by the same noise, so each checks by comparing, and the text is that of the
# last one.


FIRST_LEVEL_TOKENS = 3  # that are guessed for one pass over the retrieval cache


class HierarchyDrafter:
    """Guesses by `retrieval`, which has a drafter of its own, and by `beside` for the rows that retrieval leaves out:
    their prompts are too short for it."""

    name = "hierarchy"

    def __init__(self, retrieval: RetrievalDrafter, beside: Drafter) -> None:
        self._retrieval, self._beside = retrieval, beside
        self._long: set[int] = set()  # the rows that retrieval has begun with

    def begin(self, rows: Sequence[RowText]) -> None:
        self._retrieval.begin(rows)
        self._long = {row.number for row in rows if self._retrieval.reaches(row)}
        self._beside.begin([row for row in rows if row.number not in self._long])

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for drafter in (self._retrieval, self._beside):
            own = [(row, tokens) for row, tokens in zip(rows, most, strict=True) if self._of(row) is drafter]
            if own:
                guessed = drafter.propose([row for row, _ in own], [tokens for _, tokens in own])
                found |= {row.number: guess for (row, _), guess in zip(own, guessed, strict=True)}
        return [found[row.number] for row in rows]

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        self._of(row).checked(row, proposed, accepted)

    def end(self, row: RowText) -> None:
        self._of(row).end(row)

    def _of(self, row: RowText) -> Drafter:
        return self._retrieval if row.number in self._long else self._beside


class JobDrafters:
    """Makes drafters, and remembers the texts of the job. `draft` is the draft model, if there is one."""

    def __init__(self) -> None:
        self.draft: DraftModel | None = None
        self._earlier = EarlierTexts()

    def of(self, forward: KeptForward, writing: Writing, report: DecodingReport) -> Drafter | None:
        """The drafter of the rows of `forward`; None with "off", for a model with recurrent layers, which cannot
        forget a wrong guess, and where a draft model is asked for and there is none: the text is the same without."""
        speculation, chooser = writing.speculation, Chooser(writing.temperature, writing.seed)
        draft_model = self.draft

        def over_cache(inner: Drafter | None = None) -> RetrievalDrafter:
            return RetrievalDrafter(
                forward,
                chooser,
                budget=speculation.budget,
                chunk=speculation.chunk,
                report=report,
                inner=inner,
                inner_tokens=FIRST_LEVEL_TOKENS,
            )

        def draft(model: DraftModel) -> StreamingDrafter:
            return StreamingDrafter(
                model,
                chooser,
                vocabulary=int(forward.walk.model.config.get_text_config().vocab_size),
                sinks=speculation.sinks,
                recent=speculation.recent,
            )

        if speculation.drafter == "off" or not forward.can_forget:
            return None
        if speculation.drafter == "lookup":
            return PromptLookup()
        if speculation.drafter == "suffix":
            return SuffixDrafter(self._earlier)
        if speculation.drafter == "retrieval":
            return over_cache()
        if draft_model is None:
            return None
        if speculation.drafter == "draft":
            return draft(draft_model)
        # It also guesses alone, where prompts are too short for retrieval.
        return HierarchyDrafter(over_cache(draft(draft_model)), draft(draft_model))
