"""What stands between a prompt and the text that a model writes behind it: the label, and the words of a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.prompts.labels import Labels

_WORD = "x"  # before a text that follows a prompt's last word


class Beginnings:
    """The tokens that a text begins behind, by the set of label tokens that a prompt has and the label it got.

    `texts` are what the template gives for each label, as `rationale_texts` makes them.
    """

    def __init__(self, tokenizer: Any, labels: Labels, texts: Mapping[str, str]) -> None:
        self._encoder = Encoder(tokenizer)
        self._labels = labels
        self._texts = [texts[name].strip() for name in labels.names]
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}

    def tokens(self, labels: int, label: int) -> tuple[int, ...]:
        """What stands behind a prompt that has this number of `Labels.sets`, when it got this label; at least one
        token."""
        key = labels, label
        if key not in self._known:
            self._known[key] = self._encoded(self._labels.sets[labels][label][0], label)
        return self._known[key]

    def text(self, beginning: Sequence[int], tokens: Sequence[int]) -> str:
        """The text of `tokens` behind a beginning, without special tokens and the white space around it."""
        before, whole = self._decode(beginning), self._decode([*beginning, *tokens])
        return (whole[len(before) :] if whole.startswith(before) else self._decode(tokens)).strip()

    def _encoded(self, token: int, label: int) -> tuple[int, ...]:
        # A label's own token, as it is scored, and what follows it. A text that does not begin with the label stands
        # behind a space where the label does.
        text, name = self._texts[label], self._labels.names[label]
        if text.startswith(name):
            return (token, *self._following(name, text[len(name) :]))
        spaced = self._spelled_with_space(token)
        return tuple(self._following(_WORD, f" {text}") if spaced else self._ids(text))

    def _spelled_with_space(self, token: int) -> bool:
        # Whether a token brings the space before a word.
        return self._encoder.decode([*self._ids(_WORD), token])[len(_WORD) :].startswith(" ")

    def _following(self, before: str, text: str) -> list[int]:
        # The tokens of a text behind another one.
        first, whole = self._ids(before), self._ids(before + text)
        return whole[len(first) :] if whole[: len(first)] == first else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return [int(number) for number in self._encoder.encode([text], special=False)[0]] if text else []

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._encoder.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
