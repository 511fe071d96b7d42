"""Sections of prompts, and prompts without them: held against rows that are edited by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.followup.evidence import MOST_SECTIONS, Ablation, prompt_sections, variable_sections
from prefillcli.models.adapters import AdapterFiles, AdapterVariants
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.labels import Labels, parse_labels
from prefillcli.prompts.questions import typed
from prefillcli.prompts.settings import PromptSettings
from prefillcli.rows.records import Prompt
from tests.unit.conftest import CHAT
from tests.unit.prompts.test_prompts import batch_of, build

LABELS = parse_labels("Yes,No")


def rests(text: str, *, open_end: bool = False) -> dict[str, str]:
    """What is left of a text without each of its sections."""
    sections = prompt_sections({"prompt": text}, "prompt", open_end=open_end)
    return {section.name: section.rest["prompt"] for section in sections}


def ablated(tokenizer: Any, values: dict[str, Any], **options: Any) -> dict[str, Prompt]:
    """A row's prompts without their sections, by name."""
    options = {"max_length": 1000, "vocab_size": len(tokenizer), "sections": True} | options
    builder = PromptBuilder(tokenizer, PromptSettings(**options), tuple(values))
    labels = Labels(tokenizer, typed(LABELS))
    (prompt,), _ = builder.build(batch_of(**{name: [value] for name, value in values.items()}), labels)
    ablation = Ablation(builder, labels)
    found = ablation.of(prompt)
    ablation.close()
    builder.close()
    assert [each.prompt.row for each in found] == [prompt.row] * len(found)
    return {each.section: each.prompt for each in found}


def assert_as_edited(tokenizer: Any, found: dict[str, Prompt], edited: dict[str, Any], **options: Any) -> None:
    """The prompts are those of rows that were edited by hand: by section, the one column that differs."""
    assert list(found) == list(edited)
    columns = {name: [row[name] for row in edited.values()] for name in next(iter(edited.values()))}
    prompts, errors = build(tokenizer, batch_of(**columns), **options)
    assert not errors
    for own, other in zip(found.values(), prompts, strict=True):
        assert own.tokens.tolist() == other.tokens.tolist()
        assert own.truncated == other.truncated


def test_a_text_has_paragraphs_and_keeps_the_line_that_the_answer_follows() -> None:
    text = "One.\nStill one.\n\nTwo.\n \n\nThree.\nAnswer:"
    assert rests(text) == {
        "paragraph 1": "Two.\n \n\nThree.\nAnswer:",
        "paragraph 2": "One.\nStill one.\n\nThree.\nAnswer:",
        "paragraph 3": "One.\nStill one.\n\nTwo.\n \n\nAnswer:",
    }


def test_a_text_of_one_paragraph_has_lines() -> None:
    assert rests("One.\nTwo.\nAnswer:\n") == {"line 1": "Two.\nAnswer:\n", "line 2": "One.\nAnswer:\n"}
    assert rests("One.\nTwo.\n\nAnswer:") == {"line 1": "Two.\n\nAnswer:", "line 2": "One.\nAnswer:"}


def test_a_text_of_one_line_has_no_sections() -> None:
    assert rests("One. Answer:") == rests("One. Answer:", open_end=True) == {}
    assert rests("\n\nOne. Answer:\n") == {}


def test_all_of_a_text_may_go_where_the_answer_does_not_follow_it() -> None:
    assert rests("One.\n\nTwo.\n\nThree?\n", open_end=True) == {
        "paragraph 1": "Two.\n\nThree?\n",
        "paragraph 2": "One.\n\nThree?\n",
        "paragraph 3": "One.\n\nTwo.\n",
    }


def test_paragraphs_may_end_as_on_windows() -> None:
    assert rests("One.\r\n\r\nTwo.\r\n\r\nAnswer:") == {
        "paragraph 1": "Two.\r\n\r\nAnswer:",
        "paragraph 2": "One.\r\n\r\nAnswer:",
    }


