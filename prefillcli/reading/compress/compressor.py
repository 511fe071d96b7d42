"""The prompts of a job, compressed: the choice of prompts, rate, picker and kept tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from prefillcli.core.request import ReadPrompt, Request, Thinning, Tick, TokenReason, answer_requests, draw
from prefillcli.errors import PrefillError, ResourceError, brief, out_of_resource
from prefillcli.models.shape import NoCostModel, Shape, prefill_flops, thinned_flops
from prefillcli.options.settings import JobSettings
from prefillcli.plan.pack import Limits
from prefillcli.prompts.encoding import spans_of
from prefillcli.prompts.settings import RowColumns
from prefillcli.reading.compress.load import SpecPrefill, own_layers, plan_draft, translator_of
from prefillcli.reading.compress.selection import (
    ENOUGH_ROWS,
    FALLBACKS,
    NOT_FINITE,
    Bm25,
    ImportanceEstimate,
    Picker,
    RandomChunks,
    compressed_rows,
    faulty_rows,
    full_prefixes,
    select_all,
    tails,
)
from prefillcli.reading.compress.settings import Compression, compression_of, keep_rate
from prefillcli.rows.records import (
    FALLBACK,
    FULL,
    ErrorCode,
    Prompt,
    RowBatch,
    RowError,
    Window,
    is_fallback,
)
from prefillcli.runtime import log
from prefillcli.stats.flips import flip_bound, rows_for

if TYPE_CHECKING:
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.engines.base import PlanEngine
    from prefillcli.models.open import Opened

# The prompts for which compression pays: those with enough tokens, or with a gain predicted by the cost model.


# The cost of picking and gathering tokens, as a share of the model's operations over the whole prompt: up to 0.03 in
# docs/benchmarks.md, 0.03 to 0.30 in the paper, on unified memory.
OVERHEAD = 0.05
# Where the cost model does not know an architecture, compression is assumed to pay above this number of tokens.
UNKNOWN_ABOVE = 8192


class WorthCompressing:
    """The decision whether compressing a prompt pays.

    `target` and `draft` are text configurations of transformers. Without a target `compress_above` must be a number;
    without a draft no model picks the tokens, unless the target does so itself after `own_layers` of its layers.
    """

    def __init__(
        self, compression: Compression, target: Any = None, draft: Any = None, *, own_layers: int | None = None
    ) -> None:
        self._compression = compression
        self._own_layers = own_layers
        self._target = target
        self._draft = draft
        self._speedup = lru_cache(maxsize=1 << 16)(self._predict)

    def __call__(self, tokens: int, keep: float) -> bool:
        """Return whether a prompt of `tokens` is to be compressed to the rate `keep`."""
        above = self._compression.compress_above
        if above != "auto":
            return tokens > above
        speedup = self.speedup(tokens, keep)
        return tokens > UNKNOWN_ABOVE if speedup is None else speedup > 1

    def speedup(self, tokens: int, keep: float) -> float | None:
        """Return the predicted speedup for a prompt alone: 1 / (r + k + overhead).

        r: the draft's operations, decoding included, divided by the model's over the whole prompt. k: the model's
        operations over the kept tokens, ends included, divided by the same. A target that picks tokens itself reads
        the whole prompt in its first layers: r is 0, and k counts these layers. None where the cost model does not
        know an architecture.
        """
        return self._speedup(tokens, keep)

    def why_not(self, tokens: int, keep: float) -> str:
        """Return why compressing a prompt does not pay, as the end of a sentence about its tokens."""
        above = self._compression.compress_above
        if above != "auto":
            return f"are not more than compress_above {above:,}"
        speedup = self.speedup(tokens, keep)
        if speedup is None:
            return f"are not more than {UNKNOWN_ABOVE:,}, and the cost model does not know this architecture"
        return f"would be read at {speedup:.2f} times the speed with this draft, which does not pay"

    def _predict(self, tokens: int, keep: float) -> float | None:
        how = self._compression
        kept = min(tokens, ceil(keep * tokens) + how.keep_first + how.tail)
        try:
            full = prefill_flops(self._target, tokens).total
            draft = 0.0
            if self._draft is not None:
                draft = prefill_flops(self._draft, tokens + how.decoded, head_tokens=how.decoded).total
            if self._own_layers is None:
                sparse = prefill_flops(self._target, kept).total
            else:
                sparse = thinned_flops(self._target, tokens, kept, self._own_layers).total
        except NoCostModel:
            return None
        return 1 / (draft / full + sparse / full + OVERHEAD)


# The prompts that are compressed, and their rates.


def keep_rates(
    prompts: Sequence[Prompt], keep: float, settings: Compression, worth: WorthCompressing
) -> list[float | None]:
    """Return the keep rate of each prompt; None for those to be read in full. `keep` is the job's rate.

    A row's own `keep` and `specprefill` come first. A prompt is also read in full if one of its prefixes is computed
    in full anyway and compressing the rest does not pay.
    """
    keeps: list[float | None] = []
    ends = settings.keep_first + settings.tail  # a shorter prompt has nothing to drop
    for prompt in prompts:
        own = prompt.keep if prompt.keep is not None else keep
        compressed = own < 1 and prompt.specprefill is not False and len(prompt.tokens) > ends
        keeps.append(own if compressed else None)
    tokens = [prompt.tokens for prompt in prompts]
    while any(own is not None for own in keeps):
        in_full = [own is None for own in keeps]
        reach = [0] * len(prompts) if settings.per_row else full_prefixes(tokens, in_full)
        short = [
            number
            for number, (prompt, own) in enumerate(zip(prompts, keeps, strict=True))
            if own is not None and prompt.specprefill is None and not worth(len(prompt.tokens) - reach[number], own)
        ]
        if not short:
            break
        for number in short:
            keeps[number] = None
    return keeps


class Compressor:
    """Decides how the target reads each prompt of a window.

    `picker` picks the tokens. `keep` is the job's rate, and `worth` decides for which prompts compression pays.
    `target_window` is the target's sliding window, if it has one; `settings` take it into account.
    """

    def __init__(
        self,
        picker: Picker,
        settings: Compression,
        *,
        keep: float,
        worth: WorthCompressing,
        target_window: int | None = None,
    ) -> None:
        self.picker = picker
        self.keep = keep
        self.worth = worth
        self.settings = settings.for_target(target_window)

    def close(self) -> None:
        """Free memory."""
        self.picker.close()

    def compress(self, prompts: Sequence[Prompt], tick: Tick = lambda tokens: None) -> list[Request]:
        """Return one request for each prompt, in their order."""
        keeps = self.keeps(prompts)
        return self.select(prompts, keeps, self.estimate(prompts, keeps, tick))

    def keeps(self, prompts: Sequence[Prompt], keep: float | None = None) -> list[float | None]:
        """Return the keep rate of each prompt; None for those to be read in full. `keep` replaces the job's rate."""
        return keep_rates(prompts, self.keep if keep is None else keep, self.settings, self.worth)

    def estimate(
        self, prompts: Sequence[Prompt], keeps: Sequence[float | None], tick: Tick
    ) -> list[ImportanceEstimate]:
        """Return the picker's estimates; empty ones for prompts without a keep rate."""
        wanted = [number for number, keep in enumerate(keeps) if keep is not None]
        estimates = [ImportanceEstimate() for _ in prompts]
        found = self.picker.estimate([prompts[number] for number in wanted], tick)
        for number, estimate in zip(wanted, found, strict=True):
            estimates[number] = estimate
        return estimates

    def select(
        self, prompts: Sequence[Prompt], keeps: Sequence[float | None], estimates: Sequence[ImportanceEstimate]
    ) -> list[Request]:
        """Return how the target reads each prompt."""
        kept = self.picker.select(prompts, estimates, keeps, self.settings)
        requests = []
        for prompt, own, found in zip(prompts, kept, estimates, strict=True):
            if isinstance(own, Thinning):
                requests.append(Request(prompt, method=self.picker.method, thinning=own))
            elif own is not None and len(own) < len(prompt.tokens):
                requests.append(Request(prompt, own, self.picker.method, found.seconds))
            else:
                method = FULL if found.reason is None else FALLBACK + found.reason
                requests.append(Request(prompt, None, method, found.seconds))
        return requests

    def why_no_rate(self, prompts: Sequence[Prompt], keeps: Sequence[float | None], number: int) -> str:
        """Return why the method `keeps` gives prompt `number` no keep rate."""
        prompt, settings, worth = prompts[number], self.settings, self.worth
        tokens, own = len(prompt.tokens), self.keep if prompt.keep is None else prompt.keep
        if prompt.specprefill is False:
            return "its column specprefill is false"
        if prompt.keep is not None and prompt.keep >= 1:
            return "its column keep is 1"
        if own >= 1:
            return "--keep is 1"
        if tokens <= settings.keep_first + settings.tail:
            return f"of its {tokens:,} tokens the first {settings.keep_first:,} and last {settings.tail:,} stay anyway"
        if not worth(tokens, own):
            return f"its {tokens:,} tokens {worth.why_not(tokens, own)}"
        in_full = [keep is None and other != number for other, keep in enumerate(keeps)]
        reach = full_prefixes([each.tokens for each in prompts], in_full)[number]
        return (
            f"other rows are read in full and compute its first {reach:,} tokens anyway; the {tokens - reach:,} "
            f"after them {worth.why_not(tokens - reach, own)}"
        )


