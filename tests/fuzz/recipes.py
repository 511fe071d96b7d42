"""Recipes and environments with any values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from prefillcli.errors import UsageError
from prefillcli.options.commands import COMMANDS
from prefillcli.options.load import load_settings
from tests.fuzz.damage import byte_edits, edited
from tests.fuzz.flags import NUMBERS, WORDS
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.texts import json_values, texts
from tests.fuzz.workplace import Workplace

_NAMES = st.sampled_from(sorted({name for kind in COMMANDS.values() for name in kind.options()} - {"inputs"}))
_ODD = (
    *("a: [", "- 1", "1", "~", "? {a: b} : c", "limit: 0b", "seed: 2026-13-45", "seed: 2026-02-30", "limit: 1_0"),
    *("x: !!python/object:os.system {}", "labels: &a [*a]", "&a [*a]", "seed: 190:20:30", "temperature: .inf"),
    *("labels: !!binary x", "labels: !!set {a}", "\x00", "\ufffe", "---\na: 1\n---\nb: 2", "<<: 1", "limit: ="),
    *(
        "a: !!int x",
        "k: !!float ''",
        "engine_options: {a: 2026-01-01, b: !!set {x}}",
        "engine_options: {c: !!binary /w==}",
    ),
    "prompt_column: " + "[" * 400,  # Hypothesis allows deep recursion, and PyYAML takes its square of time
    "a: &a [x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b]\nlabels: [*c, *c, *c]",
)
_RECIPES = st.one_of(
    st.sampled_from(_ODD).map(str.encode),
    st.dictionaries(_NAMES, json_values, max_size=3).map(lambda recipe: yaml.safe_dump(recipe).encode()),
    byte_edits.map(
        lambda edits: edited(b"input: in.parquet\nlabels: [Yes, No]\nlimit: 3\nengine_options: {a: 1}\n", edits)
    ),
    st.text().map(lambda text: text.encode("utf-8", "replace")),
)


def _check(drawn: Any, place: Workplace) -> None:
    """Any recipe and environment give settings of every command, or are refused in a few lines."""
    recipe, environment = drawn
    Path("job.yaml").write_bytes(recipe)
    variables = {f"PREFILL_{name.upper()}": value for name, value in environment.items()}
    for command, kind in COMMANDS.items():
        flags = {"inputs": ("in.parquet",)} if "inputs" in kind.options() else {}
        try:
            settings = load_settings(kind, flags, recipe="job.yaml", environment=variables)
        except UsageError as error:
            said = str(error)
        else:
            said = ""
            json.dumps(settings.to_json())
        assert len(said) < 4_000, (command, len(said))
        assert len(said.splitlines()) <= 3, (command, said)


RECIPES = Fuzzer(
    "recipes",
    st.tuples(_RECIPES, st.dictionaries(_NAMES, st.one_of(NUMBERS, st.sampled_from(WORDS), texts), max_size=2)),
    _check,
    per_round=300,
)
