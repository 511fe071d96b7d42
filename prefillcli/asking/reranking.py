"""Rerankers that their files identify: the prompt and the labels they were trained with, from the columns `query` and
`document`. With another prompt, scores look right but are wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from prefillcli.asking.labels import DOCUMENT, PAIR, QUERY
from prefillcli.errors import UsageError
from prefillcli.models.files import Reranker
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.builder import PromptBuilder, prompt_builder
from prefillcli.prompts.encoding import Marks
from prefillcli.prompts.labels import ClassLabels, parse_labels
from prefillcli.prompts.questions import Label
from prefillcli.prompts.settings import PromptSettings
from prefillcli.prompts.templates import ChatTemplate, RowTemplate
from prefillcli.prompts.thinking import AS_USUAL
from prefillcli.rows.records import ErrorCode, RowBatch, RowError
from prefillcli.runtime import log
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from prefillcli.models.open import Opened
    from prefillcli.prompts.labels import Labels

_PROBES = (("one", "two"), ("three", "two"), ("one", "four"))
_SHOWN = 40  # characters of a prompt, in a message


class RerankBuilder(PromptBuilder):
    """Makes prompts of a query and a document by the model's own chat template."""

    def __init__(self, tokenizer: Any, settings: PromptSettings, reranker: Reranker, **given: Any) -> None:
        if settings.choices != AS_USUAL:
            raise UsageError(
                "--thinking, --chat-option and --answer-prefix change a chat, and the model is a reranker, whose own "
                "template makes its prompts\nleave them out"
            )
        system = reranker.instruction if settings.system is None else settings.system
        chats = replace(settings, chat=True, prompt_column="messages", template=None, system=system)
        super().__init__(tokenizer, chats, **given)
        self._reranker = reranker
        self.columns = PAIR
        self.needed = tuple(dict.fromkeys((*PAIR, *settings.label_columns)))
        self._pair_template = self._chat_template = ChatTemplate(tokenizer, answers=reranker.begins_answer)

    def another(self) -> RerankBuilder:
        return RerankBuilder(self._tokenizer, self.settings, self._reranker, group_chars=self._group_chars)

    def text_of(self, query: str, document: str) -> str | RowError:
        """Return the prompt of this pair."""
        (text,) = self._pair_template.render([[*self._instructed(), *_messages(query, document)]])
        return text

    def carries_pairs(self) -> bool:
        """Return whether the chat template writes the query and the document into the prompt."""
        texts = [self.text_of(*probe) for probe in _PROBES]
        return len(set(texts)) == len(texts) and all(isinstance(text, str) for text in texts)

    def _instructed(self) -> list[dict[str, str]]:
        system = self.settings.system
        return [] if system is None else [{"role": "system", "content": system}]

    def _values(
        self, batch: RowBatch, errors: dict[int, RowError]
    ) -> Iterator[tuple[int, str | RowError | Any, Marks | None]]:
        for at, row in enumerate(batch.rows.tolist()):
            if row not in errors:
                query, document = (batch.columns[name][at] for name in PAIR)
                wrong = self._fault(QUERY, query) or self._fault(DOCUMENT, document)
                yield (row, wrong, None) if wrong else (row, *self._literal(_messages(query, document), joined=True))

    def _fault(self, name: str, value: Any) -> RowError | None:
        if value is None:
            return self.no_text(ErrorCode.NULL_PROMPT, f"the {name} is null")
        if not isinstance(value, str):
            return RowError(ErrorCode.WRONG_TYPE, f"the {name} is {type(value).__name__}, not text")
        return self.no_text(ErrorCode.EMPTY_PROMPT, f"the {name} is empty") if not value.strip() else None


def _messages(query: str, document: str) -> list[dict[str, str]]:
    return [{"role": QUERY, "content": query}, {"role": DOCUMENT, "content": document}]


def own_labels(found: Reranker, opened: Opened) -> Labels | None:
    """Return the labels that a reranker answers; None for a head, which has classes. Raises UsageError."""
    if found.tokens is None or opened.files.head is not None:
        return None
    names = _names(found.tokens, opened)
    if len(names) < 2:
        raise UsageError(
            f"{opened.files.origin}: a reranker whose score is the logit of {names[0]!r} alone, which is not "
            f"computed\ngive the labels to compare: --labels {names[0]},..."
        )
    tokens = tuple((token,) for token in found.tokens)
    return ClassLabels([Label(name) for name in names], tokens, Measure.SHARES)


