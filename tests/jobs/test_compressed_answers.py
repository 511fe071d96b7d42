"""Longer labels and targets behind compressed prompts, against transformers' own eager forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.compression import HOW, QUESTION, ByHand, Prompt, behind, lines_of, unrelated
from tests.jobs.jobs import Reference, read_output, score, write_jsonl
from tests.jobs.models import save_model
from tests.jobs.test_likelihood import rolling_windows
from tests.jobs.test_self_draft import OwnLayersByHand

LABELS = ["a fox saw it", "a fox did not", "No"]
TARGETS = ["Yes, it is", " é\n", " a fox saw a dog, and no dog saw the fox. " * 3, " Yes", " no", "A"]
LENGTHS = [300, 65, 129, 200, 163, 90]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "deep", layers=4, seed=5)


@pytest.fixture(params=["specprefill", "self-draft"])
def way(request: pytest.FixtureRequest, deep: Path, draft: Path) -> tuple[Any, dict[str, Any]]:
    """A model that reads what is kept, by hand, and the options of a job that does it."""
    reference = Reference(deep)
    if request.param == "specprefill":
        return ByHand(reference, deep, draft), {**HOW, "model": deep, "draft": draft}
    how = {name: value for name, value in HOW.items() if name != "lookahead"}
    return OwnLayersByHand(reference, deep, 2), {**how, "model": deep, "draft": "self"}


def follows(reference: Reference, text: str) -> Prompt:
    """The tokens of a text behind `QUESTION`."""
    return reference.ids(QUESTION + text, special=False)[len(reference.ids(QUESTION, special=False)) :]


def test_longer_labels_stand_behind_the_kept_tokens(way: Any, reference: Reference) -> None:
    by_hand, options = way
    prompts = unrelated(reference, LENGTHS)
    score(write_jsonl("in.jsonl", lines_of(prompts)), labels=LABELS, **options)
    changes = []
    for row, prompt in zip(read_output("out.parquet"), prompts, strict=True):
        kept = by_hand.kept(prompt)
        assert row["kept_tokens"] == len(kept) < len(prompt)
        for label in LABELS:
            tokens = follows(reference, f" {label}")
            wanted = behind(by_hand.logits, prompt, kept, tokens).sum()
            assert row[f"logprob_{label}"] == pytest.approx(wanted, rel=1e-6, abs=1e-5)
            changes.append(abs(wanted - behind(by_hand.logits, prompt, np.arange(len(prompt)), tokens).sum()))
    assert max(changes) > 0.01, "reading less must change an answer, or nothing is tested"


def test_targets_are_read_in_full_behind_the_kept_tokens(way: Any, reference: Reference) -> None:
    by_hand, options = way
    prompts = unrelated(reference, LENGTHS)
    source = write_jsonl("in.jsonl", lines_of(prompts, target=TARGETS))
    score(source, target_column="target", token_logprobs=True, **options)
    for row, prompt, target in zip(read_output("out.parquet"), prompts, TARGETS, strict=True):
        kept, tokens = by_hand.kept(prompt), follows(reference, target)
        assert (row["kept_tokens"], row["target_tokens"]) == (len(kept), len(tokens))
        wanted = behind(by_hand.logits, prompt, kept, tokens)
        np.testing.assert_allclose(row["token_logprobs"], wanted, rtol=1e-6, atol=1e-5)


def test_what_a_window_has_before_its_predictions_is_compressed(way: Any, reference: Reference) -> None:
    by_hand, options = way
    text = " ".join(f"The fox saw {number} dogs, é and no fox." for number in range(30))
    options |= {"target_column": "text", "max_length": 200, "stride": 40, "compress_per_row": True}
    score(write_jsonl("in.jsonl", [{"text": text}]), **options)
    (row,) = read_output("out.parquet")
    ids, total, kept_tokens = reference.ids(text, special=False), 0.0, 0
    for before, predicted in rolling_windows(ids, reference.tokenizer.bos_token_id, 200, 161):
        kept = by_hand.kept(before) if len(before) > HOW["compress_above"] else np.arange(len(before))
        total += behind(by_hand.logits, before, kept, predicted).sum()
        kept_tokens += len(kept)
    assert row["logprob"] == pytest.approx(total, rel=1e-6)
    assert row["kept_tokens"] == kept_tokens < row["prompt_tokens"]
