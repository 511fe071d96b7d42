"""Rows to prompts: text, chat, token ids, templates, and every way a row can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from prefillcli.errors import UsageError
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.encoding import Encoder
from prefillcli.prompts.labels import Labels, parse_labels
from prefillcli.prompts.questions import typed
from prefillcli.prompts.settings import PromptSettings
from prefillcli.reading.compress.compressor import COMPRESSION_COLUMNS
from prefillcli.rows.input.source import Source
from prefillcli.rows.records import ErrorCode, Prompt, RowBatch, RowError
from prefillcli.rows.values import without_nulls
from tests.unit.prompts.labels import resolve


def batch_of(errors: dict[int, RowError] | None = None, **columns: list[Any]) -> RowBatch:
    rows = np.arange(len(next(iter(columns.values()))), dtype=np.int64)
    return RowBatch(0, rows, columns, pa.table({"": pa.nulls(len(rows))}).select([]), errors or {}, 0)


def build(
    tokenizer: Any, batch: RowBatch, labels: str = "Yes,No", **options: Any
) -> tuple[list[Prompt], dict[int, RowError]]:
    options = {"max_length": 1000, "vocab_size": len(tokenizer)} | options
    builder = PromptBuilder(tokenizer, PromptSettings(**options), tuple(batch.columns))
    prompts, errors = builder.build(batch, Labels(tokenizer, typed(parse_labels(labels))))
    assert sorted([prompt.row for prompt in prompts] + list(errors)) == batch.rows.tolist()
    assert [prompt.row for prompt in prompts] == sorted(prompt.row for prompt in prompts)
    assert all(error.code in set(ErrorCode) for error in errors.values())
    assert all(prompt.tokens.dtype == np.int32 for prompt in prompts)
    return prompts, errors


def tokens(tokenizer: Any, **columns_and_options: Any) -> list[int]:
    columns = {name: value for name, value in columns_and_options.items() if isinstance(value, list)}
    options = {name: value for name, value in columns_and_options.items() if name not in columns}
    ((prompt,), errors) = build(tokenizer, batch_of(**columns), **options)
    assert not errors
    return list(prompt.tokens)


def test_plain_text_is_tokenised_as_the_tokenizer_does_by_default(byte_level: Any) -> None:
    assert tokens(byte_level, prompt=["Is it? Answer:"]) == byte_level("Is it? Answer:")["input_ids"]
    assert tokens(byte_level, prompt=["Is it? Answer:"])[0] == byte_level.bos_token_id


def test_an_end_token_that_the_tokenizer_appends_is_left_out(byte_level: Any) -> None:
    plain = byte_level("Is it? Answer:")["input_ids"]
    ending = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level.backend_tokenizer.to_str()), bos_token="<s>", eos_token="</s>"
    )
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert ending("Is it? Answer:")["input_ids"] == [*plain, ending.eos_token_id]
    assert tokens(ending, prompt=["Is it? Answer:"]) == plain


def test_padding_and_truncation_of_the_tokenizer_are_off(byte_level: Any) -> None:
    byte_level.backend_tokenizer.enable_padding()
    byte_level.backend_tokenizer.enable_truncation(3)
    prompts, _ = build(byte_level, batch_of(prompt=["Answer:", "Is the topic in the history? Answer:"]))
    assert [list(p.tokens) for p in prompts] == [
        byte_level(text)["input_ids"] for text in ("Answer:", "Is the topic in the history? Answer:")
    ]
    assert len(prompts[1].tokens) > 3


def test_a_tokenizer_without_the_tokenizers_library_works() -> None:
    tokenizer = ByT5Tokenizer()
    builder = PromptBuilder(tokenizer, PromptSettings(max_length=99, vocab_size=1000), ("prompt",))
    batch = batch_of(prompt=["ab"])
    prompts, errors = builder.build(batch, Labels(tokenizer, typed(parse_labels("Y=Y,N=N"))))
    assert not errors
    assert list(prompts[0].tokens) == tokenizer("ab", add_special_tokens=False)["input_ids"]  # without the end token


def test_text_becomes_a_user_message_if_there_is_a_chat_template(chat_tokenizer: Any) -> None:
    chat = chat_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Is it?"}], add_generation_prompt=True, return_dict=False
    )
    assert tokens(chat_tokenizer, prompt=["Is it?"]) == chat
    assert tokens(chat_tokenizer, prompt=["Is it?"], chat=True) == chat
    assert tokens(chat_tokenizer, prompt=["Is it?"], chat=False) == chat_tokenizer("Is it?")["input_ids"]


def test_the_system_message_comes_first_unless_the_row_has_one(chat_tokenizer: Any) -> None:
    def chat(*messages: tuple[str, str]) -> list[int]:
        conversation = [{"role": role, "content": content} for role, content in messages]
        ids: list[int] = chat_tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )
        return ids

    assert tokens(chat_tokenizer, prompt=["Hi"], system="Be brief.") == chat(("system", "Be brief."), ("user", "Hi"))
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]
    assert tokens(chat_tokenizer, messages=[own], system="Be brief.") == chat(("system", "Own."), ("user", "Hi"))


def read(path: str, column: str) -> RowBatch:
    """The rows of a file, as a job reads them."""
    (batch,) = Source.open([path], columns=[column]).batches()
    return batch


QWEN2_VL = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}
{%- if content['type'] == 'drawing' or 'drawing' in content or 'drawing_url' in content %}<|vision_start|><|image_pad|>
{%- elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3 = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function.arguments | tojson }}
{% endfor %}<|im_end|>{% endfor %}"""


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("template", "chats"),
    [
        (
            QWEN2_VL,
            [
                [{"role": "user", "content": [{"type": "text", "text": "Is it?"}]}],
                [
                    {
                        "role": "user",
                        "content": [{"type": "drawing", "drawing_url": "a.png"}, {"type": "text", "text": "b"}],
                    }
                ],
            ],
        ),
        (
            QWEN3,
            [
                [{"role": "user", "content": "Hi", "tool_calls": [{"function": {"arguments": arguments}}]}]
                for arguments in ({"city": "Rome"}, {"city": "Oslo", "unit": "C", "days": [{"on": 1}, {"off": 2}]})
            ],
        ),
    ],
)
def test_a_key_with_a_null_is_one_that_is_not_there(
    chat_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    template: str,
    chats: list[Any],
    ending: str,
    nulls: bool,
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    table = pa.table({"messages": chats})
    if ending == "parquet":
        pq.write_table(table, tmp_path / "in.parquet")
    else:
        rows = table.to_pylist() if nulls else [{"messages": chat} for chat in chats]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, errors = build(chat_tokenizer, read(str(tmp_path / f"in.{ending}"), "messages"))
    assert not errors
    for prompt, chat in zip(prompts, chats, strict=True):
        wanted = chat_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert prompt.tokens.tolist() == wanted


STRUCTS = [{"a": 1, "b": None}, {"a": None, "b": [{"c": "x", "d": None}]}, {"a": 3, "b": []}]


@pytest.mark.parametrize(("ending", "nulls"), [("parquet", True), ("jsonl", True), ("jsonl", False)])
@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("{{ m | tojson }}!", ['{"a": 1}!', '{"b": [{"c": "x"}]}!', '{"a": 3, "b": []}!']),
        ("{{ m.a or 'no' }} {{ m.b | default([]) | length }}", ["1 0", "no 1", "3 0"]),
        ("{{ 'none' if m.a is none else m.a }} {{ m.a == none }}", ["1 False", "none True", "3 False"]),
        ("{% for key, value in m.items() %}{{ key }}{% endfor %}{{ m | length }}", ["a1", "b1", "ab2"]),
        ("{{ [m.a] | tojson }} {{ m.b is defined }} {{ 'b' in m }}", ["[1] False False", "[null] True True"]),
        ("{{ m.a }}.", ["1.", ErrorCode.TEMPLATE_ERROR, "3."]),
        ("{% for each in m.b %}{{ each.d }}{% endfor %}.", [ErrorCode.TEMPLATE_ERROR, ErrorCode.TEMPLATE_ERROR, "."]),
    ],
)
def test_a_template_reads_a_null_inside_a_column_and_a_key_that_is_not_there_alike(
    byte_level: Any, tmp_path: Path, template: str, texts: list[Any], ending: str, nulls: bool
) -> None:
    table = pa.table({"m": STRUCTS})
    if ending == "parquet":
        pq.write_table(table, tmp_path / "in.parquet")
    else:
        rows = table.to_pylist() if nulls else [{"m": without_nulls(each)} for each in STRUCTS]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, errors = build(byte_level, read(str(tmp_path / f"in.{ending}"), "m"), template=template)
    found: dict[int, Any] = {row: each.code for row, each in errors.items()}
    found |= {prompt.row: prompt.tokens.tolist() for prompt in prompts}
    for row, text in enumerate(texts):
        assert found[row] == (text if isinstance(text, ErrorCode) else byte_level(text)["input_ids"])


