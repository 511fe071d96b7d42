"""Options that cannot be combined are refused by one table, and others run together."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefillcli.errors import UsageError
from prefillcli.options.combinations import REFUSED, OptionText, Refused, refuse_combinations
from prefillcli.options.commands import InspectSettings, ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.options.option import Settings
from tests.jobs.jobs import score, texts, write_parquet

Values = dict[str, Any]

#: A value of each option in the table, and of those that it needs.
GIVEN: dict[OptionText, Values] = {
    "--adapter": {"adapter": "a"},
    "--adapter-column": {"adapter": ("a=a", "b=b"), "adapter_column": "which"},
    "--ask": {"ask": "Is it about shipping?"},
    "--audit": {"audit": 5},
    "--format": {"format": "openai", "output": "o.jsonl"},
    "--calibrate-with": {"calibrate_with": ("N/A",), "template": "{{ text }}"},
    "--calibration": {"calibration": "c.json"},
    "--choices-column": {"choices_column": "choices"},
    "--compile": {"compile": True},
    "--compute": {"compute": "int8"},
    "--deterministic": {"deterministic": True},
    "--draft": {"draft": "d", "keep": 0.5},
    "--draft self": {"draft": "self", "keep": 0.5},
    "--draft-tokenizer translate": {"draft": "d", "keep": 0.5, "draft_tokenizer": "translate"},
    "--estimate": {"estimate": 100},
    "--evidence": {"evidence": True},
    "--exit": {"exit": True},
    "--exit-profile": {"exit": True, "exit_profile": "e.json"},
    "--exit-rows": {"exit": True, "exit_rows": 50},
    "--first": {"first": "words"},
    "--flips-of": {"exit": True, "flips_of": "all"},
    "--head": {"head": "refund.head"},
    "--head probability": {"head": "probability"},
    "--head value": {"head": "value"},
    "--image-column": {"image_column": ("photo",)},
    "--keep": {"draft": "d", "keep": 0.5},
    "--keep auto": {"draft": "d", "keep": "auto"},
    "--keep-columns": {"keep_columns": ("a",)},
    "--label-end": {"label_end": "."},
    "--label-norm": {"label_norm": "tokens"},
    "--label-values": {"label_values": (1.0, 2.0)},
    "--labels": {"labels": "A,B"},
    "--limit": {"limit": 5},
    "--max-drift": {"max_drift": 0.1},
    "--max-flips": {"exit": True, "max_flips": 0.02},
    "--min-label-mass": {"min_label_mass": 0.5},
    "--levels": {"levels": ("calm", "angry")},
    "--options": {"options": ("billing", "other")},
    "--orders": {"ask": "What is it about?", "options": ("billing", "other"), "orders": 2},
    "--overwrite": {"overwrite": True},
    "--pair-column": {"pair_column": "other"},
    "--paper": {"draft": "d", "keep": 0.5, "paper": True},
    "--partition": {"partition": True},
    "--precision": {"first": "words", "precision": 0.9},
    "--prompt-column": {"prompt_column": "text"},
    "--questions": {"questions": "q.yaml"},
    "--rationale": {"rationale": 8},
    "--rationale-limit": {"rationale": 8, "rationale_when": "score > 0.5", "rationale_limit": 3},
    "--recall": {"first": "words", "recall": 0.9},
    "--rejects": {"rejects": "r.jsonl"},
    "--review": {"review_below": "0.9", "review": "look.jsonl"},
    "--review-below": {"review_below": "0.9"},
    "--resume": {"resume": True},
    "--retry-errors": {"retry_errors": True},
    "--sample": {"sample": 5},
    "--shard": {"shard": "1/2"},
    "--since": {"since": "before.parquet"},
    "--speculation draft": {"rationale": 8, "draft": "d", "speculation": "draft"},
    "--speculation hierarchy": {"rationale": 8, "draft": "d", "speculation": "hierarchy"},
    "--target-column": {"target_column": "target"},
    "--temperature": {"temperature": 2.0},
    "--template": {"template": "{{ text }}"},
    "--truth": {"truth": "truth"},
    "--weights stream": {"weights": "stream"},
    "--engine vllm": {"engine": "vllm"},
}


def _both(each: Refused) -> Settings:
    # Settings of a command with both options, whose own checks have not run.
    kind = InspectSettings if (each.option, each.other) == ("--exit-profile", "--adapter") else ScoreSettings
    values = {"inputs": ("in.parquet",), **GIVEN[each.option], **GIVEN[each.other]}
    if not each.holds(kind(**{name: value for name, value in values.items() if name in kind.options()})):
        values |= GIVEN["--head"]  # some are refused only where a head is fitted to --compute
    return kind(**{name: value for name, value in values.items() if name in kind.options()})


@pytest.mark.parametrize("each", REFUSED, ids=lambda each: f"{each.option} {each.other}")
def test_a_refused_combination_is_refused_with_its_reason_and_a_remedy(each: Refused) -> None:
    settings = _both(each)
    assert each.holds(settings)
    with pytest.raises(UsageError) as caught:
        refuse_combinations(settings)
    first, remedy = str(caught.value).splitlines()
    assert " cannot be combined with --" in first
    assert remedy


@pytest.mark.parametrize("each", REFUSED, ids=lambda each: f"{each.option} {each.other}")
def test_either_of_the_two_alone_is_not_refused_for_it(each: Refused) -> None:
    both = _both(each)
    for text in (each.option, each.other):
        values = {"inputs": ("in.parquet",), **GIVEN[text]}
        settings = type(both)(**{name: value for name, value in values.items() if name in type(both).options()})
        assert not each.holds(settings)


def test_what_makes_two_options_fit_is_known() -> None:
    """The rows of a shard may be compressed if each row's tokens follow from the row alone."""
    flags = {"inputs": ["in.parquet"], "draft": "d", "keep": 0.5, "shard": "1/2"}
    with pytest.raises(UsageError, match="--shard cannot be combined with --draft"):
        load_settings(ScoreSettings, flags, environment={})
    load_settings(ScoreSettings, {**flags, "compress_per_row": True, "keep_private": False}, environment={})