def why_in_full(request: Request) -> str | None:
    """Return why a prompt that has a keep rate is read in full after all; None if it is compressed."""
    if request.compressed:
        return None
    if is_fallback(request.method):
        return f"{request.method}: {FALLBACKS[request.method.removeprefix(FALLBACK)].meaning}"
    return "the chosen tokens, the first and last ones and those that other rows keep are all tokens of it"


def compressor_of(
    settings: JobSettings, opened: Opened, draft: Any, plan: Mapping[str, Any] = MappingProxyType({})
) -> Compressor:
    """Return the compressor of a job, to the rate of the settings or, with `--keep auto`, of the job's ledger.

    Raises UsageError where the model should pick tokens itself and none of its layers can.
    """
    compression = compression_of(settings.compression)
    own = own_layers(compression, opened) if settings.compression.drafts_itself else None
    return Compressor(
        _picker(settings, compression, opened, draft, own),
        compression,
        keep=keep_rate(settings.compression, plan),
        worth=worth_of(compression, opened, own),
        target_window=Shape(opened.files.config).sliding_window,
    )


def _picker(settings: JobSettings, compression: Compression, opened: Opened, draft: Any, own: int | None) -> Picker:
    # The way to pick tokens that `--draft` names.
    from prefillcli.reading.compress.draft import SelfDraft  # takes torch along

    if own is not None:
        return SelfDraft(own - 1)
    if settings.compression.draft == "random":
        return RandomChunks(compression.select_chunk, settings.input.seed)
    if settings.compression.draft == "bm25":
        return Bm25(lambda prompt: (spans_of(opened.tokenizer, [prompt]) or {}).get(prompt.row))
    return SpecPrefill(draft, translator_of(opened))