TELLS_ROLES = """{% if messages[0].role != 'system' %}<|im_start|>system
Be good.<|im_end|>{% endif %}{% for m in messages %}{% if m.role in ('user', 'assistant') or (m.role == 'system' and
loop.first) %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content | trim }}{% endif %}
{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_message_that_the_chat_template_leaves_out_is_an_error(
    chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", TELLS_ROLES)
    names = {"s": "system", "u": "user", "a": "assistant", "d": "developer", "t": "tool"}
    kept = ["u", "su", "sua", "uauau"]
    left_out = {"du": 1, "uad": 3, "usu": 2, "udau": 2, "uat": 3, "tu": 1}
    chats: list[list[dict[str, Any]]] = [
        [{"role": names[letter], "content": f"I say {at}."} for at, letter in enumerate(roles)]
        for roles in [*kept, *left_out]
    ]
    own = [
        [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Hi"}],  # what the template says too
        [{"role": "developer", "content": " "}, {"role": "user", "content": "Hi"}],  # it says nothing
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    ]
    parts = [{"role": "user", "content": [{"type": "audio", "text": "Hi"}]}]
    prompts, errors = build(chat_tokenizer, batch_of(messages=[*own, *chats, parts, *chats]))
    assert [prompt.row for prompt in prompts] == [0, 1, 2, 3, 4, 5, 6, *range(14, 18)]
    for prompt in prompts[:7]:
        chat = [*own, *chats][prompt.row]
        wanted = chat_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert prompt.tokens.tolist() == wanted
    numbers = [*left_out.values(), 1, *left_out.values()]
    for (_, error), number in zip(sorted(errors.items()), numbers, strict=True):
        assert error.code == ErrorCode.CHAT_ERROR
        assert f"message {number} " in error.detail


def test_a_system_message_that_the_chat_template_leaves_out_is_an_error(
    chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", "{{ messages[-1].content }}")
    _, errors = build(chat_tokenizer, batch_of(prompt=["Hi"]), system="Be brief.")
    assert "writes nothing of message 1 (role 'system')" in errors[0].detail


# What is put around a content, and how the arguments of a call are written.
PRINTS = "{{ m.content }}"
JOINS = "{{ m.content + '' }}"
GOES_THROUGH = "{% for part in m.content %}{{ part.text }}{% endfor %}"
DUMPS = "{{ call.function.arguments | tojson }}"
CONCATENATES = "{{ call.function.arguments + '' }}"
GOES_THROUGH_ITEMS = "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"


def with_calls(body: str) -> str:
    """A chat template that writes arguments of tool calls like this."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        f"{{{{ call.function.name }}}}:{body}{{% endfor %}}{{% endfor %}}"
    )


