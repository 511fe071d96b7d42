"""Retrieval caches against a choice by hand inside transformers' own forward; texts that do not depend on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from prefillcli.plan.plan import make_plan
from prefillcli.walk.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.walk.decoding import KeptForward, KeptPack
from prefillcli.walk.draft_model import DraftModel, PaddedLayer, StreamingDrafter
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.lockstep import Chooser, Drafter, RowText
from prefillcli.walk.triforce import (
    REBUILD_LEAST,
    HierarchyDrafter,
    RetrievalDrafter,
    chosen_tokens,
    latest_chunks,
)
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.generated import ONE_PACK, walking, written
from tests.unit.walk.tiny_models import make_tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 4},
    "gemma2": {},
    "mistral": {"sliding_window": None},
    "gpt_oss": {},
}
"""Grouped queries, one K,V head for each query head, soft caps and windows, sinks."""
GUESSES = 5


def rows_with_shared_prefixes(seed: int = 0) -> list[Beginning]:
    """Prompts of 12 to 150 tokens. Two share 40 tokens, and a third one 20 of these."""
    draw = np.random.default_rng(seed)
    shared = draw.integers(3, 200, 40)
    prompts = [np.concatenate([shared[:kept], draw.integers(3, 200, own)]) for kept, own in
               ((40, 61), (40, 90), (20, 84), (0, 150), (0, 12))]  # fmt: skip
    return [Beginning(prompt.astype(np.int32), (7, 9 + n), f"row {n}") for n, prompt in enumerate(prompts)]


def chunk_scores(keys: Tensor, query: Tensor, chunk: int) -> list[list[float]]:
    """By K,V head and chunk: the sum of the products of the head's queries and the chunk's mean key."""
    group = query.shape[0] // keys.shape[0]
    return [
        [
            sum(float(query[head * group + q] @ own[at : at + chunk].mean(dim=0)) for q in range(group))
            for at in range(0, len(own) - chunk + 1, chunk)
        ]
        for head, own in enumerate(keys)
    ]


def by_hand(keys: Tensor, query: Tensor, budget: int, chunk: int) -> list[list[int]]:
    """The tokens that stay for each K,V head: the first chunk, the latest ones with what is behind, and the best."""
    tokens = keys.shape[1]
    chunks, rest = divmod(tokens, chunk)
    room = (budget - rest) // chunk
    latest = set(range(chunks - min(latest_chunks(budget, chunk), room - 1), chunks))
    found = []
    for scores in chunk_scores(keys, query, chunk):
        kept = {0} | latest
        for best in sorted(range(chunks), key=lambda at: -scores[at]):
            if len(kept) < room:
                kept.add(best)
        behind = range(chunks * chunk, tokens)
        found.append([at * chunk + step for at in sorted(kept) for step in range(chunk)] + list(behind))
    return found


@pytest.mark.parametrize(("budget", "chunk"), [(16, 2), (24, 4), (64, 8), (40, 1), (33, 5), (96, 16)])
@pytest.mark.parametrize("heads", [2, 6])
def test_the_best_chunks_stay(budget: int, chunk: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    for tokens in (97, 100, 203):
        keys, query = torch.randn(2, tokens, 8, generator=generator), torch.randn(heads, 8, generator=generator)
        kept = chosen_tokens(keys, query, budget, chunk)
        assert kept.tolist() == by_hand(keys, query, budget, chunk)
        assert budget - chunk < kept.shape[1] <= budget


class ByHand:
    """An attention function of transformers: tokens from `read` on see of a prompt only what was chosen by hand.

    The choice is that of the last of the `built` first tokens. Where a layer has a window, they see what is in it.
    """

    def __init__(self, prompt: int, built: int, read: int, budget: int, chunk: int) -> None:
        self._prompt, self._built, self._read, self._budget, self._chunk = prompt, built, read, budget, chunk

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float = 0.0,
        softcap: float | None = None, sliding_window: int | None = None, s_aux: Tensor | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        heads, tokens = query.shape[1:3]
        at = torch.arange(tokens)
        seen = (at[None] <= at[:, None]).expand(heads, -1, -1).clone()
        if sliding_window is not None:
            seen &= at[None] > at[:, None] - sliding_window
        elif self._read < tokens:
            chosen = by_hand(key[0, :, : self._prompt], query[0, :, self._built - 1], self._budget, self._chunk)
            group = heads // len(chosen)
            for head, own in enumerate(chosen):
                hidden = torch.ones(self._prompt, dtype=torch.bool)
                hidden[own] = False
                at_heads = slice(head * group, (head + 1) * group)
                seen[at_heads, self._read :, : self._prompt] &= ~hidden
        repeated = [each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value)]
        scores = query @ repeated[0].transpose(2, 3) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen[None], -torch.inf)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(1, -1, tokens, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :tokens]
        return (weights @ repeated[1]).transpose(1, 2), None


def guessed_by_hand(model: Any, row: RowText, built: int, count: int, budget: int, chunk: int) -> list[int]:
    """Greedy tokens behind a row whose cache was built behind `built` tokens of text.

    All but the last one of its text have been read by the whole model.
    """
    prompt = len(row.beginning.prompt)
    read = prompt + len(row.beginning.tokens) + len(row.written) - 1
    AttentionInterface.register("by hand", ByHand(prompt, prompt + built, read, budget, chunk))
    model.set_attn_implementation("by hand")
    tokens = [*row.beginning.prompt.tolist(), *row.beginning.tokens, *row.written]
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("budget", "chunk"), [(24, 2), (48, 8)])
def test_guesses_are_those_of_the_model_with_chosen_keys(family: str, budget: int, chunk: int) -> None:
    model = make_tiny_model(family, **FAMILIES[family])
    rows = [RowText(number, each) for number, each in enumerate(rows_with_shared_prefixes())]
    with walking(model) as walk:
        forward = kept_forward(walk, [row.beginning for row in rows])
        drafter = RetrievalDrafter(forward, Chooser(), budget=budget, chunk=chunk, report=DecodingReport())
        drafter.begin(rows)
        ends = read(forward, rows, [list(row.beginning.tokens) for row in rows])
        for row, token in zip(rows, ends, strict=True):
            row.written.append(token)
        first = drafter.propose(rows, [GUESSES] * len(rows))
        checks = [[row.written[-1], *guess[:2]] for row, guess in zip(rows, first, strict=True)]
        read(forward, rows, checks)
        for row, guess in zip(rows, first, strict=True):
            if guess:
                forward.forget(row.number, 1)  # the second guess was wrong
                row.written += [guess[0], (guess[1] + 1) % 200]
                drafter.checked(row, guess, 1)
        second = drafter.propose(rows, [GUESSES - 1] * len(rows))
    assert first[-1] == second[-1] == []  # a short prompt: nothing can be left out of it
    for row, one, two in list(zip(rows, first, second, strict=True))[:-1]:
        assert two == guessed_by_hand(model, row, 2, GUESSES - 1, budget, chunk)
        del row.written[1:]
        assert one == guessed_by_hand(model, row, 2, GUESSES, budget, chunk)


def kept_forward(walk: LayerWalk, rows: list[Beginning]) -> KeptForward:
    """The forward pass behind prompts that were walked in one pack."""
    (pack,) = make_plan([row.prompt for row in rows], ONE_PACK).packs
    kept = KeptPack(pack)
    list(walk.read_logits(pack, kept=kept))
    read_of = {number: read for read, (_, numbers) in enumerate(pack.reads) for number in numbers}
    return KeptForward(walk, kept.select([read_of[number] for number in range(len(rows))]))


def read(forward: KeptForward, rows: list[RowText], tokens: list[list[int]]) -> list[int]:
    """Read tokens of each row; the likeliest one behind the last of each."""
    logits = torch.cat(list(forward([(row.number, own) for row, own in zip(rows, tokens, strict=True)])))
    ends = np.cumsum([len(own) for own in tokens]) - 1
    return logits[torch.as_tensor(ends)].argmax(dim=-1).tolist()


def test_a_cache_whose_guesses_are_wrong_is_built_anew() -> None:
    model, budget, chunk = make_tiny_model("llama"), 24, 2
    row = RowText(0, rows_with_shared_prefixes()[3])
    with walking(model) as walk:
        forward = kept_forward(walk, [row.beginning])
        drafter = RetrievalDrafter(forward, Chooser(), budget=budget, chunk=chunk, report=DecodingReport())
        drafter.begin([row])
        row.written += read(forward, [row], [list(row.beginning.tokens)])
        for _ in range(REBUILD_LEAST):
            (before,) = drafter.propose([row], [3])
            last = list(row.written)
            row.written += read(forward, [row], [[row.written[-1]]])
            drafter.checked(row, before, 0)
        (after,) = drafter.propose([row], [3])
    assert after == guessed_by_hand(model, row, 2 + REBUILD_LEAST, 3, budget, chunk)
    row.written = last
    assert before == guessed_by_hand(model, row, 2, 3, budget, chunk)


def drafters(kind: str, draft: DraftModel, chooser: Chooser, budget: int, chunk: int, report: DecodingReport) -> Any:
    """Makes the drafter of this kind for a forward pass."""

    def make(forward: KeptForward) -> Drafter:
        def small() -> Drafter:
            return StreamingDrafter(draft, chooser, vocabulary=211, sinks=4, recent=20)

        if kind == "draft":
            return small()
        inner = small() if kind == "hierarchy" else None
        own = RetrievalDrafter(
            forward, chooser, budget=budget, chunk=chunk, report=report, inner=inner, inner_tokens=2
        )
        return own if inner is None else HierarchyDrafter(own, small())

    return make


HOW = [(0.0, 1, 24, 4), (0.0, 6, 64, 8), (1.0, 4, 40, 1)]
"""Temperature, guesses, budget, chunk."""
CASES = [("llama", kind, *how) for kind in ("retrieval", "draft", "hierarchy") for how in HOW]
CASES += [(family, kind, *HOW[1]) for family in list(FAMILIES)[1:] for kind in ("retrieval", "hierarchy")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "kind", "temperature", "guesses", "budget", "chunk"), CASES)
def test_texts_are_those_without_a_drafter(
    family: str, kind: str, temperature: float, guesses: int, budget: int, chunk: int
) -> None:
    rows = rows_with_shared_prefixes()
    writing = Writing(14, frozenset({5}), temperature=temperature, speculation=Speculation(tokens=guesses))
    small = make_tiny_model("llama", num_hidden_layers=1)
    with walking(make_tiny_model(family, **FAMILIES[family])) as walk, walking(small) as draft:
        report, chooser = DecodingReport(), Chooser(temperature)
        wanted = written(walk, rows, writing)
        make = drafters(kind, DraftModel(draft, 256), chooser, budget, chunk, report)
        found = written(walk, rows, writing, make_drafter=make, report=report)
    assert [text.tokens for text in found] == [text.tokens for text in wanted]
    assert report.drafters[kind].proposed > 0
    if kind == "hierarchy" and guesses > 1:
        assert report.drafters["draft"].proposed > 0


@pytest.mark.parametrize("kind", ["retrieval", "hierarchy"])
def test_without_memory_for_a_cache_nothing_is_guessed_and_texts_stay(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    rows, writing = rows_with_shared_prefixes(), Writing(8, speculation=Speculation(tokens=4))
    small = make_tiny_model("llama", num_hidden_layers=1)
    with walking(make_tiny_model("qwen3")) as walk, walking(small) as draft:
        report = DecodingReport()
        wanted = written(walk, rows, writing)
        monkeypatch.setattr(PaddedLayer, "choose", run_out)
        make = drafters(kind, DraftModel(draft, 256), Chooser(), 40, 4, report)
        found = written(walk, rows, writing, make_drafter=make, report=report)
    assert [text.tokens for text in found] == [text.tokens for text in wanted]
    assert ("hierarchy" in report.drafters) == (kind == "hierarchy")  # the draft model guesses for short prompts


def test_recurrent_layers_have_no_retrieval_cache() -> None:
    with walking(make_tiny_model("qwen3_5_text")) as walk:
        forward = kept_forward(walk, rows_with_shared_prefixes())
        with pytest.raises(UnsupportedModelError, match="cannot forget"):
            RetrievalDrafter(forward, Chooser(), budget=24, chunk=4, report=DecodingReport())
