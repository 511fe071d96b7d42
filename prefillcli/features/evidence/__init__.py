"""`--evidence`: the contribution of each section of a row's prompt to its score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefillcli.core.feature import Feature
from prefillcli.options.option import RATIONALES, Settings, option

if TYPE_CHECKING:
    from prefillcli.core.feature import Choice, Counts, Job, Manifest, Opening, RunReport, Section, WantedRow
    from prefillcli.followup.evidence import ShownRow, Weighing




class Evidence(Feature):
    """The evidence of a job. The key `rationales` of its report has an `EvidenceUse`, or more than that."""

    order = 5
    options = {"score": EvidenceOptions, "inspect": EvidenceOptions}
    columns = ("evidence",)
    keys = {"rationales": None}
    takes_prompts_apart = True
    shown: Sequence[ShownRow] = ()

    @classmethod
    def asked(cls, settings: EvidenceOptions) -> bool:
        return settings.evidence

    def asks(self) -> bool:
        return True

    def further(self, opening: Opening, choice: Choice) -> Weighing:
        from prefillcli.followup.evidence import Ablation, Weighing

        labels = opening.labels
        return Weighing(Ablation(opening.builder, labels), opening.settings.temperature, labels.measure)

    def ended(self, job: Job) -> None:
        if self.settings.show_text and not job.schema().questions:
            from prefillcli.followup.evidence import weighed_rows

            self.shown = weighed_rows(job.sink.location, self.settings.id_column)

    def reported(self, job: Job, counts: Counts | None) -> None:
        from prefillcli.followup.evidence import EvidenceUse

        use = EvidenceUse(evidence_rows=0 if counts is None else counts.tallies.evidence)
        use.shown = list(self.shown)
        job.report.blocks["rationales"] = use

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.followup.evidence import EvidenceUse

        if manifest.counts is not None and manifest.counts.tallies.evidence:
            report.blocks["rationales"] = EvidenceUse(evidence_rows=manifest.counts.tallies.evidence)

    def answers_shown(self, row: WantedRow, labels: Sequence[str]) -> Section | None:
        from prefillcli.followup.evidence import inspected

        return None if row.scored.evidence is None else inspected(row.scored.evidence)

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        if report.blocks["rationales"] is None:
            return None
        from prefillcli.followup.evidence import section

        return section(report.blocks["rationales"])


FEATURE = Evidence