PLAIN, PARTS = "Is it so?", [{"type": "text", "text": "Is it so?"}]


@pytest.mark.parametrize("content", [PLAIN, PARTS])
@pytest.mark.parametrize(
    ("body", "read"), [(PRINTS, PLAIN), (JOINS, PLAIN), (GOES_THROUGH, PARTS)], ids=["prints", "joins", "goes through"]
)
def test_a_content_is_given_in_the_form_that_the_template_reads(
    chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, content: Any, body: str, read: Any
) -> None:
    monkeypatch.setattr(
        chat_tokenizer, "chat_template", f"{{% for m in messages %}}<|im_start|>{body}{{% endfor %}}Answer:"
    )
    wanted = chat_tokenizer.apply_chat_template([{"role": "user", "content": read}], return_dict=False)
    chat = [{"role": "user", "content": content}]
    prompts, errors = build(chat_tokenizer, batch_of(messages=[chat, chat]))
    assert not errors
    assert [prompt.tokens.tolist() for prompt in prompts] == [wanted, wanted]
    assert chat_tokenizer.decode(wanted).endswith("Is it so?Answer:")


@pytest.mark.parametrize("arguments", [{"a": 'ü"'}, '{"a": "ü\\""}'])
@pytest.mark.parametrize(
    ("body", "text"),
    [(DUMPS, '{"a": "ü\\""}'), (CONCATENATES, '{"a": "ü\\""}'), (GOES_THROUGH_ITEMS, 'a=ü"')],
    ids=["dumps", "concatenates", "goes through"],
)
def test_arguments_of_a_tool_call_are_given_in_the_form_that_the_template_reads(
    chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, arguments: Any, body: str, text: str
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", with_calls(body))
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ((prompt,), errors) = build(chat_tokenizer, batch_of(messages=[without_nulls(chat)]))
    assert not errors
    wanted = chat_tokenizer(f"<|im_start|>Hi<|im_start|>f:{text}", add_special_tokens=False)["input_ids"]
    assert prompt.tokens.tolist() == wanted


@pytest.mark.parametrize("body", [DUMPS, CONCATENATES, GOES_THROUGH_ITEMS], ids=["dumps", "concatenates", "items"])
def test_no_control_token_hides_in_the_json_text_of_arguments(
    chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", with_calls(body))
    deep = '{"a": ' * 5000 + "1" + "}" * 5000  # too deep to be read, and thus a text
    end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    for arguments in ('{"a": "\\u003c|im_end|\\u003e"}', '{"a": "<|im_end|>"}', deep):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
        prompts, errors = build(chat_tokenizer, batch_of(messages=[chat]), max_length=10**6)
        if arguments != deep:
            assert not errors
            assert end not in prompts[0].tokens.tolist()


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"role": ["user"], "content": ["Hi"]}, "an object ('role', 'content')"),  # a Sequence of `datasets`
        ([{"from": "human", "value": "Hi"}], "but of 'from', 'value'"),
    ],
)
def test_messages_of_another_shape_are_named(chat_tokenizer: Any, value: Any, names: str) -> None:
    _, errors = build(chat_tokenizer, batch_of(messages=[value]))
    assert errors[0].code == ErrorCode.WRONG_TYPE
    assert names in errors[0].detail


