"""What a pack's tokens are charged to: every computed token to one prompt, its time to all that share it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefillcli.plan.exit_work import LayersDone, in_full
from prefillcli.plan.pack import Pack


@dataclass(frozen=True, slots=True)
class Account:
    """A prompt's part of a pack.

    `shared_tokens` of its tokens were computed once for several prompts. `computed_tokens` add up to the pack's and
    its `charged_tokens`: a shared token is counted with the first prompt that reads it. `share` is the prompt's part
    of the pack's time (adds up to 1), a shared token's cost divided among its prompts. `skipped` are the layers of a
    token that exits have spared, counted like `computed_tokens`; K,V that were computed twice are taken off, so a pack
    where hardly any read has left may have spared less than nothing.
    """

    prompt: int
    shared_tokens: int
    computed_tokens: int
    share: float
    skipped: float = 0.0


def account(pack: Pack, done: LayersDone | None = None) -> list[Account]:
    """One account for each prompt answered in `pack`. `done` says which layers of it were computed, by default all."""
    below = [0] * len(pack.parents)
    for node, prompts in pack.reads:
        below[node] += len(prompts)
    for node in range(len(below) - 1, -1, -1):
        if pack.parents[node] >= 0:
            below[pack.parents[node]] += below[node]
    lengths = [b - a for a, b in zip(pack.offsets[:-1], pack.offsets[1:], strict=True)]
    work, spared = _work(done, lengths)
    further = pack.kept_nodes  # later packs' prompts share them too
    shared = [0] * len(below)  # tokens from the root to the node that several prompts share
    fair = [0.0] * len(below)
    for node, parent in enumerate(pack.parents):
        held = sum(pack.held[number].length for number in pack.attach[node])
        inherited = (shared[parent], fair[parent]) if parent >= 0 else (held, 0.0)
        shared[node] = inherited[0] + (lengths[node] if below[node] > 1 or node in further else 0)
        fair[node] = inherited[1] + work[node] / max(below[node], 1)
    charged: set[int] = set()
    charged_above: set[int] = set()  # held nodes
    accounts = []
    for node, prompts in pack.reads:
        for prompt in prompts:
            computed, skipped = 0, 0.0
            step = node
            while step >= 0 and step not in charged:
                charged.add(step)
                computed += lengths[step]
                skipped += spared[step]
                if pack.parents[step] < 0:
                    above = [number for number in pack.attach[step] if pack.held[number].charged]
                    computed += sum(pack.held[number].length for number in above if number not in charged_above)
                    charged_above.update(above)
                step = pack.parents[step]
            accounts.append(Account(prompt, shared[node], computed, fair[node], skipped))
    return accounts


def _work(done: LayersDone | None, lengths: list[int]) -> tuple[list[float], list[float]]:
    """Each node's part of the pack's work, and the layers of a token that were spared of it."""
    tokens = np.asarray(lengths, dtype=np.float64)
    if done is None:
        return (tokens / tokens.sum()).tolist(), [0.0] * len(lengths)
    work = tokens * done.work
    return (work / work.sum()).tolist(), (tokens * in_full(done.layers) - work).tolist()
