"""What every row of the registry of pickers holds, whatever it picks by."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.options.reading import PICKERS
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.prompts.encoding import Spans
from prefillcli.reading.compress.draft import Draft, SelfDraft
from prefillcli.reading.compress.load import SpecPrefill
from prefillcli.reading.compress.selection import Bm25, Picker, RandomChunks
from prefillcli.reading.compress.settings import Compression
from prefillcli.rows.records import Prompt
from prefillcli.tools.bench.methods import METHODS
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import VOCABULARY, make_model

DOCS = Path(__file__).parents[4] / "docs"
NEEDS = {
    "draft": "a draft model",
    "self": "the model's own first layers",
    "text": "the prompt's text",
    None: "nothing",
}
PLENTY = Limits(10**6, 10**6)
BEFORE = [name for name in PICKERS if name != "self-draft"]  # they pick before the model reads

lengths = st.lists(st.integers(1, 120), min_size=1, max_size=4)
rates = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.77])


@cache
def draft() -> Draft:
    """A tiny Llama that asks with the last token."""
    register()
    model = make_model("llama")
    model.set_attn_implementation(ATTENTION)
    return Draft(LayerWalk(model, chunk_tokens=64), settings_with(), limits=PLENTY, max_length=4096)


def settings_with(chunk: int = 8, first: int = 2, last: int = 5) -> Compression:
    return Compression(
        lookahead=1, query_window=1, query_reduce="mean", select_chunk=chunk, keep_first=first, keep_last=last
    )


def spans(prompt: Prompt) -> Spans:
    """Every token is a word, every seventh ends a sentence."""
    words = [f"w{token}{'.' if token % 7 == 0 else ''} " for token in prompt.tokens.tolist()]
    ends = np.cumsum([len(word) for word in words])
    return Spans("".join(words), np.stack([ends - [len(word) for word in words], ends], axis=1).astype(np.int32))


def unrelated(counts: Sequence[int]) -> list[Prompt]:
    """Prompts of so many tokens that share no prefix."""
    rng = np.random.default_rng(len(counts))
    tokens = [rng.integers(10, VOCABULARY, count).astype(np.int32) for count in counts]
    for number, own in enumerate(tokens):
        own[0] = 3 + number
    return [Prompt(number, own, LabelSet(())) for number, own in enumerate(tokens)]


def picker(name: str, how: Compression) -> Picker:
    made: dict[str, Callable[[], Picker]] = {
        "specprefill": lambda: SpecPrefill(draft()),
        "self-draft": lambda: SelfDraft(1),
        "random": lambda: RandomChunks(how.select_chunk, seed=7),
        "bm25": lambda: Bm25(spans),
    }
    return made[name]()


@pytest.mark.parametrize("name", BEFORE)
@settings(max_examples=25, deadline=None)
@given(
    counts=lengths, low=rates, high=rates, chunk=st.integers(1, 20), first=st.integers(0, 9), last=st.integers(0, 30)
)
def test_a_picker_keeps_the_ends_and_what_the_rate_allows(
    name: str, counts: list[int], low: float, high: float, chunk: int, first: int, last: int
) -> None:
    how = settings_with(chunk, first, last)
    prompts, own = unrelated(counts), picker(name, how)
    low, high = sorted((low, high))
    steps: list[float] = []
    estimates = own.estimate(prompts, steps.append)
    assert sum(steps) == pytest.approx(sum(counts))
    few, more = (own.select(prompts, estimates, [rate] * len(prompts), how) for rate in (low, high))
    for prompt, some, others in zip(prompts, few, more, strict=True):
        assert some is not None
        assert others is not None
        tokens = len(prompt.tokens)
        assert some.dtype == np.int64
        assert (np.diff(some) > 0).all()
        ends = {*range(min(first, tokens)), *range(max(0, tokens - how.tail), tokens)}
        assert ends <= set(some.tolist()) <= set(range(tokens))
        assert len(some) <= ceil(round(low * ceil(tokens / chunk), 9)) * chunk + len(ends)
        assert set(some.tolist()) <= set(others.tolist()), "one estimate serves both rates"


@pytest.mark.parametrize("name", BEFORE)
def test_a_picker_picks_the_same_again_and_leaves_out_what_has_no_rate(name: str) -> None:
    how, prompts = settings_with(), unrelated([90, 60, 100])
    found = []
    for _ in range(2):
        own = picker(name, how)
        estimates = own.estimate(prompts, lambda tokens: None)
        found.append(own.select(prompts, estimates, [0.3, None, 0.5], how))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [kept is None for kept in found[0]] == [False, True, False]


def test_a_prompt_without_text_is_left_to_be_read_in_full() -> None:
    own = Bm25(lambda prompt: None)
    prompts = unrelated([80])
    assert own.select(prompts, own.estimate(prompts, lambda tokens: None), [0.2], settings_with()) == [None]


def test_the_manual_lists_the_pickers() -> None:
    bench = (DOCS / "bench.md").read_text().partition("## Methods")[2].partition("##")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", bench, re.MULTILINE) == list(METHODS)
    assert PICKERS.keys() <= METHODS.keys()
    compression = (DOCS / "compression.md").read_text().partition("## Other ways to pick tokens")[2].partition("##")[0]
    listed = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", compression, re.MULTILINE)
    assert listed == [(kind.name, NEEDS[kind.needs]) for kind in PICKERS.values()]
