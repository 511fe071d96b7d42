"""All fuzzers."""

from __future__ import annotations

from tests.fuzz import (
    data_files,
    directories,
    flags,
    footers,
    model_files,
    numbers,
    paths,
    recipes,
    rows,
    sealed,
    streams,
    templates,
)

FUZZERS = {
    fuzzer.name: fuzzer
    for fuzzer in (
        rows.LINES,
        rows.TABLES,
        flags.LINES,
        recipes.RECIPES,
        templates.TEMPLATES,
        templates.CHATS,
        data_files.PARQUET,
        footers.FOOTERS,
        data_files.JSONL,
        data_files.CSV,
        data_files.OUTPUTS,
        model_files.MODELS,
        numbers.NUMBERS,
        sealed.SEALED,
        streams.STREAMS,
        directories.DIRECTORIES,
        paths.PATHS,
    )
}
"""By name."""
