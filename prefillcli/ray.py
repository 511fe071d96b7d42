"""Scoring as a stage of a Ray Data pipeline. Importing this module needs no Ray."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prefillcli.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from prefillcli.options.score import ScoreSettings


class Scorer:
    """Adds the columns of `prefill score` to batches of rows.

        dataset.map_batches(
            prefillcli.ray.Scorer,
            fn_constructor_kwargs={"model": "models/judge", "labels": "Yes,No"},
            batch_format="pyarrow",
            batch_size=4096,
            concurrency=2,
        )

    It takes the options of `prefill score` that say how a row is scored, by name. Every actor loads the models once.
    The rows of a batch are planned together, so a prefix is computed once for all rows of a batch, not of two.
    A row that cannot be scored has an `error`, as in an output. Raises UsageError for wrong options or columns, and
    ResourceError where the model does not fit.
    """

    def __init__(self, **options: Any) -> None:
        settings = _settings(options)
        from prefillcli.jobs.runners.ray_actor import memory_share
        from prefillcli.jobs.table_scoring import TableScorer  # takes torch along

        self._turn = threading.Lock()  # an actor may be asked by several threads
        self._scorer = TableScorer(settings, share=memory_share(settings.device))

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with the new columns after its own, rows in the same order."""
        if not isinstance(batch, pa.Table):
            raise UsageError(f'Scorer takes Arrow tables, not {type(batch).__name__}: give batch_format="pyarrow"')
        with self._turn:
            return self._scorer.score(batch)

    def close(self) -> None:
        """Let go of the models."""
        self._scorer.close()


def _settings(options: dict[str, Any]) -> ScoreSettings:
    """The options as `prefill score` would take them. Raises UsageError."""
    from prefillcli.options.calibrate import ProbabilityOptions
    from prefillcli.options.groups import LoadingOptions, PromptOptions
    from prefillcli.options.load import load_settings
    from prefillcli.options.score import ScoreSettings

    known = {*LoadingOptions.model_fields, *PromptOptions.model_fields, "schedule", "engine", "engine_options"}
    known |= ProbabilityOptions.model_fields.keys()
    for name in options:
        if name not in known and name in ScoreSettings.model_fields:
            raise UsageError(f"Scorer has no option {name!r}: in a pipeline, Ray Data reads and writes the rows")
        if name not in known:
            raise UsageError(f"Scorer has no option {name!r}{did_you_mean(name, known)}")
    if options.get("keep") == "auto":
        raise UsageError(
            "keep='auto' chooses one rate for a whole job\nchoose it with prefill score, and give it here"
        )
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return load_settings(ScoreSettings, {"inputs": ("batch",), "quiet": True, **flags}, environment={})
