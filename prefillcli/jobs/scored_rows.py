"""What an engine's answer makes of a row."""

from __future__ import annotations

from prefillcli.compress.answers import kept_tokens, method_of
from prefillcli.compress.request import Request
from prefillcli.data.rows import ScoredRow, early_exit_method
from prefillcli.engines.base import Answer


def scored_row(request: Request, answer: Answer, *, audited: bool = False) -> ScoredRow:
    """What an answer makes of a row. Of an `audited` one it has what an exit would have given, and the full read."""
    logprobs, layer, audit = answer.logprobs, answer.exit_layer, None
    if audited:
        audit = answer.logprobs
        if answer.early is not None:
            layer, logprobs = answer.early
    return ScoredRow(
        row=request.prompt.row,
        logprobs=logprobs,
        shared_tokens=answer.shared_tokens,
        computed_tokens=answer.computed_tokens,
        kept_tokens=kept_tokens(request, answer),
        seconds=answer.seconds + request.pick_seconds,
        method=method_of(request, answer) if layer is None else early_exit_method(method_of(request, answer)),
        exit_layer=None if layer is None else layer + 1,
        audit=audit,
    )
