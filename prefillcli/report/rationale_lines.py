"""What a run wrote, in a few lines for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prefillcli.report.numbers import counted, minutes_and_seconds
from prefillcli.report.rationale_use import RationaleUse
from prefillcli.report.visible import visible


def rationale_lines(use: RationaleUse) -> Iterator[tuple[str, str]]:
    """The lines that rationales and evidence add to the table of a run: name and text."""
    if use.rows:
        yield "rationales", f"{counted(use.rows, 'row')} of {counted(use.tokens, 'token')}; {_by(use.finish_reasons)}"
        if set(use.sources) != {"full"}:
            yield "written from", _by(use.sources)
    if use.evidence_rows:
        yield "evidence", f"{counted(use.evidence_rows, 'row')} without each of their sections"
    if use.written_tokens:
        yield "writing", _writing(use)
    if use.again_prompts:
        yield (
            "read again",
            f"{counted(use.again_prompts, 'prompt')}, {counted(use.again_tokens, 'token')} in "
            f"{minutes_and_seconds(use.prefill_seconds)}; {use.kept_prompts:,} kept from scoring",
        )
    if use.drafters:
        yield (
            "speculation",
            "; ".join(
                f"{name} {each.accepted:,} of {counted(each.proposed, 'token')} right"
                + ("" if each.acceptance is None else f" ({each.acceptance:.1%})")
                for name, each in use.drafters.items()
            ),
        )


def _writing(use: RationaleUse) -> str:
    text = f"{counted(use.written_tokens, 'token')} in {minutes_and_seconds(use.decode_seconds)}"
    if use.tokens_per_second is not None:
        text += f", {use.tokens_per_second:,.0f} tokens/s"
    if use.passes_per_token is not None:
        text += f", {use.passes_per_token:.2f} passes a token"
    return text


def _by(rows: Mapping[str, int]) -> str:
    most_first = sorted(rows.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{visible(name, line=True)} {number:,}" for name, number in most_first)
