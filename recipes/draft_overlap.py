"""How far two drafts pick the same tokens of the same prompts.

    python -m recipes.draft_overlap out/real/shared.held.parquet --model out/real/model \
        --draft out/real/model --draft out/real/draft --keep 0.2 --limit 24

Of the tokens that the first draft picks, it prints the share that each other draft picks too, and the share that a
choice at random would. Tokens that are kept anyway do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from prefillcli.data.rows import Int64Array
from prefillcli.jobs.opening import open_inputs
from prefillcli.jobs.scorer import load_here, make_scorer
from prefillcli.options.commands import ScoreSettings
from prefillcli.reading.compress.compress import Compress
from prefillcli.reading.compress.selection import ends, tails


def open_tokens(settings: ScoreSettings) -> tuple[list[Int64Array], list[Int64Array]]:
    """For each prompt the tokens that the draft of the settings picks, and those that it may pick from."""
    opening = open_inputs(settings)
    with opening.inputs.windows(opening.inputs.builder.close) as coming:
        prompts = next(coming).prompts
    scorer = make_scorer(opening.inputs, opening.parts)
    with scorer.loaded:
        load_here(scorer)
        compressor = Compress(settings).compressor(scorer)
        rates = compressor.keeps(prompts)
        found = compressor.estimate(prompts, rates, lambda tokens: None)
        requests = compressor.select(prompts, rates, found)
    rules = compressor.settings
    lasts = tails([prompt.tokens for prompt in prompts], rates, rules)
    picked, free = [], []
    for request, prompt, last in zip(requests, prompts, lasts, strict=True):
        anyway = ends(len(prompt.tokens), rules.keep_first, last)
        kept = np.arange(len(prompt.tokens)) if request.kept is None else request.kept
        picked.append(kept[~anyway[kept]])
        free.append(np.flatnonzero(~anyway))
    return picked, free


def overlap(first: Sequence[Int64Array], other: Sequence[Int64Array]) -> float:
    """The share of the tokens of `first` that are in `other` too, over all prompts. Raises ValueError without any."""
    common = sum(len(np.intersect1d(one, two)) for one, two in zip(first, other, strict=True))
    if not (total := sum(map(len, first))):
        raise ValueError("nothing was picked")
    return common / total


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="How far drafts pick the same tokens as the first of them.")
    parser.add_argument("input")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True, action="append")
    parser.add_argument("--keep", type=float, default=0.2)
    parser.add_argument("--labels", default="positive,negative")
    parser.add_argument("--limit", type=int, default=24)
    args = parser.parse_args(arguments)
    given: dict[str, Any] = {"inputs": (args.input,), "model": args.model, "keep": args.keep, "chat": False}
    given |= {"labels": args.labels, "limit": args.limit, "compress_above": 0}
    first: list[Int64Array] = []
    for draft in args.draft:
        picked, free = open_tokens(ScoreSettings.model_validate(given | {"draft": draft}))
        first = first or picked
        chance = sum(map(len, picked)) / sum(map(len, free))
        print(f"{draft}: picks {overlap(first, picked):.1%} of what {args.draft[0]} picks; by chance {chance:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