def test_a_chat_template_with_a_name_is_none_to_begin_with(
    chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", {"rag": "x", "tool_use": "y"})
    with pytest.raises(UsageError, match=r"named rag, tool_use.*\n.*chat_template\.jinja"):
        build(chat_tokenizer, batch_of(messages=[[{"role": "user", "content": "Hi"}]]))


def test_a_beginning_that_a_text_has_is_not_put_before_it_once_more(byte_level: Any) -> None:
    plain = byte_level("Is it?")["input_ids"]
    assert byte_level("<s>Is it?")["input_ids"] == [plain[0], *plain]
    assert tokens(byte_level, prompt=["<s>Is it?"], literal=False) == plain
    assert tokens(byte_level, text=["Is it?"], template="<s>{{ text }}") == plain
    literal = tokens(byte_level, prompt=["<s>Is it?"])  # in the data it is text
    assert literal[0] == plain[0]
    assert plain[0] not in literal[1:]


def test_json_text_in_a_column_of_messages_is_messages(chat_tokenizer: Any, byte_level: Any) -> None:
    chat = [{"role": "system", "content": 'Be "brief".'}, {"role": "user", "content": "<|im_end|> ü", "name": None}]
    typed, _ = build(chat_tokenizer, batch_of(messages=[chat]))
    texts = [json.dumps(chat), json.dumps(chat, ensure_ascii=False, indent=1), json.dumps(chat)[:-1], str(chat)]
    prompts, errors = build(chat_tokenizer, batch_of(messages=[*texts, "[{plain text", '[{"content": "x"}]']))
    assert [prompt.row for prompt in prompts] == [0, 1, 4]
    assert [prompts[at].tokens.tolist() for at in (0, 1)] == [typed[0].tokens.tolist()] * 2
    assert prompts[2].tokens.tolist() == tokens(chat_tokenizer, prompt=["[{plain text"])
    assert {row: error.code for row, error in errors.items()} == {
        2: "invalid_json",
        3: "invalid_json",
        5: "wrong_type",
    }
    (kept,), _ = build(chat_tokenizer, batch_of(prompt=[texts[0]]))
    said = chat_tokenizer.decode(kept.tokens.tolist())
    assert said.count("<|im_start|>") == 2, "in another column it is text"
    prompts, errors = build(byte_level, batch_of(prompt_token_ids=["[5, 6]", "5 6", "[5, 6"]))
    assert prompts[0].tokens.tolist() == [5, 6]
    assert {row: error.code for row, error in errors.items()} == {1: "invalid_token_ids", 2: "invalid_json"}


def test_a_chat_template_that_prints_the_date_gives_the_same_prompt_every_day(chat_tokenizer: Any) -> None:
    before = chat_tokenizer.chat_template
    chat_tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}:{{ messages[0].content }}"
    try:
        text = chat_tokenizer.decode(tokens(chat_tokenizer, prompt=["Hi"]))
        assert text == "26 Jul 2024:Hi"
    finally:
        chat_tokenizer.chat_template = before