def warn_of_labels(found: Reranker, opened: Opened, labels: Any) -> None:
    """Warn of given labels that are not those of a reranker."""
    if found.tokens is None or opened.files.head is not None:
        return
    own, given = _names(found.tokens, opened), [label.name for label in parse_labels(labels)]
    if given[: len(own)] != own:
        log.warning(
            f"--labels {','.join(given)}: {opened.files.origin} is a reranker by its files, and answers "
            f"{','.join(own)}\nits scores mean nothing with other labels: leave --labels out"
        )


def warn_of_name(opened: Opened) -> None:
    """Warn of a model that is a reranker by its name, but not by its files."""
    if "rerank" not in os.path.basename(str(opened.files.origin).rstrip("/")).lower():
        return
    how = (
        "name the column with the second text: --pair-column"
        if opened.files.encoder
        else "write the prompt of its documentation with --template; --recipe recipes/rerank.yaml has Qwen3-Reranker's"
    )
    log.warning(
        f"{opened.files.origin}: a reranker by its name, but its files do not show how it reads pairs of texts\n{how}"
    )


def _names(tokens: Sequence[int], opened: Opened) -> list[str]:
    return [opened.tokenizer.decode([token]).strip() for token in tokens]


def own_builder(
    found: Reranker,
    opened: Opened,
    made: PromptSettings,
    settings: JobSettings,
    available: Sequence[str],
    *,
    asked: bool,
    said: set[str],
) -> PromptBuilder | None:
    """Return the builder of a reranker's own prompts. None if the user has `asked` for others, with a warning where
    these are a mistake. Messages in `said` are not repeated."""
    if made.encoder:
        return _pair_builder(opened, made, available, asked=asked, said=said)
    own = RerankBuilder(opened.tokenizer, made, found) if getattr(opened.tokenizer, "chat_template", None) else None
    if own is None or not own.carries_pairs():
        if own is not None:
            own.close()
        if not asked:
            _say(
                said,
                f"{opened.files.origin}: a reranker by its files, but no chat template takes its query and document\n"
                "write the prompt of its documentation with --template",
            )
        return None
    if not asked:
        text = f"{opened.files.origin}: a reranker; its own template makes prompts of {QUERY} and {DOCUMENT}"
        _say(said, text, log.info)
        return own
    _compare(opened, own, settings, said)
    own.close()
    return None


def _pair_builder(
    opened: Opened, made: PromptSettings, available: Sequence[str], *, asked: bool, said: set[str]
) -> PromptBuilder | None:
    if made.pair_column is not None or not available:  # or no rows are there yet
        return None
    if not asked and set(PAIR) <= set(available):
        pairs = replace(made, prompt_column=QUERY, pair_column=DOCUMENT)
        return prompt_builder(opened.tokenizer, pairs, available)
    _say(
        said,
        f"{opened.files.origin}: a cross-encoder by its files, which was trained on pairs of texts\n"
        "name the column with the second text: --pair-column",
    )
    return None


def _say(said: set[str], text: str, tell: Callable[[str], None] = log.warning) -> None:
    if text not in said:
        said.add(text)
        tell(text)


def _compare(opened: Opened, own: RerankBuilder, settings: JobSettings, said: set[str]) -> None:
    # Warn of a prompt that differs from the model's own, and name the place.
    what = f"{opened.files.origin} is a reranker by its files, with its own template"
    template = None if settings.prompts.template is None else RowTemplate(settings.prompts.template)
    if template is None:
        option = "--prompt-column" if "prompt_column" in settings.given else "--chat"
        _say(said, f"{option}: {what} for the columns {QUERY} and {DOCUMENT}\nleave {option} out")
        return
    query, document = _PROBES[0]
    where = f", and --template makes prompts of {', '.join(template.columns)}"
    if set(template.columns) == set(PAIR):
        (text,) = template.render([{QUERY: query, DOCUMENT: document}])
        wanted = own.text_of(query, document)
        if text == wanted:
            template.close()
            return
        if isinstance(text, str) and isinstance(wanted, str):
            at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, wanted, strict=False)))
            ends = [repr(each[at : at + _SHOWN]) if each[at:] else "the end" for each in (wanted, text)]
            where = f": where it has {ends[0]}, --template has {ends[1]}"
    template.close()
    _say(said, f"--template: {what}{where}\nits scores mean little with another prompt: leave --template out")
