"""What `--dry-run` found: `*.dry-run.json`, its last line on stdout, and its tables in the terminal."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from prefillcli.redaction import shown_report
from prefillcli.report.rendering import mebibytes, pairs_table, stderr_console
from prefillcli.report.survey import Survey, print_survey
from prefillcli.runtime.clock import duration

SCHEMA_VERSION = 1


class DryRunReport(BaseModel):
    """What `*.dry-run.json` holds."""

    schema_version: int = SCHEMA_VERSION
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    started: str = ""  # ISO 8601, UTC
    output: str | None = None  # where the scores would go
    report: str | None = None
    survey: Survey | None = None
    profile: str | None = None  # the profile that predicted
    no_prediction: str | None = None  # why there is none
    seconds: float = 0.0
    peak_memory_bytes: int = 0  # of the host
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The last line on stdout."""
        line: dict[str, Any] = {"status": self.status, "exit_code": self.exit_code, "dry_run": True}
        if self.survey is not None:
            survey, plan = self.survey, self.survey.plan
            line |= {
                "rows": survey.rows.model_dump(),
                "prompt_tokens": survey.prompt_tokens,
                "unique_tokens": survey.sharing.unique_tokens,
                "computed_tokens": plan.computed_tokens,
                "packs": plan.packs,
                "predicted_seconds": plan.seconds,
                "predicted_price": plan.price,
            }
        safe = shown_report(self)
        line |= {"seconds": round(self.seconds, 3), "output": safe.output, "report": safe.report}
        return line | ({"error": self.error} if self.error else {})


def print_dry_run(report: DryRunReport) -> None:
    """The whole report, on stderr."""
    if report.survey is not None:
        print_survey(report.survey)
    rows = [
        ("prediction", f"by {report.profile}" if report.profile else f"none: {report.no_prediction}"),
        ("dry run", f"{duration(report.seconds)}, {mebibytes(report.peak_memory_bytes)} MiB; none scored"),
        ("output", f"{report.output} (not written)"),
        ("report", report.report or "none"),
    ]
    stderr_console().print(pairs_table(rows))