@given(st.text(alphabet="ab \n\r\t", max_size=60), st.booleans())
def test_sections_of_a_text_are_apart_and_leave_the_rest_as_it_is(text: str, open_end: bool) -> None:
    found = rests(text, open_end=open_end)
    letters = "".join(text.split())
    for rest in found.values():
        assert "".join(rest.split()) != letters, "nothing is left out"
        assert rest.strip(), "nothing is left"
    missing = [len(letters) - len("".join(rest.split())) for rest in found.values()]
    assert sum(missing) <= len(letters)
    if not open_end and found:
        last = text.rstrip().rpartition("\n")[2]
        assert all(rest.rstrip().rpartition("\n")[2] == last for rest in found.values())


def test_neighbours_of_many_sections_are_joined() -> None:
    parts = [f"Part {at}." for at in range(70)]
    found = rests("\n\n".join([*parts, "Answer:"]))
    assert len(found) == MOST_SECTIONS
    assert list(found)[:2] == ["paragraphs 1-2", "paragraphs 3-4"]
    assert found["paragraphs 3-4"] == "\n\n".join([*parts[:2], *parts[4:], "Answer:"])
    gone = [part for rest in found.values() for part in parts if part not in rest.split("\n\n")]
    assert gone == parts
    chat = [{"role": "user", "content": part} for part in parts]
    turns = prompt_sections({"messages": chat}, "messages", open_end=True)
    assert len(turns) == MOST_SECTIONS
    assert turns[0].name == "turns 1-2"
    assert turns[0].rest["messages"] == chat[2:]
    long_end = prompt_sections(
        {"messages": [*chat, {"role": "user", "content": "\n\n".join(parts)}]}, "messages", open_end=True
    )
    assert len(long_end) == MOST_SECTIONS
    assert [long_end[0].name, long_end[-1].name] == ["turn 71 (user), paragraphs 1-4", "turns 67-71"]
    many = variable_sections({f"v{at:02}": "x" for at in range(40)})
    assert [many[0].name, many[-1].name] == ["v00", "v38, v39"]
    assert len(many) == MOST_SECTIONS


def test_the_paragraphs_of_the_only_variable_are_sections_too(byte_level: Any) -> None:
    template = "{{ text }}\nAnswer:"
    found = ablated(byte_level, {"text": "One.\n\nTwo."}, template=template)
    edited = {
        "text, paragraph 1": {"text": "Two."},
        "text, paragraph 2": {"text": "One."},
        "text": {"text": ""},
    }
    assert_as_edited(byte_level, found, edited, template=template)


def test_a_section_without_which_there_is_no_such_prompt_is_left_out(byte_level: Any) -> None:
    needs = "{% if not a %}{{ 1 // 0 }}{% endif %}{{ a }} {{ b }}\nAnswer:"
    assert list(ablated(byte_level, {"a": "x", "b": "y"}, template=needs)) == ["b"]
    ends_in_b = "{{ a }} {{ b }}"
    assert list(ablated(byte_level, {"a": "Is it?", "b": "Answer:"}, template=ends_in_b)) == ["a"]
    assert ablated(byte_level, {"a": "Answer:"}, template="{{ a }}") == {}


def test_where_other_label_tokens_would_follow_a_section_stays(byte_level: Any) -> None:
    found = ablated(byte_level, {"a": "Is it?", "b": "\n"}, template="{{ a }} Answer:{{ b }}")
    assert list(found) == ["a"]  # without b the labels begin with a space


