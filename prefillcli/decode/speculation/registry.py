"""Which drafters there are, and what each guesses by: known before anything is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A drafter by name: `guesses` says for people where its tokens come from.

    One that `needs_draft` guesses with a draft model that has the tokens of the model.
    """

    name: str
    guesses: str
    needs_draft: bool = False


DRAFTERS: dict[str, DrafterKind] = {
    kind.name: kind
    for kind in (
        DrafterKind("lookup", "what followed the same tokens in the row's own prompt and text"),
        DrafterKind("suffix", "what followed the same tokens most often in earlier texts of the job"),
        DrafterKind("retrieval", "what the model writes when it sees only the best parts of the prompt"),
        DrafterKind("draft", "what the draft model writes when it sees the first and the latest tokens", True),
        DrafterKind("hierarchy", "what retrieval writes, where the draft model guesses ahead", True),
    )
}
