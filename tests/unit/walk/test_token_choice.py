"""Chosen tokens: likeliest, or drawn from the model's distribution, with and without levels of speculation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from prefillcli.walk.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.walk.lockstep import Chooser, NewTokens, write_texts
from tests.unit.walk.forward_drafter import ForwardDrafter

VOCABULARY, DRAWS = 32, 20_000


class Table:
    """A model whose next token depends on the last one alone: `logits` float32 [vocabulary, vocabulary]."""

    can_forget = True

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @classmethod
    def drawn(cls, seed: int, near: Table | None = None) -> Table:
        """A random one, or one near another."""
        logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        return cls(1.5 * logits if near is None else near.logits + 0.7 * logits)

    def __call__(self, new: NewTokens) -> Iterator[Tensor]:
        read = torch.tensor([token for _, tokens in new for token in tokens])
        yield from self.logits[read].split(1000)

    def forget(self, row: int, tokens: int) -> None: ...

    def drop(self, rows: Collection[int]) -> None: ...

    def pairs(self, temperature: float, first: int) -> np.ndarray:
        """The exact probability of each two tokens behind the token `first`, float64 [vocabulary, vocabulary]."""
        likely = torch.softmax(self.logits.double() / temperature, dim=-1).numpy()
        return likely[first][:, None] * likely


def p_value(counts: np.ndarray, likely: np.ndarray) -> float:
    """Of the chi-square test; cells with fewer than five expected draws are one."""
    expected = likely.ravel() * counts.sum()
    rare = expected < 5
    observed = np.append(counts.ravel()[~rare], counts.ravel()[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


def counted(texts: Sequence[Sequence[int]]) -> np.ndarray:
    counts = np.zeros((VOCABULARY, VOCABULARY), dtype=int)
    np.add.at(counts, tuple(np.array(texts).T), 1)
    return counts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drawn_texts_have_the_distribution_of_the_model(temperature: float, levels: int) -> None:
    target = Table.drawn(0)
    how = Writing(2, temperature=temperature, seed=levels, speculation=Speculation(tokens=2))
    rows = [Beginning(np.zeros(1, dtype=np.int32), (5,), key=f"row {number}") for number in range(DRAWS)]
    chooser, report, drafter = Chooser(temperature, levels), DecodingReport(), None
    if levels == 2:
        drafter = ForwardDrafter("first", Table.drawn(2, target), chooser, how, report)
    if levels:
        drafter = ForwardDrafter("middle", Table.drawn(1, target), chooser, how, report, drafter)
    texts = write_texts(target, rows, how, chooser=chooser, drafter=drafter, report=report)
    assert p_value(counted([text.tokens for text in texts]), target.pairs(temperature, 5)) > 0.001
    if levels:
        assert 0.2 < report.drafters["middle"].accepted / report.drafters["middle"].proposed < 1


def levels_by_rejection(
    likely: Sequence[np.ndarray], first: int, draw: np.random.Generator, *, as_published: bool
) -> tuple[int, int]:
    """Two tokens by TriForce's algorithm 1 with the rules of accepting by likelihoods: `likely` [vocabulary,
    vocabulary] of the draft, the middle level and the target.

    On a rejection CORRECT draws from norm(max(p - q, 0)). As published, the code of the middle level draws from p.
    """
    small, middle, target = likely

    def checked(token: int, q: np.ndarray, p: np.ndarray, wrong: bool) -> tuple[int, bool]:
        if draw.random() < p[token] / q[token]:
            return token, True
        rest = p if wrong else np.maximum(p - q, 0)
        return int(draw.choice(VOCABULARY, p=rest / rest.sum())), False

    text = [first]
    while len(text) < 3:
        guess = int(draw.choice(VOCABULARY, p=small[text[-1]]))
        guess, _ = checked(guess, small[text[-1]], middle[text[-1]], wrong=as_published)
        token, accepted = checked(guess, middle[text[-1]], target[text[-1]], wrong=False)
        text.append(token)
        if accepted:
            text.append(int(draw.choice(VOCABULARY, p=target[token])))
    return text[1], text[2]


@pytest.mark.nightly
@pytest.mark.parametrize("as_published", [False, True])
def test_the_published_middle_level_fails_the_test_of_distributions(as_published: bool) -> None:
    target = Table.drawn(0)
    tables = [Table.drawn(2, target), Table.drawn(1, target), target]
    likely = [torch.softmax(table.logits.double(), dim=-1).numpy() for table in tables]
    draw = np.random.default_rng(0)
    texts = [levels_by_rejection(likely, 5, draw, as_published=as_published) for _ in range(DRAWS)]
    assert (p_value(counted(texts), target.pairs(1.0, 5)) > 0.001) is not as_published


def test_a_draw_follows_from_seed_key_and_place() -> None:
    logits = torch.zeros(1, 1000)
    chosen = {
        (seed, key, place): Chooser(1.0, seed).choose(logits, [key], [place]).tokens[0]
        for seed in (0, 1, 1 << 63)
        for key in ("", "a", "b", "1 a")
        for place in (0, 1, 11)
    }
    assert len(set(chosen.values())) > 30  # 36 draws of 1000
    for (seed, key, place), token in chosen.items():
        others = Chooser(1.0, seed)
        others.choose(torch.zeros(3, 1000), ["x", "y", key], [place, 5, 12])
        assert others.choose(torch.zeros(2, 1000), ["z", key], [7, place]).tokens[1] == token


def test_noise_is_gumbel_and_begins_alike_for_larger_vocabularies() -> None:
    chooser = Chooser(1.0, 0)
    noise = chooser.noise("row", 0, 50_000)
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 0.001
    assert np.isfinite(noise).all()
    np.testing.assert_array_equal(Chooser(1.0, 0).noise("row", 0, 100), noise[:100])
    np.testing.assert_array_equal(chooser.noise("row", 0, 60_000)[:50_000], noise)


def test_what_is_chosen_in_pieces_is_what_is_chosen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    keys, places = [f"row {at % 3}" for at in range(20)], list(range(20))
    for temperature in (0.0, 0.5):
        whole = Chooser(temperature).choose(logits, keys, places)
        monkeypatch.setattr("prefillcli.walk.lockstep._NUMBERS_AT_ONCE", 120)
        assert Chooser(temperature).choose(logits, keys, places) == whole
        monkeypatch.undo()
    assert Chooser().choose(logits, keys, places).tokens == logits.argmax(dim=-1).tolist()


def test_remembered_noise_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefillcli.walk.lockstep._NUMBERS_REMEMBERED", 1000)
    chooser = Chooser(1.0, 0)
    first = chooser.noise("row", 0, 100).copy()
    for place in range(50):
        chooser.noise("row", place, 100)
    assert sum(map(len, chooser._noise.values())) <= 1000
    np.testing.assert_array_equal(chooser.noise("row", 0, 100), first)