def worth_of(compression: Compression, opened: Opened, own: int | None) -> WorthCompressing:
    """Return the decision for which prompts compression pays, by a draft or by the model's `own` first layers."""
    draft = None if own is not None or opened.draft is None else opened.draft.config
    return WorthCompressing(compression, opened.files.config, draft, own_layers=own)


# A job's windows, compressed; with `--keep auto` the rate is chosen on the first one that has rows to compress.


# `--keep auto`: the smallest keep rate that a sample of the rows allows.
#
# The rates are tested from the safest, the largest, down to the first that fails: fixed-sequence testing
# (Angelopoulos et al., Learn then Test, 2021, arXiv 2110.01052, section 4.2). So the probability that the chosen
# rate flips more answers than allowed is at most 5 %, although up to five rates are tested on the same rows at 5 %
# each: to err, the first rate in this order that is too small must pass, and that is one test.


RATES = (0.7, 0.5, 0.3, 0.2, 0.1)  # the keep rates that are tested, in this order, until one fails
ALLOWED_FLIPS = 1  # the sample is large enough for a rate with one flip to pass


@dataclass(frozen=True, slots=True)
class Trial:
    """A keep rate, tried on the sample. `bound`: the flip rate is lower with 95 % confidence (one-sided, exact)."""

    keep: float
    rows: int
    flips: int
    bound: float


