"""The models that estimate the importance of tokens: a draft that walks prompts, or the model's own first layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prefillcli.core.request import Thinning, Tick
from prefillcli.errors import UsageError
from prefillcli.models.open import stop_tokens_of
from prefillcli.plan.pack import Limits, Pack, account
from prefillcli.plan.plan import make_plan
from prefillcli.prompts.translation import Overlap
from prefillcli.reading.compress.selection import (
    FAILED,
    NO_MEMORY,
    NO_VOTE,
    NOT_FINITE,
    TOO_LONG,
    VOCABULARY,
    ImportanceEstimate,
    Picker,
    budget,
    chunk_count,
    select_all,
    tails,
)
from prefillcli.reading.compress.settings import Compression, Reduce
from prefillcli.stats.arrays import Float32Array, Int32Array
from prefillcli.walk.decoding import look_ahead
from prefillcli.walk.forest import WatchedLayer
from prefillcli.walk.layout import Tree, oldest_key
from prefillcli.walk.walk import Thinned

if TYPE_CHECKING:
    from prefillcli.rows.records import Prompt
    from prefillcli.walk.walk import LayerWalk

# Importance: the attention of the draft's queries to each token of a prompt.
#
# For each layer, head and query: softmax in float32 of the query's scores over the prompt's keys, smoothed by
# average pooling over tokens. Then the maximum over layers and heads is taken (SpecPrefill, section 3.2; pooling and
# its order as in the authors' code), and the queries are combined: by the best rank that any of them gives, by their
# mean as in the paper, or by their maximum. Layers whose window does not span the whole prompt have no vote, and
# neither have layers without attention.


SCORE_BYTES = 64 << 20  # float32 scores at a time


@dataclass(slots=True)
class PromptQueries:
    """A prompt and the queries that vote on its tokens.

    `path` has the places of its keys, as (start, end) runs. Query i is row `queries[i]` of a watched layer. It sees
    the first `sees[i]` keys; a window counts from its depth `depths[i]`.
    """

    path: list[tuple[int, int]]
    queries: list[int]
    sees: list[int]
    depths: list[int]
    votes: Tensor | None = field(default=None, init=False)  # float32 [queries, tokens], the largest so far
    voters: list[int] = field(default_factory=list, init=False)  # numbers of the layers that have voted

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.path)


def last_tokens(path: list[tuple[int, int]], count: int) -> list[int]:
    """Return the last `count` tokens of a path, or all."""
    tokens: list[int] = []
    for start, end in reversed(path):
        tokens = list(range(max(start, end - (count - len(tokens))), end)) + tokens
        if len(tokens) == count:
            break
    return tokens


def last_queries(path: list[tuple[int, int]], queries: list[int]) -> PromptQueries:
    """Return the queries of the prompt's own last tokens, in the rows `queries`: each sees the tokens up to itself."""
    tokens = sum(end - start for start, end in path)
    depths = list(range(tokens - len(queries), tokens))
    return PromptQueries(path, queries, [depth + 1 for depth in depths], depths)


def add_votes(layer: WatchedLayer, prompts: Sequence[PromptQueries], pool: int) -> None:
    """Let a layer vote on the tokens of every prompt. `pool` is the width of the pooling, an odd number; 1: none."""
    window = layer.scoring.window
    for prompt in prompts:
        if oldest_key(window, max(prompt.depths)) <= 0:
            _vote(layer, prompt, pool)
            prompt.voters.append(layer.number)


