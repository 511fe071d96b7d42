"""LoRA adapters: one that is merged into the model for all rows, or several that take turns, row by row."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator

from prefillcli.core.feature import Feature, features_of
from prefillcli.errors import UsageError, did_you_mean
from prefillcli.options.groups import read_mapping
from prefillcli.options.option import MODEL, Settings, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.feature import Counts, Job, LocalModels, Manifest, Opened, Opening, RunReport

MOST_ADAPTERS = 255  # an adapter's number takes eight bits of the key that prompts are sorted by






class AdapterUse(BaseModel):
    """An adapter, or with `name` None the model without one, and the rows that it scored."""

    name: str | None
    path: str | None = None  # None where it is not known, as in a merge
    rows: int = 0


class Adapters(Feature):
    """The adapters of a job. The key `adapters` of its report holds an `AdapterUse` for each."""

    order = 95
    options = {"score": AdapterOptions, "inspect": AdapterOptions}
    keys: ClassVar[Mapping[str, Any]] = {"adapters": []}

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.columns = ("adapters",) if settings.adapter_column is not None else ()

    @classmethod
    def asked(cls, settings: AdapterOptions) -> bool:
        return bool(settings.adapter)

    def check(self) -> None:
        names, column = list(self.settings.adapter), self.settings.adapter_column
        if len(names) > MOST_ADAPTERS:
            raise UsageError(f"--adapter: {len(names)} adapters; one job takes at most {MOST_ADAPTERS}")
        if len(names) > 1 and column is None:
            raise UsageError(
                f"--adapter: {len(names)} adapters, and nothing says which row is for which\n"
                "name the column that does with --adapter-column, or give one adapter"
            )
        if getattr(self.settings, "weights", None) == "stream":
            raise UsageError(
                "--weights stream: an adapter is merged into weights that are loaded whole\n"
                "take --weights resident, or merge it with PEFT and give the merged model"
            )
        for what in filter(None, (each.learns() for each in features_of(self.settings))):
            if column is not None:
                raise UsageError(
                    f"{what}: what it learns is of one model, and --adapter-column makes several\n"
                    "score each adapter's rows in a job of its own"
                )

    def folders(self) -> Sequence[Path]:
        from prefillcli.models.adapters import local_adapter

        return [path for path in map(local_adapter, self.settings.adapter.values()) if path is not None]

    def check_columns(self, available: Sequence[str]) -> None:
        column = self.settings.adapter_column
        if column is not None and column not in available:
            raise UsageError(
                f"--adapter-column {column}: the input has no such column{did_you_mean(column, available)}"
            )

    def change_model(self, opened: Opened) -> Opened:
        from prefillcli.models.adapters import open_adapters

        settings = self.settings
        return open_adapters(
            opened, settings.adapter, settings.adapter_column, trust_remote_code=settings.trust_remote_code
        )

    def identity(self, opening: Opening, values: dict[str, Any], models: LocalModels) -> Mapping[str, str]:
        from prefillcli.data.proof import hash_value

        for name in AdapterOptions.model_fields:  # the contents of these folders are hashed here
            del values[name]
        contents = [(name, models.of(Path(path))) for name, path in _paths(opening.opened).items()]
        adapters = [[name, files.model(), files.tokenizer()] for name, files in contents]
        return {"adapters": hash_value([sorted(adapters), self.settings.adapter_column])}

    def reported(self, job: Job, counts: Counts | None) -> None:
        job.report.blocks["adapters"] = list(_uses(_paths(getattr(job, "opened", None)), counts))

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        report.blocks["adapters"] = list(_uses({}, manifest.counts))


def _paths(opened: Opened | None) -> dict[str, str]:
    # The folders of a model's adapters, by the adapters' names.
    from prefillcli.models.adapters import AdapterVariants

    variants = None if opened is None else opened.variants
    return {each.name: str(each.path) for each in variants.files} if isinstance(variants, AdapterVariants) else {}


def _uses(paths: Mapping[str, str], counts: Counts | None) -> Iterable[AdapterUse]:
    # Rows by adapter: counted in the output's column, or all rows where one adapter reads them all.
    by_name = {} if counts is None else counts.tallies.adapters
    if not by_name:
        scored = 0 if counts is None else counts.scored
        yield from (AdapterUse(name=name, path=path, rows=scored) for name, path in paths.items())
        return
    for name in dict.fromkeys([*paths, *filter(None, by_name)]):
        yield AdapterUse(name=name, path=paths.get(name), rows=by_name.get(name, 0))
    if by_name.get(""):
        yield AdapterUse(name=None, rows=by_name[""])


FEATURE = Adapters