@dataclass(frozen=True, slots=True)
class KeepChoice:
    """The chosen rate, which is 1 if the first tested one failed, and the trials."""

    keep: float
    trials: tuple[Trial, ...]
    rows_needed: int  # the fewest rows that can prove a rate: without any flip


def choose_keep(
    compressor: Compressor,
    engine: PlanEngine,
    prompts: Sequence[Prompt],
    estimates: Sequence[ImportanceEstimate],
    chosen: Sequence[int],
    max_flips: float,
    tick: Tick = lambda tokens: None,
) -> KeepChoice:
    """Try keep rates on the `chosen` ones of the `prompts`, compressed together with all the others.

    A row flips if its likeliest label is not the whole prompt's. A rate passes if its flips are few enough to prove a
    flip rate of at most `max_flips`. The last rate that passes before the first that fails is chosen; a rate that
    compresses too few of these rows to fail or pass is left out.
    """
    needed = rows_for(max_flips)
    trials: list[Trial] = []
    passed = 1.0
    if len(chosen) < needed:
        return KeepChoice(1.0, (), needed)

    def likeliest(requests: Sequence[Request]) -> list[int]:
        # Prompts may have different labels.
        return [int(each.logprobs.argmax()) for each in answer_requests(engine, requests, tick)]

    full = dict(zip(chosen, likeliest([Request(prompts[number]) for number in chosen]), strict=True))
    for keep in RATES:
        requests = compressor.select(prompts, compressor.keeps(prompts, keep), estimates)
        tried = [number for number in chosen if requests[number].compressed]
        found = likeliest([requests[number] for number in tried]) if tried else []
        flips = sum(label != full[number] for label, number in zip(found, tried, strict=True))
        trials.append(Trial(keep, len(tried), flips, flip_bound(flips, len(tried))))
        if len(tried) < needed:
            continue  # too few rows are worth compressing at this high rate: the trial proves nothing
        if trials[-1].bound > max_flips:
            break
        passed = keep
    return KeepChoice(passed, tuple(trials), needed)


ALMOST_ALL = 0.95  # share of a window's tokens: a job with a keep rate that still reads more gets a warning


