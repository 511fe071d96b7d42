"""Which prompts are compressed, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.compress.selection import full_prefixes
from prefillcli.compress.settings import Compression
from prefillcli.data.rows import Prompt


def keep_rates(prompts: Sequence[Prompt], keep: float, settings: Compression) -> list[float | None]:
    """The keep rate of each prompt; None for those to be read in full. `keep` is the job's.

    A row's own `keep` and `specprefill` come first; a prompt whose tokens behind a prefix that is computed in full
    anyway are at most `compress_above` is read in full too.
    """
    keeps: list[float | None] = []
    ends = settings.keep_first + settings.tail  # of a shorter prompt nothing can be dropped
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
            for number, prompt in enumerate(prompts)
            if not in_full[number]
            and prompt.specprefill is None
            and len(prompt.tokens) - reach[number] <= settings.compress_above
        ]
        if not short:
            break
        for number in short:
            keeps[number] = None
    return keeps
