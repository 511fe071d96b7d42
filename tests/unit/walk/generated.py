"""What transformers writes by itself, and what is written behind kept packs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, Speculation, Writing
from prefillcli.walk.decoding import KeptPack, MakeDrafter, RowRoom, write_behind
from prefillcli.walk.lockstep import RowText
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.test_walk import ONE_PACK, Prompt, set_forest_attention

NEAR = 1e-4  # logits that are closer than this are a tie


class Reference(NamedTuple):
    """A text of transformers, with the stop token if there is one, and the gap between the two best logits at each."""

    tokens: list[int]
    gaps: list[float]


def generated(model: Any, beginning: Beginning, writing: Writing) -> Reference:
    """`generate(do_sample=False)` of the model's own eager forward."""
    model.set_attn_implementation("eager")
    ids = torch.as_tensor(np.concatenate([beginning.prompt, beginning.tokens]))[None].long()
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            max_new_tokens=writing.tokens,
            eos_token_id=sorted(writing.stop_tokens) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.cat([logits.float().topk(2).values for logits in found.logits])
    return Reference(found.sequences[0, ids.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def computed(model: Any, beginning: Beginning, writing: Writing) -> Reference:
    """The same by whole forwards without a cache: some classes generate with other positions than they read with."""
    model.set_attn_implementation("eager")
    ids, gaps = [*beginning.prompt.tolist(), *beginning.tokens], []
    for _ in range(writing.tokens):
        with torch.inference_mode():
            logits = model(input_ids=torch.as_tensor([ids]), use_cache=False).logits[0, -1].float()
        best = logits.topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return Reference(ids[-writing.tokens :], gaps)


def beginnings(prompts: Sequence[Prompt], seed: int = 0) -> list[Beginning]:
    """One of each prompt, behind which one to four tokens stand."""
    rng = np.random.default_rng(seed)
    return [
        Beginning(prompt, tuple(rng.integers(3, 200, 1 + number % 4).tolist()), str(number))
        for number, prompt in enumerate(prompts)
    ]


def written(
    walk: LayerWalk,
    rows: Sequence[Beginning],
    writing: Writing,
    *,
    limits: Limits = ONE_PACK,
    room: RowRoom | None = None,
    make_drafter: MakeDrafter = lambda forward: None,
    report: DecodingReport | None = None,
) -> list[Continuation]:
    """What is written behind these rows, pack by pack."""
    found: dict[int, Continuation] = {}
    plan = make_plan([row.prompt for row in rows], limits, positions=[row.positions for row in rows])
    for pack in plan.packs:
        kept = KeptPack(pack)
        list(walk.read_logits(pack, kept=kept))
        wanted = [(read, number) for read, (_, numbers) in enumerate(pack.reads) for number in numbers]
        texts = write_behind(
            walk,
            kept,
            [(read, rows[number]) for read, number in wanted],
            writing,
            room=room,
            make_drafter=make_drafter,
            report=report,
        )
        found |= {number: text for (_, number), text in zip(wanted, texts, strict=True)}
    return [found[number] for number in range(len(rows))]


@contextmanager
def walking(model: Any, chunk_tokens: int = 97) -> Iterator[LayerWalk]:
    """A walk of the model."""
    set_forest_attention(model)
    with closing(LayerWalk(model, chunk_tokens=chunk_tokens)) as walk:
        yield walk


class Teacher:
    """Guesses a random number of tokens of known texts, and often a wrong one behind some that are right."""

    name = "teacher"

    def __init__(self, texts: Mapping[str, Sequence[int]], seed: int = 0) -> None:
        self._texts = texts
        self._rng = np.random.default_rng(seed)
        self.right = self.wrong = 0

    def begin(self, rows: Sequence[RowText]) -> None: ...

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        found = []
        for row, room in zip(rows, most, strict=True):
            text = list(self._texts[row.beginning.key][row.position :][: int(self._rng.integers(0, room + 1))])
            if text and self._rng.random() < 0.6:
                at = int(self._rng.integers(len(text)))
                text[at:] = self._rng.integers(3, 200, len(text) - at).tolist()
            found.append(text)
        return found

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        self.right += accepted
        self.wrong += accepted < len(proposed)

    def end(self, row: RowText) -> None: ...


def assert_same_texts(found: Sequence[Continuation], wanted: Sequence[Reference], writing: Writing) -> int:
    """The same tokens, but behind near ties of the reference. Returns how many texts part there."""
    parted = 0
    for own, (tokens, gaps) in zip(found, wanted, strict=True):
        stopped = bool(tokens) and tokens[-1] in writing.stop_tokens
        text = tokens[:-1] if stopped else tokens
        if list(own.tokens) != text:
            same = next((at for at, pair in enumerate(zip(own.tokens, text, strict=False)) if pair[0] != pair[1]),
                        min(len(own.tokens), len(text)))  # fmt: skip
            assert gaps[same] < NEAR, (same, gaps[same], own.tokens, text)
            parted += 1
            continue
        assert own.finish_reason == ("stop" if stopped else "length")
        if len(own.tokens) + stopped == len(gaps) and gaps:
            assert abs(own.gap - min(gaps)) < NEAR
    return parted


def greedy(tokens: int, stop_tokens: Collection[int] = (), guesses: int = 6) -> Writing:
    return Writing(tokens, frozenset(stop_tokens), speculation=Speculation(tokens=guesses))