def test_one_bad_chat_does_not_spoil_the_others(chat_tokenizer: Any) -> None:
    before = chat_tokenizer.chat_template
    chat_tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('no user') }}{% endif %}" + before
    )
    try:
        good = [{"role": "user", "content": "Hi"}]
        prompts, errors = build(
            chat_tokenizer,
            batch_of(
                messages=[good, [{"role": "tool", "content": "x"}], [{"role": "user"}], good, [{"content": "x"}]]
            ),
        )
    finally:
        chat_tokenizer.chat_template = before
    assert [prompt.row for prompt in prompts] == [0, 3]
    assert [errors[row].code for row in (1, 2, 4)] == ["chat_error", "chat_error", "wrong_type"]
    assert "no user" in errors[1].detail


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://x/a.png"}},
        {"type": "image"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"video": "a.mp4"},
    ],
)
def test_a_chat_with_more_than_text_is_an_error_row(chat_tokenizer: Any, part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "Is it?"}
    chats = [[{"role": "user", "content": content}] for content in ([text], [text, part], [part])]
    prompts, errors = build(chat_tokenizer, batch_of(messages=chats))
    assert [prompt.row for prompt in prompts] == [0]
    what = part.get("type", "video")
    why = f"message 1 has a part of type {what!r}: only text is read"
    assert [(errors[row].code, errors[row].detail) for row in (1, 2)] == [("chat_error", why)] * 2


def test_token_ids_are_taken_as_they_are(byte_level: Any) -> None:
    assert tokens(byte_level, prompt_token_ids=[[5, 6, 7]]) == [5, 6, 7]
    assert tokens(byte_level, prompt_token_ids=[np.array([5, 6, 7], np.int64)]) == [5, 6, 7]


def test_labels_after_token_ids_are_those_after_their_text(byte_level: Any) -> None:
    text = "Is the topic in the history? Answer:"
    labels = Labels(byte_level, typed(parse_labels("Yes,No")))
    builder = PromptBuilder(byte_level, PromptSettings(max_length=99, vocab_size=999), ("prompt_token_ids",))
    for end in ("", "\n", " "):
        ids = byte_level(text + end)["input_ids"]
        ((prompt,), _) = builder.build(batch_of(prompt_token_ids=[ids]), labels)
        assert prompt.labels == resolve(labels, text + end)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([], "invalid_token_ids"),
        ([3, 10**6], "invalid_token_ids"),
        ([2**70], "invalid_token_ids"),
        ([1, "a"], "invalid_token_ids"),
        ([1, True], "invalid_token_ids"),
        ([1.5], "invalid_token_ids"),
        (np.array([1, -2]), "invalid_token_ids"),
        (np.array([2**63], np.uint64), "invalid_token_ids"),
        (None, "null_prompt"),
        (7, "wrong_type"),
    ],
)
def test_wrong_token_ids(byte_level: Any, value: Any, code: str) -> None:
    _, errors = build(byte_level, batch_of(prompt_token_ids=[value, [1, 2]]))
    assert {row: error.code for row, error in errors.items()} == {0: code}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "null_prompt"),
        ("", "empty_prompt"),
        (" \n\t\u3000", "empty_prompt"),
        ([], "empty_prompt"),
        (5, "wrong_type"),
        ({"role": "user", "content": "x"}, "wrong_type"),
        (["just", "texts"], "wrong_type"),
        ([{"role": 3, "content": "x"}], "wrong_type"),
        ("half \ud83d", "invalid_utf8"),
        ([{"role": "user", "content": "half \ud83d"}], "invalid_utf8"),
        ("word " * 2000, "prompt_too_long"),
    ],
)
def test_wrong_prompts(chat_tokenizer: Any, value: Any, code: str) -> None:
    prompts, errors = build(chat_tokenizer, batch_of(prompt=["good", value, "good"]))
    assert {row: error.code for row, error in errors.items()} == {1: code}
    assert [prompt.row for prompt in prompts] == [0, 2]


