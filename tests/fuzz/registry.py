"""All fuzzers."""

from __future__ import annotations

from tests.fuzz import data_files, directories, flags, model_files, paths, recipes, rows, templates

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
        data_files.JSONL,
        data_files.OUTPUTS,
        model_files.MODELS,
        directories.DIRECTORIES,
        paths.PATHS,
    )
}
"""By name."""
