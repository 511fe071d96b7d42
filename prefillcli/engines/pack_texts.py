"""Texts behind the prompts of a pack whose K,V survive its scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from prefillcli.decode.behind import write_behind
from prefillcli.decode.continuations import DecodingReport
from prefillcli.decode.kept_pack import KeptPack
from prefillcli.decode.row_groups import RowRoom
from prefillcli.decode.speculation.job_drafters import JobDrafters
from prefillcli.engines.base import Answer, Continuations, Treatment
from prefillcli.plan.pack import Limits, Pack
from prefillcli.prefill.walk import LayerWalk, Tick


class PackTexts:
    """What is kept of a pack while it is walked, and written on once it is scored."""

    def __init__(self, walk: LayerWalk, pack: Pack, continuations: Continuations) -> None:
        self.kept = KeptPack(pack, len(walk.layers), on_host=walk.device.type == "cuda")
        self._walk = walk
        self._pack = pack
        self._continuations = continuations

    @classmethod
    def of(cls, walk: LayerWalk, pack: Pack, treatment: Treatment, limits: Limits) -> Self | None:
        """None where nothing is written behind this pack, or its K,V of all layers do not fit."""
        continuations = treatment.continuations
        if continuations is None or not pack.reads or not limits.can_keep(pack):
            return None
        return cls(walk, pack, continuations)

    def write(
        self,
        answers: Sequence[Answer],
        seconds: float,
        *,
        longest: int,
        room: RowRoom,
        drafters: JobDrafters,
        tick: Tick,
        report: DecodingReport,
    ) -> list[Answer]:
        """The answers of the pack, which took `seconds`, those of wanted prompts with their texts, for which the
        `drafters` guess. The other arguments as in `write_behind`."""
        wanted = self._continuations.wanted(answers)
        if self._continuations.again:
            report.again_prompts += len(wanted)
            report.prompt_tokens += len(self._pack.tokens)
            report.prompt_seconds += seconds
        else:
            report.kept_prompts += len(wanted)
        reads = {prompt: read for read, (_, prompts) in enumerate(self._pack.reads) for prompt in prompts}
        writing = self._continuations.writing
        texts = write_behind(
            self._walk,
            self.kept,
            [(reads[prompt], beginning) for prompt, beginning in wanted.items()],
            writing,
            longest=longest,
            room=room,
            make_drafter=partial(drafters.of, writing=writing, report=report),
            tick=tick,
            report=report,
        )
        found = dict(zip(wanted, texts, strict=True))
        return [replace(each, continuation=found.get(each.prompt)) for each in answers]