class WindowCompressor:
    """Decides how the model reads the prompts of each window of a `scorer`.

    With `--keep auto` it chooses the rate, which the ledger of the scorer has from then on. `methods` has the number
    of rows that were scored before, by method.
    """

    def __init__(self, scorer: ModelScorer, compressor: Compressor, *, methods: Mapping[str, int]) -> None:
        self.compressor = compressor
        self._scorer = scorer
        self._settings: JobSettings = scorer.settings
        self._chooses = self._settings.compression.keep == "auto" and "keep" not in scorer.ledger.settled
        self._methods = Counter(methods)
        self._warned = False

    def __call__(self, window: Window, done: Collection[int], tick: Tick) -> list[Request]:
        """Return how the model reads a window's prompts. `tick` is called with the tokens of each step; it may raise.

        Raises PrefillError if the draft fails on everything; rows that are `done` were counted before.
        """
        compressor, prompts = self.compressor, window.prompts
        wanted = compressor.keeps(prompts, min(RATES) if self._chooses else None)
        estimates = compressor.estimate(prompts, wanted, tick)
        self._check(estimates)
        if self._chooses:
            self._choose(window, wanted, estimates, tick)
        keeps = compressor.keeps(prompts)
        requests = compressor.select(prompts, keeps, estimates)
        if requests and compressor.keep < 1 and not self._warned:
            self._warned = self._warn_of_little(requests, keeps)
        self._methods.update(request.method for request in requests if request.prompt.row not in done)
        return requests

    def _warn_of_little(self, requests: Sequence[Request], keeps: Sequence[float | None]) -> bool:
        # If the model reads nearly all tokens of a window in spite of its keep rate, explain why on stderr.
        read, whole = (
            sum(each) for each in zip(*((r.most_kept, len(r.prompt.tokens)) for r in requests), strict=True)
        )
        if read <= ALMOST_ALL * whole:
            return False
        compressor, prompts = self.compressor, [each.prompt for each in requests]
        number = max(range(len(requests)), key=lambda at: requests[at].most_kept)
        full = sum(not each.compressed for each in requests)
        if keeps[number] is None:
            why = compressor.why_no_rate(prompts, keeps, number)
        else:
            why = why_in_full(requests[number]) or "its first and last tokens, which are always kept, are most of it"
        log.warning(
            f"--keep {self.compressor.keep:g} leaves {read / whole:.0%} of the tokens of "
            f"{len(requests):,} rows, {full:,} of them are read in full; row "
            f"{prompts[number].row}, for one: {why}"
        )
        return True

    def _check(self, estimates: Sequence[ImportanceEstimate]) -> None:
        # Raise PrefillError if the draft has failed on all rows so far: `ENOUGH_ROWS`, or those it is tried on.
        # Otherwise the model would read the whole job in full. The rows of earlier windows are written.
        before = self._methods
        if compressed_rows(before) or any(found.importance is not None for found in estimates):
            return
        failed = sum(found.reason is not None and FALLBACKS[found.reason].fault for found in estimates)
        if failed and (self._chooses or failed + faulty_rows(before) >= ENOUGH_ROWS):
            error = self.compressor.picker.failure
            why = FALLBACKS[NOT_FINITE].meaning if error is None else f"{type(error).__name__}: {brief(error)}"
            kind = ResourceError if error is not None and out_of_resource(error) else PrefillError
            raise kind(
                f"the draft has failed on all rows so far, {failed + faulty_rows(before):,}: {why}\n"
                "take another --draft, or leave it out to read all rows in full"
            )

    def _choose(
        self,
        window: Window,
        wanted: Sequence[float | None],
        estimates: Sequence[ImportanceEstimate],
        tick: Tick,
    ) -> None:
        scorer, prompts, max_flips = self._scorer, window.prompts, self._settings.flips.max_flips
        most = scorer.pool.limits.max_tokens
        able = [
            number
            for number, keep in enumerate(wanted)
            if keep is not None and prompts[number].keep is None and Request(prompts[number]).size <= most
        ]
        if not able:
            return  # a later window may have rows to compress
        chosen = draw(able, self._settings.flips.audit or rows_for(max_flips, ALLOWED_FLIPS), window.index)
        choice = choose_keep(self.compressor, scorer.pool, prompts, estimates, chosen, max_flips, tick)
        self.compressor.keep, self._chooses = choice.keep, False
        scorer.ledger.settle({**scorer.ledger.settled, "keep": choice.keep, "keep_auto": asdict(choice)})
        if choice.keep == 1:
            log.warning(f"--keep auto: {_why_all(choice, len(chosen), max_flips)}")


def _why_all(choice: KeepChoice, rows: int, max_flips: float) -> str:
    most = f"{max_flips:.2%}"
    if not choice.trials:
        return (
            f"{rows:,} rows to try it on cannot prove that at most {most} flip, {choice.rows_needed:,} could; all "
            "rows are read in full"
        )
    first = choice.trials[0]
    return (
        f"keeping {first.keep:g} does not prove that at most {most} flip ({first.flips:,} of {first.rows:,} rows "
        "did), so smaller rates were not tried; all rows are read in full"
    )