def test_messages_without_a_chat_template_are_an_error_of_the_row(byte_level: Any) -> None:
    _, errors = build(byte_level, batch_of(prompt=[[{"role": "user", "content": "x"}]]))
    assert errors[0].code == "chat_error"


def test_a_text_without_tokens_is_empty(word_level: Any) -> None:
    backend = Tokenizer.from_str(word_level.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Replace("x", "")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    _, errors = build(tokenizer, batch_of(prompt=["xxx"]))
    assert errors[0] == RowError("empty_prompt", "the tokenizer makes no token of the prompt")


@pytest.mark.parametrize("on_long", ["truncate-left", "truncate-middle", "error"])
def test_the_tokens_of_labels_count_for_the_length(byte_level: Any, on_long: str) -> None:
    text = "word " * 10 + "Answer:"
    label = byte_level(" very satisfied", add_special_tokens=False)["input_ids"]
    whole = len(byte_level(text)["input_ids"]) + len(label) - 1
    for length, cut in ((whole, False), (whole - 1, True), (len(label), True), (len(label) - 1, True)):
        prompts, errors = build(
            byte_level, batch_of(prompt=[text]), max_length=length, on_long=on_long, labels="very satisfied,no"
        )
        if not cut or (on_long.startswith("truncate") and length >= len(label)):
            assert prompts[0].truncated == cut
            assert len(prompts[0].tokens) + len(label) - 1 == length
        else:
            assert errors[0].code == "prompt_too_long"


def test_labels_that_fail_are_an_error_of_the_row(byte_level: Any) -> None:
    _, errors = build(byte_level, batch_of(prompt=["Answer:"]), labels="Yes,Yes sir")
    assert errors[0].code == "invalid_labels"
    assert "\n" not in errors[0].detail


def test_the_prompt_column_is_found(chat_tokenizer: Any) -> None:
    def column(*available: str, **options: Any) -> tuple[str, ...]:
        settings = PromptSettings(max_length=9, vocab_size=9, **options)
        return PromptBuilder(chat_tokenizer, settings, available).columns

    assert column("id", "prompt", "messages") == ("prompt",)
    assert column("id", "messages", "prompt_token_ids") == ("messages",)
    assert column("id", "prompt_token_ids") == ("prompt_token_ids",)
    assert column("id", "text") == ("prompt",)
    assert column("messages", prompt_column="text") == ("text",)
    assert column("messages", template="{{ b }}{{ a }}") == ("a", "b")


@pytest.mark.parametrize(
    ("name", "options", "available", "says"),
    [
        ("byte_level", {"chat": True}, ("prompt",), "--chat"),
        ("byte_level", {"system": "x"}, ("prompt",), "--system"),
        ("chat_tokenizer", {"system": "x", "chat": False}, ("prompt",), "--system"),
        ("chat_tokenizer", {"system": "x"}, ("prompt_token_ids",), "--system.*token ids"),
        ("chat_tokenizer", {"chat": True}, ("prompt_token_ids",), "--chat.*token ids"),
        ("byte_level", {}, ("messages",), "messages"),
        ("chat_tokenizer", {"chat": False}, ("messages",), "--no-chat"),
    ],
)
def test_contradictions_are_usage_errors(
    request: pytest.FixtureRequest, name: str, options: Any, available: tuple[str, ...], says: str
) -> None:
    settings = PromptSettings(max_length=9, vocab_size=9, **options)
    with pytest.raises(UsageError, match=says):
        PromptBuilder(request.getfixturevalue(name), settings, available)


def test_a_template_in_a_file_is_the_one_in_the_option(chat_tokenizer: Any, tmp_path: Path) -> None:
    def fingerprint(**options: Any) -> str:
        settings = PromptSettings(max_length=9, vocab_size=9, **options)
        return PromptBuilder(chat_tokenizer, settings, ("prompt",)).fingerprint()

    (tmp_path / "t.j2").write_text("{{ a }}")
    assert fingerprint(template=str(tmp_path / "t.j2")) == fingerprint(template="{{ a }}") != fingerprint()
    assert fingerprint(chat=True) == fingerprint()


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.lists(st.integers(-5, 2000) | st.none(), max_size=4)
    | st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), st.none() | st.text(max_size=5)), max_size=2)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(values, max_size=8))
