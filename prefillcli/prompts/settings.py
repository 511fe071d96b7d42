"""How a job makes prompts of rows: its settings, and what a tokenizer and the columns of an input allow of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prefillcli.errors import UsageError
from prefillcli.prompts.images import PromptImages
from prefillcli.prompts.layouts import LaidOut
from prefillcli.prompts.thinking import AS_USUAL, ChatChoices
from prefillcli.rows.input.selection import DEFAULT_COLUMN
from prefillcli.rows.records import Prompt, RowBatch, RowError

OnLong = Literal["error", "truncate-left", "truncate-middle", "truncate-right", "skip"]
_FALLBACK_COLUMNS = (DEFAULT_COLUMN, "messages", "prompt_token_ids")
DOCUMENT_COLUMNS = (DEFAULT_COLUMN, "text", "document")  # the usual columns with what questions are about
USUAL_COLUMNS = frozenset({*_FALLBACK_COLUMNS, *DOCUMENT_COLUMNS})  # a column that no option names is one of these


class RowColumns(NamedTuple):
    """Columns that rows may have, and functions that put their values into prompts; a row with a wrong value becomes
    an error."""

    names: tuple[str, ...]
    take: Callable[[list[Prompt], RowBatch, dict[int, RowError]], list[Prompt]]


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """The settings by which a row becomes a prompt."""

    # Column with text, chat messages or token ids; not used with a template.
    prompt_column: str = DEFAULT_COLUMN
    template: str | None = None  # Jinja text, or a file with it
    # Wrap text as a user message: yes, no, or (None) if the tokenizer has a chat template.
    chat: bool | None = None
    system: str | None = None  # system message of every chat that has none of its own
    choices: ChatChoices = AS_USUAL  # how chats are rendered, and what stands after them
    max_length: int  # longest prompt in tokens
    on_long: OnLong = "error"  # the treatment of longer ones
    empty_text: Literal["skip", "error"] = "error"  # whether a row without text is left out, or an error
    vocab_size: int  # token ids are below this
    literal: bool = True  # whether the text of a control token in the data stays plain text
    # Longest row, and longest prompt made from one, in bytes; None: `default_row_bytes`.
    max_row_bytes: int | None = None
    row_columns: tuple[RowColumns, ...] = ()  # further columns in which rows may describe their prompts
    # Whether a classification head reads the prompt: text becomes no chat unless `chat` says so, and no answer begins.
    classifies: bool = False
    # Columns with a row's own labels: `Labels.columns`.
    label_columns: tuple[str, ...] = ()
    padding: int | None = None  # the token that such a head takes for padding where it ends a prompt
    encoder: bool = False  # whether the model reads texts, or pairs of texts, in both directions
    pair_column: str | None = None  # column with the second text of a pair, for an encoder
    # Whether prompts note their rows' values, so that sections of them can be left out.
    sections: bool = False
    # The question behind each row's own text, with `INSTRUCTIONS` for those that are rendered for each row, and what
    # ends a prompt with a question that is no chat.
    question: str = ""
    question_end: str = ""
    # Instead, the question in the layout of a model that was trained for typed decisions.
    laid_out: LaidOut | None = None
    images: PromptImages | None = None  # those of rows; None: the model reads none


def wants_chat(settings: PromptSettings, has_template: bool) -> bool:
    """Return whether text becomes a user message. `has_template` says whether the tokenizer has a chat template."""
    if settings.chat and not has_template:
        raise UsageError("--chat: the tokenizer has no chat template\nleave --chat out, or write one with --template")
    chat = (has_template and not settings.classifies) if settings.chat is None else settings.chat
    if settings.system is not None and not chat:
        raise UsageError(f"--system needs a chat: {_no_chat(settings)}")
    return chat


def _no_chat(settings: PromptSettings) -> str:
    # Why text becomes no user message.
    if settings.classifies:
        return "a classification head reads text as it is: give --chat"
    return "the tokenizer has no chat template, or --no-chat is given"


def check_choices(settings: PromptSettings, chats: bool) -> None:
    """Raise UsageError for choices about chats that would be ignored; `chats` says whether there are any."""
    choices = settings.choices
    answer = [f"--thinking {choices.thinking}"] if choices.thinking != "auto" else []
    answer += ["--answer-prefix"] if choices.answer_prefix else []
    for option in (*answer, *(["--chat-option"] if choices.options else [])):
        if not chats:
            raise UsageError(f"{option} needs a chat: {_no_chat(settings)}")
    if answer and settings.classifies:
        raise UsageError(f"{answer[0]}: a classification head is read, and no answer begins\nleave it out")


def check_column(settings: PromptSettings, column: str, has_template: bool) -> None:
    """Raise UsageError if prompts of this column cannot become the text or tokens that the settings ask for."""
    if column == "messages" and settings.chat is False:
        raise UsageError("--no-chat: the prompt column is 'messages', which only a chat template turns into text")
    if column == "messages" and not has_template:
        raise UsageError(
            "the prompt column is 'messages', but the tokenizer has no chat template\n"
            "use a model that has one, or write the messages as text with --template"
        )
    for option, given in (("--chat", settings.chat), ("--system", settings.system is not None)):
        if given and column == "prompt_token_ids":
            raise UsageError(f"{option}: the prompt column is 'prompt_token_ids', and no chat is made of token ids")


def prompt_column(named: str, available: Sequence[str]) -> str:
    """The column `named`, or without one the first usual one in the input."""
    if named != DEFAULT_COLUMN:
        return named
    return next((name for name in _FALLBACK_COLUMNS if name in available), DEFAULT_COLUMN)
