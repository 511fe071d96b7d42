"""Scores against transformers' own eager forward, from every kind of input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.jobs.jobs import (
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.jobs.test_likelihood import encoded_pair, likelihood


def test_parquet_scores_equal_the_eager_forward(model: Path, reference: Reference) -> None:
    prompts = texts(30)
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, model=model)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert_scored(rows, [reference.answer(text) for text in prompts])
    assert [row["row"] for row in rows] == list(range(30))


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.ndjson.zst"])
def test_json_lines_scores_equal_the_eager_forward(model: Path, reference: Reference, name: str) -> None:
    prompts = texts(9)
    source = write_jsonl(name, [{"prompt": text} for text in prompts])
    assert score(source, model=model)["exit_code"] == 0
    assert_scored(read_output("out.parquet"), [reference.answer(text) for text in prompts])


def test_prompt_token_ids_are_taken_as_they_are(model: Path, reference: Reference) -> None:
    ids = [[5, 6, 7], [0, 300, 5, 6], [399], [5, 6, 7, 8]]
    wanted = [reference.answer(prompt) for prompt in ids]
    parquet = write_parquet("in.parquet", prompt_token_ids=ids)
    lines = write_jsonl("in.jsonl", [{"prompt_token_ids": prompt} for prompt in ids])
    for source in (parquet, lines):
        # with no text before them, the labels are those that follow the decoded end of the ids
        assert score(source, model=model, labels="Yes= Yes,No= No", overwrite=True)["exit_code"] == 0
        assert_scored(read_output("out.parquet"), wanted)


def test_messages_pass_through_the_chat_template(chat_model: Path, chat_reference: Reference) -> None:
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "no"}, {"role": "user", "content": "So?"}]
        for text in texts(6)
    ]
    parquet = write_parquet("in.parquet", messages=chats)
    lines = write_jsonl("in.jsonl", [{"messages": chat} for chat in chats])
    wanted = [
        chat_reference.answer(
            chat_reference.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"],
            labels=(("Yes",), ("No",)),  # a word that begins a line has no space before it
        )
        for chat in chats
    ]
    for source in (parquet, lines):
        assert score(source, model=chat_model, overwrite=True)["exit_code"] == 0
        assert_scored(read_output("out.parquet"), wanted)


@pytest.mark.parametrize("system", [None, "Answer with Yes or No."])
def test_text_is_a_user_message_where_the_tokenizer_has_a_chat_template(
    chat_model: Path, chat_reference: Reference, system: str | None
) -> None:
    prompts = texts(4)
    before = [{"role": "system", "content": system}] if system else []
    wanted = [
        chat_reference.answer(
            chat_reference.tokenizer.apply_chat_template(
                [*before, {"role": "user", "content": text}], add_generation_prompt=True
            )["input_ids"],
            labels=(("Yes",), ("No",)),
        )
        for text in prompts
    ]
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, model=chat_model, **({"system": system} if system else {}))["exit_code"] == 0
    assert_scored(read_output("out.parquet"), wanted)


def test_no_chat_scores_the_bare_text(chat_model: Path, chat_reference: Reference) -> None:
    prompts = texts(4)
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, model=chat_model, chat=False)["exit_code"] == 0
    assert_scored(read_output("out.parquet"), [chat_reference.answer(text) for text in prompts])


def test_a_template_over_several_columns(model: Path, reference: Reference) -> None:
    rows = [{"user": f"fox {i}", "items": ["a", "b"][: i % 3], "n": i} for i in range(6)]
    template = "{{ user }} saw{% for item in items %} {{ item }}{% endfor %}; {{ n + 1 }}?\nAnswer:"
    wanted = [
        reference.answer(f"{r['user']} saw{''.join(' ' + item for item in r['items'])}; {r['n'] + 1}?\nAnswer:")
        for r in rows
    ]
    Path("prompt.jinja").write_text(template)
    parquet = write_parquet("in.parquet", **{name: [r[name] for r in rows] for name in rows[0]})
    for source, given in ((parquet, template), (write_jsonl("in.jsonl", rows), "prompt.jinja")):
        assert score(source, model=model, template=given, overwrite=True)["exit_code"] == 0
        assert_scored(read_output("out.parquet"), wanted)


def test_a_column_of_another_name(model: Path, reference: Reference) -> None:
    prompts = texts(3)
    source = write_parquet("in.parquet", question=prompts, prompt=["x"] * 3)
    score(source, model=model, prompt_column="question")
    assert_scored(read_output("out.parquet"), [reference.answer(text) for text in prompts])


@pytest.mark.parametrize("temperature", [0.25, 3.0])
def test_temperature_divides_the_label_logits(model: Path, reference: Reference, temperature: float) -> None:
    prompts = texts(6)
    source = write_parquet("in.parquet", prompt=prompts)
    score(source, model=model, temperature=temperature)
    assert_scored(read_output("out.parquet"), [reference.answer(text, temperature=temperature) for text in prompts])


def test_variants_of_a_label_add_up_their_probability(model: Path, reference: Reference) -> None:
    prompts = texts(6)
    source = write_parquet("in.parquet", prompt=prompts)
    score(source, model=model, labels="Yes= Yes|yes,No= No|no")
    labels = ((" Yes", "yes"), (" No", "no"))
    assert_scored(read_output("out.parquet"), [reference.answer(text, labels) for text in prompts])


def test_several_labels_in_the_order_given(model: Path, reference: Reference) -> None:
    prompts = texts(9)
    source = write_parquet("in.parquet", prompt=prompts)
    names = ("No", "Yes", "fox", "quick")
    score(source, model=model, labels=names)
    labels = tuple((f" {name}",) for name in names)
    rows = read_output("out.parquet")
    assert_scored(rows, [reference.answer(text, labels) for text in prompts], names)
    assert list(rows[0])[:6] == ["row", "score", *(f"logprob_{name}" for name in names)][:6]


def test_a_label_after_a_line_break_has_no_space(model: Path, reference: Reference) -> None:
    prompts = [f"{text}\n" for text in texts(4)] + texts(4)
    source = write_parquet("in.parquet", prompt=prompts)
    score(source, model=model)
    bare, spaced = (("Yes",), ("No",)), ((" Yes",), (" No",))
    wanted = [reference.answer(text, bare if text.endswith("\n") else spaced) for text in prompts]
    assert_scored(read_output("out.parquet"), wanted)


@pytest.mark.parametrize(
    "flags",
    [
        {"pack_tokens": 64},
        {"pack_tokens": 64, "prefix_kv": "discard"},
        {"pack_tokens": 64, "chunk_tokens": 19},
        {"pack_tokens": 64, "prefix_kv": "offload"},
        {"pack_tokens": 1},
        {"memory": "64MiB", "chunk_tokens": 16},
    ],
    ids=lambda flags: " ".join(f"{k}={v}" for k, v in flags.items()),
)
def test_packs_and_memory_change_no_score_and_no_order(
    model: Path, reference: Reference, flags: dict[str, object]
) -> None:
    prompts = texts(20)
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, model=model, **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert_scored(rows, [reference.answer(text) for text in prompts])
    assert [row["row"] for row in rows] == list(range(20))
    report = read_report()
    assert sum(row["computed_tokens"] for row in rows) == report["tokens"]["computed"]
    assert "pack_tokens" not in flags or report["packs"] > 3


def test_shared_prefixes_are_computed_once(model: Path, reference: Reference) -> None:
    prompts = texts(30)
    score(write_parquet("in.parquet", prompt=prompts), model=model)
    ids = [reference.ids(text) for text in prompts]
    unique = len({tuple(p[: i + 1]) for p in ids for i in range(len(p))})
    tokens = read_report()["tokens"]
    assert tokens["prompt"] == tokens["kept"] == sum(map(len, ids))
    assert tokens["unique"] == unique
    assert unique <= tokens["computed"] <= 1.02 * unique
    rows = read_output("out.parquet")
    assert sum(row["computed_tokens"] for row in rows) == tokens["computed"]
    assert sum(row["shared_tokens"] for row in rows) == tokens["shared"]
    assert all(row["shared_tokens"] <= row["prompt_tokens"] for row in rows)


def test_the_same_prompt_twice_has_the_same_score(model: Path) -> None:
    prompts = texts(5)
    score(write_parquet("in.parquet", prompt=prompts + prompts), model=model)
    found = [row["score"] for row in read_output("out.parquet")]
    assert found[:5] == found[5:]


@pytest.mark.parametrize("end", [None, "eos", "."])
@pytest.mark.parametrize("norm", ["none", "tokens", "bytes"])
def test_longer_labels_have_the_scores_of_lm_evaluation_harness(
    model: Path, reference: Reference, norm: str, end: str | None
) -> None:
    """The log-probability of each label and its end, divided by its length."""
    names = ["a fox é", "a fox saw a dog" if end is None else "a fox", "No"]
    behind = {None: "", "eos": "", ".": "."}[end]
    prompts = [*texts(6), "The fox: \n"]
    options = {"label_norm": norm, "label_end": end}
    score(write_parquet("in.parquet", prompt=prompts), model=model, labels=names, **options)
    for row, prompt in zip(read_output("out.parquet"), prompts, strict=True):
        divided = []
        for name in names:
            spaced = name if prompt[-1].isspace() else f" {name}"
            context, tokens = encoded_pair(reference, prompt, spaced + behind)
            tokens += [reference.tokenizer.eos_token_id] if end == "eos" else []
            logprob = sum(likelihood(reference, context, tokens)[0])
            assert row[f"logprob_{name}"] == pytest.approx(logprob, rel=1e-6, abs=1e-5)
            divided.append(logprob / {"none": 1, "tokens": len(tokens), "bytes": len(name.encode())}[norm])
        shares = np.exp(divided)
        assert row["score"] == pytest.approx(shares[0] / shares.sum(), abs=1e-5)
        assert row["prediction"] == names[int(shares.argmax())]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("prompt", "engine"),
    [
        *((f"The {end}", "torch") for end in ("fox:", "fox: ", "fox:  ", "fox:\n", "br", "fox (\n ")),
        ("The fox: ", "hf"),
        ("The br", "hf"),
    ],
)
def test_an_answer_is_as_likely_among_any_others_and_of_any_kind(
    model: Path, reference: Reference, prompt: str, engine: str
) -> None:
    """As lm-evaluation-harness has it: as one of several labels, a choice and a target."""
    answers = ["No", "ow", "1", "No, never"]
    if not prompt[-1].isspace():
        answers = [f" {answer}" for answer in answers] + ["own"]
    alone = len(reference.ids("\n"))
    wanted = []
    for answer in answers:
        before, behind = encoded_pair(reference, prompt, answer)
        # The harness has no number where prompt and answer are one token: the answer's own tokens are read there.
        behind = behind or reference.ids(f"\n{answer}")[alone:]
        wanted.append(sum(likelihood(reference, before, behind)[0]))
    spelled = {f"a{number}": f"a{number}={each}".replace(",", r"\,") for number, each in enumerate(answers)}
    common = {"model": model, "engine": engine}
    source = write_parquet("in.parquet", prompt=[prompt], choices=[answers])
    for names in (list(spelled)[:3], list(spelled)[1:3] + list(spelled)[4:], list(spelled)[2:4]):
        score(source, labels=",".join(spelled[name] for name in names), overwrite=True, **common)
        (row,) = read_output("out.parquet")
        for name in names:
            assert row[f"logprob_{name}"] == pytest.approx(wanted[int(name[1])], rel=1e-6, abs=1e-5)
    targets = write_parquet("targets.parquet", prompt=[prompt] * len(answers), target=answers)
    score(targets, "targets.out.parquet", target_column="target", **common)
    assert [row["logprob"] for row in read_output("targets.out.parquet")] == pytest.approx(wanted, rel=1e-6, abs=1e-5)
    if prompt[-1].isspace():
        score(source, "choices.out.parquet", choices_column="choices", label_end=None, **common)
        (row,) = read_output("choices.out.parquet")
        assert row["error"] == "invalid_labels"  # "No" begins "No, never"
        write_parquet("in.parquet", prompt=[prompt], choices=[answers[1:]])
        score(source, "choices.out.parquet", choices_column="choices", overwrite=True, **common)
        (row,) = read_output("choices.out.parquet")
        assert row["logprobs"] == pytest.approx(wanted[1:], rel=1e-6, abs=1e-5)