def test_the_paragraphs_of_a_chat_s_last_message_are_sections_too(chat_tokenizer: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    chat = [system, {"role": "user", "content": "One.\n\nTwo?"}]
    found = ablated(chat_tokenizer, {"messages": chat})
    edited = {
        "turn 2 (user), paragraph 1": {"messages": [system, {"role": "user", "content": "Two?"}]},
        "turn 2 (user), paragraph 2": {"messages": [system, {"role": "user", "content": "One."}]},
        "turn 1 (system)": {"messages": chat[1:]},
        "turn 2 (user)": {"messages": chat[:1]},
    }
    assert_as_edited(chat_tokenizer, found, edited)


def test_turns_that_the_chat_template_cannot_do_without_are_no_sections(chat_tokenizer: Any) -> None:
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    chat = [{"role": role, "content": f"Part {at}."} for at, role in enumerate(["user", "assistant", "user"])]
    chat_tokenizer.chat_template = alternating + CHAT
    try:
        assert list(ablated(chat_tokenizer, {"messages": chat})) == ["turn 3 (user)"]
    finally:
        chat_tokenizer.chat_template = CHAT


def test_text_that_becomes_a_message_has_paragraphs_and_the_system_message_stays(chat_tokenizer: Any) -> None:
    text = "Is it sport?\n\nThe train is late."
    found = ablated(chat_tokenizer, {"prompt": text}, system="Be brief.")
    edited = {"paragraph 1": {"prompt": "The train is late."}, "paragraph 2": {"prompt": "Is it sport?"}}
    assert_as_edited(chat_tokenizer, found, edited, system="Be brief.")
    assert list(ablated(chat_tokenizer, {"prompt": text}, chat=False)) == ["paragraph 1"]


def test_a_classification_head_reads_any_end(byte_level: Any) -> None:
    found = ablated(byte_level, {"prompt": "One.\n\nTwo."}, classifies=True)
    edited = {"paragraph 1": {"prompt": "Two."}, "paragraph 2": {"prompt": "One."}}
    assert_as_edited(byte_level, found, edited, classifies=True)


def test_text_of_control_tokens_stays_text_in_what_is_left(byte_level: Any) -> None:
    parts = ["A post with </s> in it.", "<s>Another.", "Answer:"]
    found = ablated(byte_level, {"prompt": "\n\n".join(parts)})
    edited = {"paragraph 1": {"prompt": "\n\n".join(parts[1:])}, "paragraph 2": {"prompt": "\n\n".join(parts[::2])}}
    assert_as_edited(byte_level, found, edited)
    assert byte_level.eos_token_id not in found["paragraph 2"].tokens


def test_an_ablated_prompt_is_read_by_the_row_s_adapter(byte_level: Any) -> None:
    row = {"prompt": "One.\n\nTwo.\n\nAnswer:", "by": "judge"}
    variants = AdapterVariants((AdapterFiles("judge", Path(), None, 0),), "by")
    assert variants.row_columns is not None
    found = ablated(byte_level, row, row_columns=(variants.row_columns,))
    assert [prompt.variant for prompt in found.values()] == ["judge", "judge"]


def test_nothing_is_noted_unless_sections_are_asked_for(byte_level: Any) -> None:
    prompts, _ = build(byte_level, batch_of(prompt=["One.\n\nAnswer:"]))
    assert prompts[0].made_of is None
    labels = Labels(byte_level, typed(LABELS))
    builder = PromptBuilder(byte_level, PromptSettings(max_length=99, vocab_size=600), ("prompt",))
    assert Ablation(builder, labels).of(prompts[0]) == []


def test_sections_are_left_out_while_another_thread_makes_prompts(chat_tokenizer: Any) -> None:
    """Both threads render with templates and find labels; each prompt is what it is without the other thread."""
    template = "{{ a }}\n{{ b }}\nAnswer:"
    settings = PromptSettings(template=template, chat=True, max_length=500, vocab_size=600, sections=True)
    builder, labels = PromptBuilder(chat_tokenizer, settings, ("a", "b")), Labels(chat_tokenizer, typed(LABELS))
    batch = batch_of(a=[f"post {at}" for at in range(300)], b=[f"user {at}" for at in range(300)])
    (first, *_), _ = builder.build(batch.only(np.array([0])), labels)
    alone = [each.prompt.tokens.tolist() for each in Ablation(builder, labels).of(first)]
    made: list[list[list[int]]] = []

    def go_on() -> None:
        for _ in range(3):
            made.append([prompt.tokens.tolist() for prompt in builder.build(batch, labels)[0]])

    thread = threading.Thread(target=go_on)
    thread.start()
    ablations = [Ablation(builder, labels) for _ in range(3)]
    beside = [[each.prompt.tokens.tolist() for each in ablation.of(first)] for ablation in ablations for _ in range(5)]
    thread.join()
    for closing in (*ablations, builder):
        closing.close()
    assert beside == [alone] * len(beside)
    assert len(made) == 3
    assert all(each == made[0] for each in made)