# A forecast of how prompts would be compressed, without a draft.


KEEP_RATES = (1.0, 0.5, 0.3, 0.2, 0.1)


class KeptTokens:
    """The requests for prompts, as if the draft found the first chunks of each prompt the most important.

    Raises UsageError and ResourceError as loading would.
    """

    def __init__(self, settings: JobSettings, opened: Opened, budget: int) -> None:
        compression, shape = compression_of(settings.compression), Shape(opened.files.config)
        own = own_layers(compression, opened) if settings.compression.drafts_itself else None
        self.chosen = settings.compression.keep if isinstance(settings.compression.keep, float) else None
        self.rates = sorted({*KEEP_RATES, self.chosen or 1.0}, reverse=True)
        self._own_layers = own or 0
        self._depth = self._own_layers / shape.layers
        self._worth = worth_of(compression, opened, own)
        self._compression = compression.for_target(shape.sliding_window)
        self._translator = translator_of(opened)
        self._reach = opened.max_length  # tokens of the longest prompt that the draft can read
        self._drafted: tuple[Sequence[Prompt], list[int | None]] = ((), [])
        if opened.draft is not None:
            limits = Limits(**plan_draft(opened, compression, budget, settings.packs.chunk_tokens, {})["limits"])
            fits = limits.max_tokens if limits.read_tokens is None else min(limits.max_tokens, limits.read_tokens)
            self._reach = min(opened.draft.max_length - compression.decoded, fits)

    def requests(self, prompts: Sequence[Prompt], rate: float) -> list[Request]:
        rates = keep_rates(prompts, rate, self._compression, self._worth)
        if self._own_layers:
            from prefillcli.reading.compress.draft import SelfDraft

            chosen = SelfDraft(self._own_layers - 1).select(prompts, [], rates, self._compression)
            return [Request(prompt, thinning=own) for prompt, own in zip(prompts, chosen, strict=True)]
        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        equal = np.zeros(longest, dtype=np.float32)  # of equally important chunks the first are kept
        importances = [
            equal[: len(prompt.tokens)] if own is not None and length is not None and length <= self._reach else None
            for prompt, own, length in zip(prompts, rates, self._draft_lengths(prompts), strict=True)
        ]
        kept = select_all([prompt.tokens for prompt in prompts], importances, rates, self._compression)
        return [
            Request(prompt) if own is None or len(own) == len(prompt.tokens) else Request(prompt, own)
            for prompt, own in zip(prompts, kept, strict=True)
        ]

    def layers(self, requests: Sequence[Request]) -> float:
        whole = sum(len(request.tokens) for request in requests)
        if not self._own_layers or not whole:
            return 1.0
        return self._depth + (1 - self._depth) * sum(request.most_kept for request in requests) / whole

    def _draft_lengths(self, prompts: Sequence[Prompt]) -> list[int | None]:
        # The number of tokens that each prompt has for the draft; None for one that it cannot read. The same prompts
        # come again for each rate.
        if self._translator is None:
            return [len(prompt.tokens) for prompt in prompts]
        if self._drafted[0] is not prompts:
            self._drafted = prompts, self._translator.lengths([prompt.tokens for prompt in prompts])
        return self._drafted[1]


# A compressed prompt in `prefill inspect`.


