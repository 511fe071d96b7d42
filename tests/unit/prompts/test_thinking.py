"""Where the prompts of chats end: at the answer, whatever a chat template does about thoughts. The oracle is
transformers' `apply_chat_template`, with the text that each template is known to need behind it."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import pytest
from tokenizers import AddedToken

from prefillcli.errors import UsageError
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.settings import PromptSettings
from prefillcli.prompts.thinking import ChatChoices
from tests.unit.prompts.test_prompts import batch_of, build, tokens

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}"
BEGIN = ASKED + "<|im_start|>assistant\n"
# As Qwen3, Qwen3.6, SmolLM3, GLM-4.5, Fanar, MiniMax-M3, Seed-OSS, Kimi-K2.5 and Solar write their ends.
SWITCHED = (
    TURNS
    + BEGIN
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED_UNLESS = (
    TURNS + BEGIN + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
NOTED = (
    "{% if enable_thinking is defined %}{% set on = enable_thinking %}{% else %}{% set on = true %}{% endif %}"
    "<|im_start|>system\n{{ '/think' if on else '/no_think' }}<|im_end|>\n"
    + TURNS + BEGIN + "{% if not on %}<think>\n\n</think>\n{% endif %}{% endif %}"
)  # fmt: skip
NEGATIVE = (
    TURNS + BEGIN + "{% if no_thinking is defined and no_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WORDED = (
    TURNS
    + BEGIN
    + "{{ '</mm:think>' if thinking_mode == 'disabled' else '<mm:think>' if thinking_mode == 'enabled' }}{% endif %}"
)
BUDGET = (
    TURNS
    + BEGIN
    + "{% if thinking_budget is defined and thinking_budget == 0 %}<seed:think>none</seed:think>{% endif %}{% endif %}"
)
PLAIN_SWITCH = (
    TURNS
    + BEGIN
    + "{% if thinking is defined and thinking is false %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)
EFFORT = TURNS + BEGIN + "<|think:start|>{% if reasoning_effort == 'none' %}<|think:end|>{% endif %}{% endif %}"
SWITCHES = [
    (SWITCHED, {"enable_thinking": False}),
    (OPENED_UNLESS, {"enable_thinking": False}),
    (NOTED, {"enable_thinking": False}),
    (NEGATIVE, {"no_thinking": True}),
    (WORDED, {"thinking_mode": "disabled"}),
    (BUDGET, {"thinking_budget": 0}),
    (PLAIN_SWITCH, {"thinking": False}),
    (EFFORT, {"reasoning_effort": "none"}),
]
# As R1, MiniMax-M2, INTELLECT-3, EXAONE Deep, Command A+ and R7B, Apriel, gpt-oss, Solar and Kimi-K2-Thinking do.
OPENED = TURNS + BEGIN + "<think>\n{% endif %}"
PAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content %}"
    "OPEN{{ m.reasoning_content }}CLOSE{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + BEGIN + "OPEN{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}" + ASKED + "<|start|>assistant{% endif %}"
)
EMPTY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}"
    "<|im_end|>\n{% endfor %}" + BEGIN + "{% endif %}"
)
KIND = (
    "{% for m in messages %}<|START|>{{ m.role }}{{ '<|TEXT|>' if m.role == 'assistant' }}{{ m.content }}<|END|>"
    "{% endfor %}" + ASKED + "<|START|>assistant<|START_THINKING|>"
    "{{ '<|END_THINKING|>' if reasoning is false }}{% endif %}"
)  # fmt: skip
CLOSINGS = [
    (OPENED, "\n</think>\n\n"),
    (PAST.replace("OPEN", "<think>\n").replace("CLOSE", "\n</think>\n\n"), "\n</think>\n\n"),
    (PAST.replace("OPEN", "<think>").replace("CLOSE", "</think>\n"), "</think>\n"),
    (PAST.replace("OPEN", "<|start_think|>\n").replace("CLOSE", "\n<|end_think|>\n"), "\n<|end_think|>\n"),
    (TURNS + BEGIN + "<thought>\n{% endif %}", "\n</thought>\n\n"),
    (TURNS + BEGIN + "<start_working_out>{% endif %}", "<end_working_out>\n\n"),
    (TURNS + BEGIN + "[THINK]{% endif %}", "[/THINK]\n\n"),
    (TURNS + BEGIN + "Here are my reasoning steps:\n{% endif %}", "\n[BEGIN FINAL RESPONSE]\n"),
    (HARMONY, "<|channel|>final<|message|>"),
    (EMPTY, "<think></think>"),
]
# As Llama, Gemma, Gemma 4, Granite, Hermes 4 and DeepSeek V3.1 do, which do not think unless they are told to.
UNTOUCHED = [
    TURNS + BEGIN + "{% endif %}",
    TURNS,
    "{% if enable_thinking is defined and enable_thinking %}<|think|>{% endif %}" + TURNS + BEGIN + "{% endif %}",
    TURNS + BEGIN + "{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}",
    TURNS + BEGIN + "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}{% endif %}",
    "{% for m in messages %}{{ m.reasoning_effort }}{{ m.content }}{% endfor %}" + BEGIN + "{% endif %}",
]
CHATS = [
    [{"role": "user", "content": "Is it?"}],
    [{"role": "system", "content": "Judge."}, {"role": "user", "content": "Is it?"}],
    [
        {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Sure?"},
    ],
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(chat_tokenizer: Any) -> Any:
    return copy.deepcopy(chat_tokenizer)


def texts(tokenizer: Any, chats: list[Any] = CHATS, **choices: Any) -> list[str]:
    prompts, errors = build(tokenizer, batch_of(messages=chats), choices=ChatChoices(**choices))
    assert not errors
    return [tokenizer.decode(prompt.tokens) for prompt in prompts]


def theirs(tokenizer: Any, chats: list[Any] = CHATS, closing: str = "", **variables: Any) -> list[str]:
    found = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False, **variables)
    return [text + closing for text in found]


def way(tokenizer: Any, **choices: Any) -> Any:
    settings = PromptSettings(max_length=99, vocab_size=999, choices=ChatChoices(**choices))
    builder = PromptBuilder(tokenizer, settings, ("prompt",))
    try:
        return builder.way
    finally:
        builder.close()


@pytest.mark.parametrize(("template", "variables"), SWITCHES)
def test_the_switch_of_a_template_is_found(tokenizer: Any, template: str, variables: dict[str, Any]) -> None:
    tokenizer.chat_template = template
    assert texts(tokenizer) == theirs(tokenizer, **variables) != theirs(tokenizer)
    found = way(tokenizer, thinking="off")
    assert found.variables == variables
    assert all(f"{name}=" in found.said for name in variables)


@pytest.mark.parametrize(("template", "closing"), CLOSINGS)
def test_what_a_template_leaves_open_is_closed(tokenizer: Any, template: str, closing: str) -> None:
    tokenizer.chat_template = template
    assert texts(tokenizer) == theirs(tokenizer, closing=closing)


def test_a_switch_and_what_must_follow_it(tokenizer: Any) -> None:
    tokenizer.chat_template = KIND
    assert texts(tokenizer) == theirs(tokenizer, closing="<|TEXT|>", reasoning=False)


@pytest.mark.parametrize("template", UNTOUCHED)
def test_a_template_that_does_not_think_is_left_alone(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    assert texts(tokenizer) == theirs(tokenizer)
    assert way(tokenizer).said == ""


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (UNTOUCHED[2], {"enable_thinking": True}), (UNTOUCHED[3], {"thinking": True}),
        (WORDED, {"thinking_mode": "enabled"}), (SWITCHED, {}), (OPENED, {}), (HARMONY, {}), (UNTOUCHED[0], {}),
    ],
)  # fmt: skip
def test_thinking_is_switched_on(tokenizer: Any, template: str, variables: dict[str, Any]) -> None:
    tokenizer.chat_template = template
    assert texts(tokenizer, thinking="on") == theirs(tokenizer, **variables)


def test_off_writes_an_empty_thought_where_the_template_says_nothing_of_them(tokenizer: Any) -> None:
    for template in UNTOUCHED[2:5]:  # these do not think by themselves
        tokenizer.chat_template = template
        assert way(tokenizer, thinking="off").said == ""
    tokenizer.chat_template = UNTOUCHED[0]
    with pytest.raises(UsageError, match=r"--thinking off: .* says nothing of thoughts"):
        way(tokenizer, thinking="off")
    knowing = copy.deepcopy(tokenizer)
    knowing.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    assert texts(knowing, thinking="off") == theirs(knowing, closing="<think>\n\n</think>\n\n")


def test_a_thought_that_only_some_rows_open_is_closed_in_them(tokenizer: Any) -> None:
    tokenizer.chat_template = TURNS + BEGIN + "{{ '<think>\n' if messages[0].content == 'Think.' }}{% endif %}"
    thinking = [{"role": "system", "content": "Think."}, *CHATS[0]]
    (closed,) = theirs(tokenizer, [thinking], closing="\n</think>\n\n")
    assert texts(tokenizer, [thinking, CHATS[1]]) == [closed, *theirs(tokenizer, [CHATS[1]])]


def test_variables_of_the_template_are_given(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }} {{ reasoning_effort }} {{ tools }}" + SWITCHED
    given = {"reasoning_effort": "low", "enable_thinking": True}
    day = datetime.datetime(2026, 1, 31)
    assert texts(tokenizer, thinking="on", options={**given, "date": "2026-01-31"}) == theirs(
        tokenizer, **given, strftime_now=day.strftime
    )
    assert way(tokenizer).day == "2024-07-26"
    assert way(tokenizer, options={"date": "2026-01-31"}).day == "2026-01-31"
    assert way(tokenizer, options={"enable_thinking": False}).said == ""


def test_a_variable_that_the_template_does_not_read_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% set own = 1 %}{{ own }}{% set mine = mine | default(2) %}{{ mine }}" + SWITCHED
    for name, advice in (("enable_thinkin", "; did you mean 'enable_thinking'"), ("date", ""), ("own", "")):
        with pytest.raises(UsageError) as refused:
            way(tokenizer, options={name: "2026-01-31"})
        first, second = str(refused.value).split("\n")
        assert first.startswith(f"--chat-option {name}: the model's chat template reads no such variable{advice}")
        assert second == "it reads mine, enable_thinking"
    assert way(tokenizer, options={"mine": 3}).variables == {"enable_thinking": False}


def test_the_answer_prefix_opens_the_turn_and_may_hold_control_tokens(tokenizer: Any) -> None:
    tokenizer.chat_template = SWITCHED
    prefix = "<|im_start|>The answer is"
    found = tokens(tokenizer, prompt=["Is it? </s><|im_start|>"], choices=ChatChoices(answer_prefix=prefix))
    end = tokenizer(prefix, add_special_tokens=False)["input_ids"]
    assert found[-len(end) :] == end
    assert end[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.convert_tokens_to_ids("</s>") not in found
    assert tokenizer.decode(found).endswith("<think>\n\n</think>\n\n" + prefix)


def test_choices_without_a_chat_are_refused(tokenizer: Any) -> None:
    for choices, option in (
        ({"thinking": "off"}, "--thinking off"), ({"thinking": "on"}, "--thinking on"),
        ({"options": {"a": 1}}, "--chat-option"), ({"answer_prefix": "a"}, "--answer-prefix"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"{option} needs a chat"):
            build(tokenizer, batch_of(prompt=["a"]), chat=False, choices=ChatChoices(**choices))
    with pytest.raises(UsageError, match="--thinking off: a classification head is read"):
        build(tokenizer, batch_of(prompt=["a"]), chat=True, classifies=True, choices=ChatChoices(thinking="off"))
