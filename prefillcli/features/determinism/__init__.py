"""`--deterministic`: a row's score has the same bits, whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prefillcli.core.feature import Feature, Objection, features_of
from prefillcli.errors import UsageError
from prefillcli.options.option import RUN, Settings, option

if TYPE_CHECKING:
    from prefillcli.core.feature import Arithmetic




class Determinism(Feature):
    """The walk computes row by row. The feature has no key of its own in the report, which lists the option."""

    order = 10
    options = {"score": DeterminismOptions, "inspect": DeterminismOptions}

    @classmethod
    def asked(cls, settings: DeterminismOptions) -> bool:
        return settings.deterministic

    def check(self) -> None:
        for each in self._objections():
            raise UsageError(f"--deterministic: {each.reason}\n{each.remedy}, or leave --deterministic out")

    def _objections(self) -> Iterator[Objection]:
        # Other options that make a row's score depend on more than the row, or may do so.
        yield from filter(None, (each.uneven() for each in features_of(self.settings)))
        if self.settings.compile:
            yield Objection("compiled layers have kernels of their own for each size of chunk", "leave --compile out")
        if getattr(self.settings, "rationale", 0):
            yield Objection(
                "texts are written for several rows at a time, and a near tie may fall otherwise with others",
                "leave --rationale out; --evidence is covered",
            )

    def arithmetic(self) -> Arithmetic:
        from prefillcli.prefill.determinism import by_row

        return by_row()


FEATURE = Determinism
