"""The likelihoods of a job: sums over its rows, and the figures that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from prefillcli.core.roles import Judge
from prefillcli.errors import counted
from prefillcli.report.finding import Finding
from prefillcli.report.section import Section, three_digits

if TYPE_CHECKING:
    from prefillcli.core.run import Reached
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.destination import Manifest
    from prefillcli.rows.output.tallies import Counts


class LikelihoodJudge(Judge):
    """The likelihoods in the report of a job."""

    def reported(self, report: RunReport, reached: Reached) -> None:
        report.add(use_of(reached.counts))

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        if manifest.counts is not None and manifest.counts.tallies.likelihood.tokens:
            report.add(use_of(manifest.counts))


class LikelihoodUse(Finding):
    """Sums over the scored rows, and the figures that follow from them."""

    key: ClassVar[str] = "likelihood"
    place: ClassVar[int] = 1

    logprob: float = 0.0  # of all targets together
    target_tokens: int = 0
    target_bytes: int = 0
    target_words: int = 0
    greedy_rows: int = 0  # rows whose target greedy decoding would write
    perplexity: float | None = None  # of a token: exp(-logprob / target_tokens)
    word_perplexity: float | None = None  # exp(-logprob / target_words)
    byte_perplexity: float | None = None  # exp(-logprob / target_bytes)
    bits_per_byte: float | None = None  # -logprob / ln 2 / target_bytes

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section on the figures."""
        made = Section(title="Likelihood")
        if self.perplexity is None or self.bits_per_byte is None or self.word_perplexity is None:
            return [made]
        made.lines = [
            ("perplexity", f"{three_digits(self.perplexity)} a token, over {counted(self.target_tokens, 'token')}"),
            ("word perplexity", f"{three_digits(self.word_perplexity)}, over {self.target_words:,} words"),
            ("bits per byte", f"{self.bits_per_byte:.4f}, over {self.target_bytes:,} bytes"),
            ("greedy", f"{self.greedy_rows:,} targets are what greedy decoding would write"),
        ]
        made.tiles = [("perplexity", three_digits(self.perplexity))]
        made.metric("perplexity", "Perplexity per token over all targets.", self.perplexity)
        made.metric("word_perplexity", "Perplexity per word over all targets.", self.word_perplexity)
        made.metric("bits_per_byte", "Bits per byte over all targets.", self.bits_per_byte)
        made.summary = {name: getattr(self, name) for name in ("perplexity", "word_perplexity", "bits_per_byte")}
        return [made]


def use_of(counts: Counts | None) -> LikelihoodUse:
    """Return the figures of an output with these counts."""
    found = LikelihoodUse()
    if counts is None or not counts.tallies.likelihood.tokens:
        return found
    own = counts.tallies.likelihood
    return LikelihoodUse(
        logprob=own.logprob,
        target_tokens=own.tokens,
        target_bytes=own.bytes,
        target_words=own.words,
        greedy_rows=own.greedy,
        perplexity=_perplexity(own.logprob, own.tokens),
        word_perplexity=_perplexity(own.logprob, own.words),
        byte_perplexity=_perplexity(own.logprob, own.bytes),
        bits_per_byte=-own.logprob / math.log(2) / own.bytes,
    )


def _perplexity(logprob: float, count: int) -> float:
    # Beyond that a double has no such number.
    return math.exp(min(-logprob / count, 709.0))
