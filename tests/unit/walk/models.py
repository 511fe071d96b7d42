"""Small models as transformers knows them, behind the seam of lock-step decoding: what they read is computed anew."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from prefillcli.walk.continuations import Beginning
from prefillcli.walk.lockstep import NewTokens, RowText

VOCABULARY = 32


@cache
def tiny_llama(seed: int = 0) -> Any:
    """A random model of two layers whose logits differ by some units."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def generated(model: Any, beginning: Beginning, tokens: int, stop_token: int | None = None) -> list[int]:
    """What `model.generate` writes greedily, with the stop token."""
    prompt = torch.tensor([[*beginning.prompt.tolist(), *beginning.tokens]])
    how = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=stop_token, pad_token_id=0)
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
    return written[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


def beginnings(count: int, seed: int = 0, longest: int = 12) -> list[Beginning]:
    """Prompts of different lengths, and one to three tokens behind each."""
    draw = np.random.default_rng(seed)
    return [
        Beginning(
            draw.integers(0, VOCABULARY, int(draw.integers(1, longest))).astype(np.int32),
            tuple(draw.integers(0, VOCABULARY, int(draw.integers(1, 4))).tolist()),
            key=f"row {number}",
        )
        for number in range(count)
    ]


class Recomputing:
    """A model that computes each row anew, from its prompt on. `texts` is what it has read of each row."""

    def __init__(self, model: Any, rows: Sequence[Beginning], *, can_forget: bool = True, piece: int = 5) -> None:
        self._model = model
        self._piece = piece
        self.can_forget = can_forget
        self.texts = {number: each.prompt.tolist() for number, each in enumerate(rows)}
        self.passes: list[list[tuple[int, list[int]]]] = []

    @torch.inference_mode()
    def __call__(self, new: NewTokens) -> Iterator[Tensor]:
        self.passes.append([(row, list(tokens)) for row, tokens in new])
        assert len({row for row, _ in new}) == len(new)
        logits = []
        for row, tokens in new:
            assert tokens
            self.texts[row] += tokens
            logits.append(self._model(torch.tensor([self.texts[row]])).logits[0, -len(tokens) :].float())
        yield from torch.cat(logits).split(self._piece)

    def forget(self, row: int, tokens: int) -> None:
        assert self.can_forget
        assert tokens > 0
        del self.texts[row][-tokens:]

    def drop(self, rows: Collection[int]) -> None:
        for row in rows:
            del self.texts[row]


class RandomGuesses:
    """Guesses tokens that are mostly wrong; it is sometimes silent, and sometimes knows the `right` texts."""

    name = "random"

    def __init__(self, seed: int, right: Sequence[Sequence[int]] | None = None) -> None:
        self._draw = np.random.default_rng(seed)
        self._right = right
        self.going: set[int] = set()

    def begin(self, rows: Sequence[RowText]) -> None:
        self.going = {row.number for row in rows}

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        guessed = []
        for row, tokens in zip(rows, most, strict=True):
            guess = self._draw.integers(0, VOCABULARY, int(self._draw.integers(0, tokens + 1))).tolist()
            if self._right is not None:
                known = min(len(guess), int(self._draw.integers(0, 8)))
                right = list(self._right[row.number][row.position : row.position + known])
                guess[: len(right)] = right
            guessed.append(guess)
        return guessed

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        assert row.number in self.going
        behind = row.written[len(row.written) - accepted - (row.finish_reason != "stop") :]
        assert behind[:accepted] == list(proposed[:accepted])

    def end(self, row: RowText) -> None:
        self.going.remove(row.number)