def test_no_value_of_a_row_breaks_the_batch(chat_and_plain: list[Any], column: list[Any]) -> None:
    for tokenizer in chat_and_plain:
        if column:
            build(tokenizer, batch_of(prompt=column))


@pytest.fixture(scope="session")
def chat_and_plain(chat_tokenizer: Any, llama2_like: Any) -> list[Any]:
    return [chat_tokenizer, llama2_like]


def test_a_row_says_how_it_is_compressed(byte_level: Any) -> None:
    wishes = [None, True, False, None, True, False]
    batch = batch_of(prompt=["Answer:"] * 6, keep=[0.5, 1, None, float("nan"), 1e-9, 1.0], specprefill=wishes)
    prompts, errors = build(byte_level, batch, row_columns=(COMPRESSION_COLUMNS,))
    assert not errors
    assert [prompt.keep for prompt in prompts] == [0.5, 1, None, None, 1e-9, 1.0]
    assert [prompt.specprefill for prompt in prompts] == wishes


def test_a_prompt_that_is_too_large_is_an_error_before_it_is_tokenised(byte_level: Any, chat_tokenizer: Any) -> None:
    texts = ["a" * 100, "a" * 101, "\u00e4" * 51, "b"]
    for options in ({}, {"template": "{{ prompt }}"}):
        _, errors = build(byte_level, batch_of(prompt=texts), max_row_bytes=100, **options)
        assert {row: error.code for row, error in errors.items()} == dict.fromkeys((1, 2), "row_too_large")
        assert "102 bytes" in errors[2].detail
    _, errors = build(byte_level, batch_of(n=[3, 200]), max_row_bytes=500, template="{{ 'abc' * n }}")
    assert {row: error.code for row, error in errors.items()} == {1: "row_too_large"}
    size = len(chat_tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)) + 22
    for bound, failing in ((size, []), (size - 1, [0])):  # what the chat template adds counts
        assert list(build(chat_tokenizer, batch_of(prompt=["a"]), max_row_bytes=bound)[1]) == failing


def test_prompts_that_a_template_makes_long_are_tokenised_a_bounded_number_of_bytes_at_a_time(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = Encoder.encode

    def watched(self: Encoder, texts: Any, **options: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return encode(self, texts, **options)

    monkeypatch.setattr(Encoder, "encode", watched)
    template = "{{ 'Is it? ' * 100 }}{{ n }}"
    options = PromptSettings(template=template, max_length=10_000, vocab_size=len(byte_level))
    builder = PromptBuilder(byte_level, options, ("n",), group_chars=2_000)
    prompts, errors = builder.build(batch_of(n=list(range(20))), Labels(byte_level, typed(parse_labels("Yes,No"))))
    assert not errors
    assert [list(p.tokens) for p in prompts] == [byte_level("Is it? " * 100 + str(n))["input_ids"] for n in range(20)]
    assert max(sizes) < 3_000


def test_the_largest_row_follows_from_the_longest_prompt(byte_level: Any) -> None:
    def bound(max_length: int, on_long: Any = "error") -> int:
        settings = PromptSettings(max_length=max_length, vocab_size=999, on_long=on_long)
        return PromptBuilder(byte_level, settings, ("prompt",)).max_row_bytes

    longest = max(len(token.encode()) for token in byte_level.get_vocab())
    assert bound(100) == bound(100, "skip") == 8 << 20
    assert bound(10**6) == 2 * 10**6 * longest
    assert bound(10**8) == bound(100, "truncate-left") == bound(100, "truncate-middle") == 64 << 20