#: Options that change what is asked, read and judged; none of them needs another model.
TOGETHER: dict[str, Values] = {
    "label_norm": {"label_norm": "tokens"},
    "label_values": {"label_values": (1.0, 2.0)},
    "temperature": {"temperature": 2.0},
    "truth": {"truth": "truth"},
    "evidence": {"evidence": True},
    "rationale": {"rationale": 3},
    "deterministic": {"deterministic": True},
    "calibrate_with": {"calibrate_with": ("N/A",), "template": "{{ text }} Answer:"},
    "rejects": {"rejects": "rejects.jsonl"},
    "review": {"review_below": "0.9", "review": "look.jsonl"},
    "expect_rows": {"expect_rows": "12"},
    "max_length": {"max_length": 64, "on_long": "truncate-left"},
    "keep_columns": {"keep_columns": ("text",)},
    "weights": {"weights": "stream"},
}
_TABLE = {frozenset((each.option[2:].replace("-", "_"), each.other[2:].replace("-", "_"))) for each in REFUSED}
PAIRS = [pair for pair in combinations(TOGETHER, 2) if frozenset(pair) not in _TABLE]
SAMPLE = sorted(np.random.default_rng(20_261).permutation(len(PAIRS))[:16].tolist())


@pytest.mark.parametrize("pair", [PAIRS[at] for at in SAMPLE], ids=" ".join)
def test_two_options_that_are_not_in_the_table_run_together(pair: tuple[str, str], model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(12), text=texts(12), truth=["Yes", "No"] * 6)
    summary = score(source, "o.parquet", model=model, **TOGETHER[pair[0]], **TOGETHER[pair[1]])
    assert (summary["status"], summary["exit_code"], summary["rows"]["scored"]) == ("complete", 0, 12)
