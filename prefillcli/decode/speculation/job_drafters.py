"""The drafters of a job: what its settings ask for, made anew for each group of rows that is written together."""

from __future__ import annotations

from functools import partial

from prefillcli.decode.continuations import DecodingReport, Writing
from prefillcli.decode.contracts import Drafter
from prefillcli.decode.forward import KeptForward
from prefillcli.decode.speculation.draft_model import DraftModel, StreamingDrafter
from prefillcli.decode.speculation.hierarchy import FIRST_LEVEL_TOKENS
from prefillcli.decode.speculation.means import DraftingMeans, JobMemory, drafter_of
from prefillcli.decode.speculation.retrieval import RetrievalDrafter
from prefillcli.decode.speculation.retrieval_cache import saves
from prefillcli.decode.token_choice import Chooser


class JobDrafters:
    """Makes drafters, and remembers what they learn of the job. `draft` is the draft model, if there is one."""

    def __init__(self) -> None:
        self.draft: DraftModel | None = None
        self._memory = JobMemory()

    def of(self, forward: KeptForward, writing: Writing, report: DecodingReport) -> Drafter | None:
        """What guesses for the rows of `forward`; None where nothing does."""
        if not forward.can_forget:
            return None
        speculation, chooser = writing.speculation, Chooser(writing.temperature, writing.seed)
        means = DraftingMeans(writing, chooser, report, self._memory)

        def over_cache(inner: Drafter | None) -> RetrievalDrafter:
            return RetrievalDrafter(
                forward,
                chooser,
                budget=speculation.budget,
                chunk=speculation.chunk,
                report=report,
                inner=inner,
                inner_tokens=FIRST_LEVEL_TOKENS,
            )

        if speculation.drafter != "auto" or any(
            saves(length, speculation.budget, speculation.chunk) for length in forward.lengths
        ):
            means.retrieval = over_cache
        if self.draft is not None:
            means.draft = partial(
                StreamingDrafter,
                self.draft,
                chooser,
                vocabulary=int(forward.walk.model.config.get_text_config().vocab_size),
                sinks=speculation.sinks,
                recent=speculation.recent,
            )
        return drafter_of(means)
