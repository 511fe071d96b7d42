"""`--weights`: models larger than memory, whose layers' weights are read from the files while others compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from prefillcli.core.feature import Feature
from prefillcli.options.groups import ByteSize
from prefillcli.options.option import MEMORY, Settings, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.feature import Opened, RunReport, Section, WeightsPlan





class Streaming(Feature):
    """Weights that may be streamed: with `auto` if they do not fit. It has no key of its own in the report: every
    model has `weights` there."""

    order = 99
    options = {"score": StreamingOptions, "inspect": StreamingOptions}

    @classmethod
    def asked(cls, settings: StreamingOptions) -> bool:
        return settings.weights != "resident"

    def keep_weights(self, opened: Opened, *, draft: bool, share: float) -> WeightsPlan | None:
        from prefillcli.models.streamed_layers import plan_streamed

        settings = self.settings
        always = settings.weights == "stream"
        return plan_streamed(opened, settings.weights_memory, always=always, draft=draft, share=share)

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        from prefillcli.report.section import Section, mebibytes

        used = report.weights
        if used is None or used.mode != "stream":
            return None
        line = (
            f"{mebibytes(used.bytes)} MiB streamed in {mebibytes(used.memory_bytes)} MiB; "
            f"{mebibytes(used.bytes_read)} MiB read, {used.seconds_waited:.1f} seconds waited for them"
        )
        return Section(lines=[("weights", line)])


FEATURE = Streaming