def _vote(layer: WatchedLayer, prompt: PromptQueries, pool: int) -> None:
    keys, scoring, tokens = layer.keys, layer.scoring, prompt.tokens
    kv_heads, width = keys.shape[0], keys.shape[2]
    queries = layer.queries[:, torch.as_tensor(prompt.queries, device=keys.device)]
    grouped = queries.float().reshape(kv_heads, -1, width)  # the query heads of a K,V head are neighbours
    hidden = None
    if min(prompt.sees) < tokens:
        sees = torch.as_tensor(prompt.sees, device=keys.device).repeat(queries.shape[0] // kv_heads)
        hidden = torch.arange(tokens, device=keys.device)[None, :] >= sees[:, None]
    at_once = max(1, SCORE_BYTES // (4 * grouped.shape[1] * tokens))
    for head in range(0, kv_heads, at_once):
        heads = slice(head, head + at_once)
        parts = [grouped[heads] @ keys[heads, start:end].float().transpose(1, 2) for start, end in prompt.path]
        scores = torch.cat(parts, dim=-1).mul_(scoring.scale)
        if scoring.softcap is not None:
            scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        shares = torch.softmax(scores, dim=-1)
        if pool > 1:
            shares = _average(shares, pool)
        votes = shares.view(-1, len(prompt.queries), tokens).amax(dim=0)
        prompt.votes = votes if prompt.votes is None else torch.maximum(prompt.votes, votes)


def _average(shares: Tensor, width: int) -> Tensor:
    # Mean over the `width` neighbours of each number in the last dimension, zeros beyond its ends. Like torch's
    # avg_pool1d with padding, but from sums of 1, 2, 4, ... neighbours: several times faster on the CPU.
    tokens = shares.shape[-1]
    run = F.pad(shares, (width // 2, width // 2))
    total = torch.zeros_like(shares)
    size, start = 1, 0
    while size <= width:
        if width & size:
            total += run[..., start : start + tokens]
            start += size
        if 2 * size <= width:
            run = run[..., :-size] + run[..., size:]
        size *= 2
    return total.div_(width)


def spread(overlap: Overlap, votes: Tensor) -> Tensor:
    """Return the votes on the target's tokens, [queries, tokens], from those on the draft's, [queries, draft tokens].

    A token gets the largest vote on the draft's tokens that it overlaps.
    """
    first, width = (
        torch.as_tensor(each.astype(np.int64), device=votes.device) for each in (overlap.first, overlap.width)
    )
    found = votes[:, first]
    for step in range(1, int(overlap.width.max(initial=1))):
        wider = torch.nonzero(width > step)[:, 0]
        found[:, wider] = torch.maximum(found[:, wider], votes[:, first[wider] + step])
    return found


def importance(
    prompt: PromptQueries, reduce: Reduce, chunk: int, overlap: Overlap | None = None
) -> Float32Array | None:
    """Return the importance of each token, float32 [tokens]; None where no layer had a vote.

    With an `overlap` tokens and chunks are those of another tokenizer.

    `rank`: every query ranks the chunks of `chunk` tokens by their mean votes, and a token's importance is 1 over the
    best rank that any query gives its chunk. A query that attends a little to many tokens then counts as much as one
    that attends to a single token. `mean` and `max` combine the votes themselves. Votes that are not finite stay so.
    """
    votes = prompt.votes
    if votes is None:
        return None
    if overlap is not None:
        votes = spread(overlap, votes)
    if reduce == "rank" and bool(votes.isfinite().all()):
        means = torch.stack([part.mean(dim=1) for part in torch.split(votes, chunk, dim=1)], dim=1)
        order = means.argsort(dim=1, descending=True, stable=True)
        ascending = torch.arange(1, order.shape[1] + 1, device=order.device)
        places = torch.empty_like(order).scatter_(1, order, ascending.expand_as(order))
        reduced = (1.0 / places.amin(dim=0)).repeat_interleave(chunk)[: votes.shape[1]]
    else:
        reduced = votes.amax(dim=0) if reduce == "max" else votes.mean(dim=0)
    return np.asarray(reduced.float().cpu().numpy(), np.float32)


# The importance of a prompt's tokens, float32 [tokens], or the reason why there is none; and the layers that voted.
Found = tuple[Float32Array | None, str | None, tuple[int, ...]]


class Draft:
    """A walk over a small model with the target's tokenizer. Others may use the walk between two estimates.

    Raises UsageError if none of its layers could vote. `limits` come from `models.law.draft_limits`. `max_length` is
    the longest prompt that its position encoding takes. `on_failure` is called with the error of a failed pack.
    """

    def __init__(
        self,
        walk: LayerWalk,
        settings: Compression,
        *,
        limits: Limits,
        max_length: int,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.tokens = 0  # tokens computed so far
        self.failure: BaseException | None = None  # its last error
        self.walk = walk
        self._settings = settings
        self._limits = limits
        self._max_length = max_length - settings.decoded
        self._vocabulary = int(walk.model.get_input_embeddings().weight.shape[0])
        self._stop_tokens = stop_tokens_of(walk.model)
        self._on_failure = on_failure
        self.walk.check_queries()
        if not self._attends():
            self.close()
            raise UsageError(
                f"--draft: none of its {len(self.walk.layers)} layers attends to tokens, so none can vote on them\n"
                "name a small model that has attention layers"
            )

    def close(self) -> None:
        self.walk.close()

    def estimate(
        self,
        prompts: Sequence[Int32Array],
        tick: Tick = lambda tokens: None,
        overlaps: Sequence[Overlap] | None = None,
    ) -> list[ImportanceEstimate]:
        """Make one estimate for each prompt, int32 [tokens] each. A common prefix is computed once.

        With `overlaps`, one for each prompt, the estimates are of the tokens of another tokenizer. A failure concerns
        the prompts of one pack and becomes their reason.
        """
        estimates = [ImportanceEstimate(reason=self._refusal(tokens)) for tokens in prompts]
        able = [number for number, found in enumerate(estimates) if found.reason is None]
        for pack in make_plan([prompts[number] for number in able], self._limits).packs:
            begun = time.monotonic()
            try:
                votes = self._votes(pack, tick)
                found = {n: self._importance(own, overlaps[able[n]] if overlaps else None) for n, own in votes.items()}
            except Exception as error:  # whatever the error, the rows can be read in full
                self.failure = error
                self._on_failure(error)
                found = dict.fromkeys(pack.prompts, (None, FAILED, ()))
            seconds = time.monotonic() - begun
            for part in account(pack):
                own = estimates[able[part.prompt]]
                own.seconds = seconds * part.share
                own.importance, own.reason, own.voters = found[part.prompt]
        return estimates

    def _attends(self) -> bool:
        # Whether any layer attends, by a trial with a prompt of one token.
        (pack,) = make_plan([np.zeros(1, dtype=np.int32)], Limits(1, 1)).packs
        try:
            with closing(self.walk.watch(pack, [0])) as layers:
                return next(layers, None) is not None
        except Exception:  # it will fail on the rows too, and they report it
            return True

    def _refusal(self, tokens: Int32Array) -> str | None:
        if len(tokens) > self._max_length:
            return TOO_LONG
        if int(tokens.max()) >= self._vocabulary:
            return VOCABULARY
        most = self._limits.max_tokens
        if len(tokens) > (most if self._limits.read_tokens is None else min(most, self._limits.read_tokens)):
            return NO_MEMORY
        return None

    def _importance(self, prompt: PromptQueries, overlap: Overlap | None) -> Found:
        settings = self._settings
        found = importance(prompt, settings.query_reduce, settings.select_chunk, overlap)
        return (*_checked(found), tuple(prompt.voters))

    def _votes(self, pack: Pack, tick: Tick) -> dict[int, PromptQueries]:
        # The votes of the queries of each prompt of a pack.
        settings = self._settings
        tree = Tree(pack)
        paths = [tree.path(node) for node, _ in pack.reads]
        windows = [last_tokens(path, settings.window) for path in paths]
        watched = sorted({token for window in windows for token in window})
        row = {token: number for number, token in enumerate(watched)}
        queries = [
            last_queries(path, [row[token] for token in window]) for path, window in zip(paths, windows, strict=True)
        ]
        if settings.decoded:
            ahead = look_ahead(self.walk, pack, watched, settings.decoded, self._stop_tokens, tick)
            for read, (prompt, count) in enumerate(zip(queries, ahead.counts, strict=True)):
                _add_decoded(prompt, [len(watched) + step * len(paths) + read for step in range(count)])
            for layer in ahead.layers:
                add_votes(layer, queries, settings.pool)
        else:
            with closing(self.walk.watch(pack, watched, tick)) as layers:
                for layer in layers:
                    add_votes(layer, queries, settings.pool)
        self.tokens += len(pack.tokens)
        return {number: own for own, (_, numbers) in zip(queries, pack.reads, strict=True) for number in numbers}


def _add_decoded(prompt: PromptQueries, queries: list[int]) -> None:
    # Add the queries of tokens that were decoded after the prompt: each sees the whole prompt.
    tokens = prompt.tokens
    prompt.queries += queries
    prompt.sees += [tokens] * len(queries)
    prompt.depths += range(tokens, tokens + len(queries))


def _checked(found: Float32Array | None) -> tuple[Float32Array | None, str | None]:
    if found is None:
        return None, NO_VOTE
    return (found, None) if np.isfinite(found).all() else (None, NOT_FINITE)


# The model as its own draft: tokens that its first layers attend to go on to the others (FastKV, arXiv 2502.01068).
#
# The first layers compute all tokens. In the last of them, the last tokens of each prompt vote on its keys, as a
# draft's do in all its layers. The other layers compute the kept tokens, at their original positions.


@dataclass(frozen=True, slots=True)
class SelfDraftRule:
    """A `ThinningRule`: it keeps the tokens that each prompt's last tokens attend to in its layer, and both ends.

    `rates` has the keep rate of each prompt, and how many of its last tokens are always kept. The other prompts go on
    whole, shared tokens included. Prompts of a read go on together, at the highest of their rates.
    """

    layer: int
    settings: Compression
    rates: Mapping[int, tuple[float, int]]

    def of(self, prompts: Collection[int]) -> SelfDraftRule:
        rates = {prompt: self.rates[prompt] for prompt in prompts if prompt in self.rates}
        return SelfDraftRule(self.layer, self.settings, rates)

    def watched(self, pack: Pack, tree: Tree) -> list[int]:
        found: set[int] = set()
        for read, (node, _) in enumerate(pack.reads):
            if self._rate(pack, read) is not None:
                found.update(last_tokens(tree.path(node), self.settings.window))
        return sorted(found)

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> list[Thinned]:
        paths = [tree.path(node) for node, _ in pack.reads]
        tokens = [np.concatenate([np.arange(*run) for run in path]) for path in paths]
        rates = [self._rate(pack, read) for read in range(len(paths))]
        row = {token: number for number, token in enumerate(self.watched(pack, tree))}
        found: list[Float32Array | None] = []
        reasons: list[str | None] = []
        for path, rate in zip(paths, rates, strict=True):
            votes, reason = (None, None) if rate is None else self._votes(path, row, layer)
            found.append(votes)
            reasons.append(reason)
        kept = select_all(
            [pack.tokens[own] for own in tokens],
            found,
            [None if rate is None else rate[0] for rate in rates],
            self.settings,
            lasts=[1 if rate is None else rate[1] for rate in rates],
        )
        return [
            Thinned(whole if own is None else whole[own], reason)
            for whole, own, reason in zip(tokens, kept, reasons, strict=True)
        ]

    def _rate(self, pack: Pack, read: int) -> tuple[float, int] | None:
        # The rate of a read and the number of its last tokens that are always kept; None if it goes on whole.
        rates = [self.rates.get(prompt) for prompt in pack.reads[read][1]]
        able = [rate for rate in rates if rate is not None]
        if len(able) < len(rates):
            return None
        return max(rate for rate, _ in able), max(last for _, last in able)

    def _votes(
        self, path: list[tuple[int, int]], row: Mapping[int, int], layer: WatchedLayer
    ) -> tuple[Float32Array | None, str | None]:
        # The importance of a prompt's tokens, float32 [tokens], or why it has none.
        prompt: PromptQueries = last_queries(path, [row[token] for token in last_tokens(path, self.settings.window)])
        add_votes(layer, [prompt], self.settings.pool)
        votes = importance(prompt, self.settings.query_reduce, self.settings.select_chunk)
        if votes is None:
            return None, NO_VOTE
        return (votes, None) if bool(np.isfinite(votes).all()) else (None, NOT_FINITE)


@dataclass(frozen=True, slots=True)
class SelfThinning(Thinning):
    """After `layer`, a number, the share `keep` of the tokens goes on, and always the `last` ones."""

    layer: int
    keep: float
    last: int
    settings: Compression

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.settings.per_row

    def most_kept(self, tokens: int) -> int:
        # Chosen tokens may be among those that are kept anyway.
        chosen = budget(self.keep, chunk_count(tokens, self.settings.select_chunk)) * self.settings.select_chunk
        return min(tokens, chosen + self.settings.keep_first + self.last)

    def rule(self, thinnings: Mapping[int, Thinning]) -> SelfDraftRule:
        own = {number: each for number, each in thinnings.items() if isinstance(each, SelfThinning)}
        rates = {number: (each.keep, each.last) for number, each in own.items()}
        return SelfDraftRule(self.layer, self.settings, rates)


# The model's own first layers: tokens that they attend to go on to the others.


class SelfDraft(Picker):
    """Leaves the choice to the model, which makes it after `layer`. Estimates are empty."""

    method = "self-draft"

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        return [ImportanceEstimate() for _ in prompts]

    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> list[SelfThinning | None]:
        lasts = tails([prompt.tokens for prompt in prompts], keeps, settings) if any(keeps) else [0] * len(prompts)
        return [
            None if keep is None else SelfThinning(self.layer, keep, last, settings)
            for keep, last in zip(keeps, lasts, strict=True)
        ]


# The states that a walk leaves in recurrent layers.
