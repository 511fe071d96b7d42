"""Too long prompts: error, skipped, cut on the left, in the middle or on the right; texts cut within a template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template

from prefillcli.prompts.fitting import fit
from prefillcli.prompts.labels import Labels, parse_labels
from prefillcli.prompts.questions import typed
from prefillcli.rows.records import Prompt, RowError
from tests.unit.prompts.labels import resolve
from tests.unit.prompts.test_prompts import batch_of, build

TOKENS = np.array([1, 10, 11, 12, 13, 14, 15], np.int32)
BOS = frozenset({1})


def test_a_prompt_of_the_limit_is_left_alone() -> None:
    for on_long in ("error", "skip", "truncate-left", "truncate-middle"):
        assert fit(TOKENS, 7, on_long, BOS) is TOKENS


def test_error_and_skip_say_how_long_it_is() -> None:
    assert fit(TOKENS, 6, "error", BOS) == RowError("prompt_too_long", "7 tokens, the limit is 6")
    assert fit(TOKENS, 6, "skip", BOS) == RowError("skipped_too_long", "7 tokens, the limit is 6")


def test_left_drops_the_oldest_tokens_but_not_bos() -> None:
    assert list(fit(TOKENS, 4, "truncate-left", BOS)) == [1, 13, 14, 15]
    assert list(fit(TOKENS, 4, "truncate-left", frozenset())) == [12, 13, 14, 15]
    assert list(fit(TOKENS, 1, "truncate-left", BOS)) == [15]


def test_middle_keeps_both_halves() -> None:
    assert list(fit(TOKENS, 4, "truncate-middle", BOS)) == [1, 10, 14, 15]
    assert list(fit(TOKENS, 5, "truncate-middle", BOS)) == [1, 10, 13, 14, 15]
    assert list(fit(TOKENS, 1, "truncate-middle", BOS)) == [15]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 40), st.booleans())
def test_a_cut_prompt_has_the_limit_and_the_last_tokens(tokens: list[int], limit: int, left: bool) -> None:
    array = np.array(tokens, np.int32)
    cut = fit(array, limit, "truncate-left" if left else "truncate-middle", frozenset({0}))
    assert not isinstance(cut, RowError)
    assert len(cut) == min(limit, len(tokens))
    assert cut[-1] == tokens[-1]
    assert cut.dtype == np.int32


DOCUMENT = " ".join(f"{word} {number}" for number in range(40) for word in ("music", "sport", "the garden"))
CUTS = ["truncate-left", "truncate-middle", "truncate-right"]
LIMIT = 100


def only(found: tuple[list[Prompt], dict[int, RowError]]) -> Prompt:
    (prompt,), errors = found
    assert not errors
    return prompt


def is_cut(document: str, rest: str, on_long: str) -> bool:
    """Whether the rest of a document is its end, its beginning, or about as much of both."""
    if on_long == "truncate-middle":
        halves = (at for at in range(len(rest)) if document.startswith(rest[:at]) and document.endswith(rest[at:]))
        return any(abs(len(rest) - 2 * at) < len(rest) / 3 for at in halves)
    return document.endswith(rest) if on_long == "truncate-left" else document.startswith(rest)


def between(text: str, head: str, tail: str) -> str:
    """What stands between a whole head and a whole tail."""
    assert text.startswith(head), text
    assert text.endswith(tail), text
    return text[len(head) : len(text) - len(tail)]


@pytest.mark.parametrize("on_long", CUTS)
def test_in_a_chat_the_document_is_cut_and_the_template_stays(chat_tokenizer: Any, on_long: Any) -> None:
    options = {"max_length": LIMIT, "on_long": on_long, "system": "Reply Yes or No."}
    around = chat_tokenizer.apply_chat_template(
        [{"role": "system", "content": "Reply Yes or No."}, {"role": "user", "content": "@@"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    for columns in ({"prompt": [DOCUMENT]}, {"messages": [[{"role": "user", "content": DOCUMENT}]]}):
        prompt = only(build(chat_tokenizer, batch_of(**columns), **options))
        rest = between(chat_tokenizer.decode(prompt.tokens), *around.split("@@"))
        assert is_cut(DOCUMENT, rest, on_long)
        assert LIMIT - 3 <= len(prompt.tokens) <= LIMIT
        assert prompt.truncated
        wanted = Labels(chat_tokenizer, typed(parse_labels("Yes,No")))
        assert prompt.labels == resolve(wanted, around)


@pytest.mark.parametrize("on_long", CUTS)
@pytest.mark.parametrize("labels", ["Yes,No", "very satisfied,not at all"])
def test_in_a_row_template_the_longest_value_is_cut(byte_level: Any, on_long: Any, labels: str) -> None:
    template = "History: {{ history }}\nPost: {{ post }}{% if post == '' %}none{% endif %}\nAnswer:"
    post = "Is the post about sport?"
    options = {"max_length": LIMIT, "on_long": on_long, "template": template, "labels": labels}
    batch = batch_of(history=[DOCUMENT, "music", post], post=[post, "</s>" + DOCUMENT, "No"], number=[1, 2, 3])
    prompts, errors = build(byte_level, batch, **options)
    assert not errors
    texts = [byte_level.decode(each.tokens).removeprefix("<s>") for each in prompts]
    assert is_cut(DOCUMENT, between(texts[0], "History: ", f"\nPost: {post}\nAnswer:"), on_long)
    assert is_cut("</s>" + DOCUMENT, between(texts[1], "History: music\nPost: ", "\nAnswer:"), on_long)
    assert texts[2] == Template(template).render(history=post, post="No")
    assert [each.truncated for each in prompts] == [True, True, False]
    for each in prompts[:2]:
        assert LIMIT - 3 <= len(each.tokens) + each.labels.depth <= LIMIT
        assert each.labels == prompts[2].labels
        assert each.tokens[0] == byte_level.bos_token_id


@pytest.mark.parametrize("on_long", CUTS)
def test_a_history_loses_its_oldest_or_newest_posts(byte_level: Any, on_long: Any) -> None:
    posts = [f"Post {number} is about music." for number in range(40)]
    template = "{% for post in posts %}- {{ post }}\n{% endfor %}Answer:"
    options = {"max_length": LIMIT, "on_long": on_long, "template": template}
    prompt = only(build(byte_level, batch_of(posts=[posts]), **options))
    text = byte_level.decode(prompt.tokens).removeprefix("<s>")
    whole = [line.removeprefix("- ") for line in text.removesuffix("\nAnswer:").split("\n")]
    kept = [number for number, post in enumerate(posts) if post in whole]
    assert len(whole) - len(kept) <= 2  # those that are cut themselves
    wanted = {
        "truncate-left": range(40 - len(kept), 40),
        "truncate-right": range(len(kept)),
        "truncate-middle": [*range(len(kept) // 2), *range(40 - len(kept) + len(kept) // 2, 40)],
    }[on_long]
    assert kept == list(wanted) or (on_long == "truncate-middle" and abs(kept.index(kept[-1]) - len(kept)) < 3)


def test_a_text_that_is_written_twice_is_cut_as_little_as_possible(byte_level: Any) -> None:
    template = "{{ text | upper }} {{ text }}{{ unused[:0] }}\nAnswer:"
    options = {"max_length": LIMIT, "on_long": "truncate-right", "template": template}
    prompt = only(build(byte_level, batch_of(text=[DOCUMENT], unused=[DOCUMENT * 2]), **options))
    assert LIMIT - 8 <= len(prompt.tokens) <= LIMIT
    text = byte_level.decode(prompt.tokens).removeprefix("<s>").removesuffix("\nAnswer:")
    rest = text[len(text) // 2 + 1 :]
    assert text == f"{rest.upper()} {rest}"
    assert DOCUMENT.startswith(rest)


def test_a_template_that_is_too_long_by_itself_is_an_error(byte_level: Any) -> None:
    options = {"max_length": 20, "on_long": "truncate-middle", "template": "{{ text }}" + " the garden" * 20}
    _, errors = build(byte_level, batch_of(text=[DOCUMENT, None]), **options)
    assert errors[0].code == "prompt_too_long"
    assert "texts" in errors[0].detail


@pytest.mark.parametrize("labels", ["Yes,No", "very satisfied,not at all"])
def test_labels_follow_the_end_that_is_read(byte_level: Any, labels: str) -> None:
    text = "music is in the news\n" * 30 + "Answer:"
    for most in range(60, 70):
        options = {"max_length": most, "on_long": "truncate-right", "labels": labels}
        prompt = only(build(byte_level, batch_of(prompt=[text]), **options))
        read = byte_level.decode(prompt.tokens).removeprefix("<s>")
        assert text.startswith(read)
        assert prompt.labels == resolve(Labels(byte_level, typed(parse_labels(labels))), read)
        assert len(prompt.tokens) + prompt.labels.depth <= most