def inspected(
    compressor: Compressor,
    prompts: Sequence[Prompt],
    shared: Sequence[int],
    number: int,
    tick: Tick,
) -> ReadPrompt:
    """Return how the prompt `number` of a window is compressed. `shared` has the number of tokens that each prompt
    shares with it."""
    prompt, compression = prompts[number], compressor.settings
    keeps = compressor.keeps(prompts)
    if keeps[number] is None:
        return ReadPrompt.whole(prompt, compressor.why_no_rate(prompts, keeps, number))
    related = [other for other, common in enumerate(shared) if common]
    relatives, common = [prompts[other] for other in related], [shared[other] for other in related]
    rates = [keeps[other] for other in related]
    own = related.index(number)
    near = [tokens >= min(compression.select_chunk, len(prompt.tokens)) for tokens in common]
    if compression.per_row:
        near = [at == own for at in range(len(related))]
    # Prompts that are not `near` do not affect the row's kept tokens: they share no whole chunk with it, or every row
    # is selected by itself. So the draft does not read them. They still count as compressed if they would be.
    asked = [keep if close else None for keep, close in zip(rates, near, strict=True)]
    estimates = compressor.estimate(relatives, asked, tick)
    for at, prompt in enumerate(relatives):
        if rates[at] is not None and not near[at]:
            estimates[at] = ImportanceEstimate(np.zeros(len(prompt.tokens), np.float32))
    requests = compressor.select(relatives, rates, estimates)
    ends = tails([each.tokens for each in relatives], rates, compression)
    neighbours = [
        Neighbour(len(relatives[at].tokens), ends[at], estimates[at].importance is None, common[at])
        for at in range(len(related))
        if at != own and not compression.per_row
    ]
    why = why_kept(requests[own], ends[own], neighbours, compression)
    return ReadPrompt(requests[own], estimates[own].importance, why, estimates[own].voters, why_in_full(requests[own]))


def why_kept(request: Request, tail: int, others: Sequence[Neighbour], compression: Compression) -> list[TokenReason]:
    """Return why each token of a prompt is kept or dropped.

    Its last `tail` tokens are always kept; `others` are the prompts that are compressed together with it.
    """
    tokens = len(request.prompt.tokens)
    if request.kept is None:
        return ["full"] * tokens
    why = np.full(tokens, "chosen", dtype=object)
    for other in others:
        begin = 0 if other.in_full else max(other.tokens - other.tail, 0)  # always kept, as its own end
        why[begin : other.shared] = "shared"
    why[max(tokens - tail, 0) :] = "last"
    why[: compression.keep_first] = "first"
    dropped = np.ones(tokens, dtype=bool)
    dropped[request.kept] = False
    why[dropped] = "dropped"
    return cast("list[TokenReason]", why.tolist())


class Neighbour(NamedTuple):
    """A prompt that is compressed together with another one.

    It has this number of `tokens`. The last `tail` are always kept, and the first `shared` are the same in both
    prompts.
    """

    tokens: int
    tail: int
    in_full: bool
    shared: int


# Columns by which rows choose their own compression.


def with_compression(prompts: list[Prompt], batch: RowBatch, errors: dict[int, RowError]) -> list[Prompt]:
    """Return the prompts with their rows' own settings of compression; a row with a wrong value becomes an error."""
    keeps, choices = batch.columns.get("keep"), batch.columns.get("specprefill")
    place = {row: at for at, row in enumerate(batch.rows.tolist())}
    done = []
    for prompt in prompts:
        at = place[prompt.row]
        keep = None if keeps is None else keeps[at]
        choice = None if choices is None else choices[at]
        if isinstance(keep, float) and math.isnan(keep):
            keep = None
        if keep is not None and (type(keep) not in (int, float) or not 0 < keep <= 1):
            errors[prompt.row] = RowError(
                ErrorCode.INVALID_KEEP, f"keep is {keep!r}: it must be a rate above 0 and up to 1"
            )
        elif choice is not None and type(choice) is not bool:
            errors[prompt.row] = RowError(
                ErrorCode.INVALID_KEEP, f"specprefill is {choice!r}: it must be true, false or null"
            )
        else:
            prompt.keep, prompt.specprefill = keep, choice
            done.append(prompt)
    return done


COMPRESSION_COLUMNS = RowColumns(("keep", "specprefill"), with_compression)
