"""Options of adapters: which ones, and which of them reads a row."""

from __future__ import annotations

from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.option import MODEL, Settings, option
from prefillcli.options.values import AdapterFolders

MOST_ADAPTERS = 255


class AdapterOptions(Settings):
    """LoRA adapters that are merged into the model."""

    adapter: AdapterFolders = option(
        {},
        "A LoRA of PEFT to merge into the model: a folder or a hub name; repeatable with --adapter-column; a mapping "
        "in a recipe.",
        MODEL, changes="scores", metavar="[NAME=]DIR", path="model", repeatable=True, needs="adapters",
    )  # fmt: skip
    adapter_column: str | None = option(
        None,
        "Column that names each row's adapter; where it is empty, the model reads the row without one.",
        MODEL, changes="scores", metavar="COLUMN", requires=requirements.ADAPTERS,
    )  # fmt: skip

    def check_adapters(self, *, streamed: bool, exits: bool, content_free: bool) -> None:
        """Raise UsageError for adapters that contradict one another, or what else is asked."""
        names = list(self.adapter)
        if len(names) > MOST_ADAPTERS:
            raise UsageError(f"--adapter: {len(names)} adapters; one job takes at most {MOST_ADAPTERS}")
        if len(names) > 1 and self.adapter_column is None:
            raise UsageError(
                f"--adapter: {len(names)} adapters, and nothing says which row is for which\n"
                "name the column that does with --adapter-column, or give one adapter"
            )
        if names and streamed:
            raise UsageError(
                "--weights stream: an adapter is merged into weights that are loaded whole\n"
                "take --weights resident, or merge it with PEFT and give the merged model"
            )
        for given, what in ((exits, "--exit"), (content_free, "--calibrate-with")):
            if given and self.adapter_column is not None:
                raise UsageError(
                    f"{what}: what it learns is of one model, and --adapter-column makes several\n"
                    "score each adapter's rows in a job of its own"
                )
