"""Which prompts are compressed, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.compress.selection import full_prefixes
from prefillcli.compress.settings import Compression
from prefillcli.compress.worth import WorthCompressing
from prefillcli.data.rows import Prompt


def keep_rates(
    prompts: Sequence[Prompt], keep: float, settings: Compression, worth: WorthCompressing
) -> list[float | None]:
    """The keep rate of each prompt; None for those to be read in full. `keep` is the job's rate.

    A row's own `keep` and `specprefill` come first. A prompt is also read in full if a prefix of it is computed in
    full anyway and compressing the rest does not pay.
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
