"""What a run reports on likelihoods: perplexity and bits per byte over all rows."""

from __future__ import annotations

import math

from pydantic import BaseModel

from prefillcli.data.output.columns import Counts
from prefillcli.report.section import Section, three_digits


class LikelihoodUse(BaseModel):
    """Sums over the scored rows, and the figures that follow from them."""

    logprob: float = 0.0  # of all targets together
    target_tokens: int = 0
    target_bytes: int = 0
    greedy_rows: int = 0  # rows whose target greedy decoding would write
    perplexity: float | None = None  # of a token: exp(-logprob / target_tokens)
    bits_per_byte: float | None = None  # -logprob / ln 2 / target_bytes


def use_of(counts: Counts | None) -> LikelihoodUse:
    """The figures of an output with these counts."""
    found = LikelihoodUse()
    if counts is None or not counts.tallies.likelihood.tokens:
        return found
    own = counts.tallies.likelihood
    return LikelihoodUse(
        logprob=own.logprob,
        target_tokens=own.tokens,
        target_bytes=own.bytes,
        greedy_rows=own.greedy,
        # Beyond that a double has no such number.
        perplexity=math.exp(min(-own.logprob / own.tokens, 709.0)),
        bits_per_byte=-own.logprob / math.log(2) / own.bytes if own.bytes else None,
    )


def section(found: LikelihoodUse) -> Section:
    """The section on the figures."""
    made = Section(title="Likelihood")
    if found.perplexity is None or found.bits_per_byte is None:
        return made
    made.lines = [
        ("perplexity", f"{three_digits(found.perplexity)} a token, over {found.target_tokens:,} tokens"),
        ("bits per byte", f"{found.bits_per_byte:.4f}, over {found.target_bytes:,} bytes"),
        ("greedy", f"{found.greedy_rows:,} targets are what greedy decoding would write"),
    ]
    made.tiles = [("perplexity", three_digits(found.perplexity))]
    made.metric("perplexity", "Perplexity per token over all targets.", found.perplexity)
    made.metric("bits_per_byte", "Bits per byte over all targets.", found.bits_per_byte)
    made.summary = {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    return made
