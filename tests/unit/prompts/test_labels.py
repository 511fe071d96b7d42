"""Labels: how they are written, and which tokens each of them is after a prompt."""

from __future__ import annotations

from contextlib import suppress
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prefillcli.asking.choices import RowChoices
from prefillcli.asking.targets import Targets
from prefillcli.errors import UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.plan.behind import LabelTokens
from prefillcli.prompts.labels import LabelError, Labels, parse_labels, tail_of
from prefillcli.prompts.questions import Label, typed
from prefillcli.rows.records import RowError, Window
from tests.unit.prompts.labels import resolve


class TestParse:
    def test_names_alone(self) -> None:
        assert parse_labels("Yes, No") == (Label("Yes"), Label("No"))

    def test_variants_are_literal_with_their_spaces(self) -> None:
        assert parse_labels("Yes= Yes|yes|YES,No") == (Label("Yes", (" Yes", "yes", "YES")), Label("No"))

    def test_marks_can_be_escaped(self) -> None:
        assert parse_labels(r"a\,b,c\=d,e=\||\\|x=y") == (
            Label("a,b"),
            Label("c=d"),
            Label("e", ("|", "\\", "x=y")),
        )

    def test_a_list_has_one_label_per_item(self) -> None:
        assert parse_labels(["Yes= Yes|yes", "No, never"]) == (Label("Yes", (" Yes", "yes")), Label("No, never"))

    @pytest.mark.parametrize("text", ["Yes", "", "Yes,", "Yes,Yes", "Yes,=a", "Yes=,No", "Yes=a||b,No", ["Yes"], []])
    def test_wrong_labels_are_usage_errors(self, text: Any) -> None:
        with pytest.raises(UsageError, match="label"):
            parse_labels(text)

    names = st.text(min_size=1).map(str.strip).filter(bool)

    @given(
        st.lists(names, min_size=2, max_size=5, unique=True), st.lists(st.text(min_size=1), max_size=3, unique=True)
    )
    def test_escaped_labels_come_back_as_they_were(self, names: list[str], variants: list[str]) -> None:
        def escape(text: str) -> str:
            for mark in '\\,|="':
                text = text.replace(mark, f"\\{mark}")
            return text

        labels = [Label(name) for name in names]
        if variants:
            labels[0] = Label(names[0], tuple(variants))
        texts = [
            escape(names[0]) + ("=" + "|".join(map(escape, variants)) if variants else ""),
            *map(escape, names[1:]),
        ]
        assert parse_labels(",".join(texts)) == tuple(labels)
        assert parse_labels(texts) == tuple(labels)

    @given(st.text())
    def test_any_text_is_parsed_or_refused(self, text: str) -> None:
        with suppress(UsageError):
            assert len(parse_labels(text)) >= 2


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def chosen(tokenizer: Any, prompt: str, labels: str = "Yes,No") -> LabelTokens | None:
    """The tokens of labels of one token each; None of others."""
    return resolve(Labels(tokenizer, typed(parse_labels(labels))), prompt).single


ALL = ["byte_level", "llama3_like", "metaspace", "llama2_like", "word_level"]


@pytest.fixture(params=ALL)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


PROMPT = "Is the topic in the history of the user? Answer:"


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_label_is_the_token_that_follows_the_whole_prompt(tokenizer: Any, end: str) -> None:
    prompt = PROMPT + end
    space = "" if end else " "
    yes, no = (ids(tokenizer, prompt + space + word)[-1] for word in ("Yes", "No"))
    assert ids(tokenizer, prompt + space + "Yes") == [*ids(tokenizer, prompt), yes]  # the premise
    assert chosen(tokenizer, prompt) == ((yes,), (no,))


def test_white_space_at_the_prompts_end_goes_to_the_labels(tokenizer: Any) -> None:
    (found,) = Labels(tokenizer, typed(parse_labels("Yes,No"))).resolve_all([tail_of(PROMPT + " ")])
    assert not isinstance(found, LabelError)
    assert found.labels.single == chosen(tokenizer, PROMPT)
    assert [*ids(tokenizer, PROMPT), *found.moved] == ids(tokenizer, PROMPT + " ")


def test_after_a_special_token_it_is_the_word_as_it_is(chat_tokenizer: Any) -> None:
    vocabulary = chat_tokenizer.get_vocab()
    for prompt in ("Reply.<|im_end|>", "<|im_start|>assistant\n"):
        assert chosen(chat_tokenizer, prompt) == ((vocabulary["Yes"],), (vocabulary["No"],))
    assert chosen(chat_tokenizer, "Answer:") == ((vocabulary["ĠYes"],), (vocabulary["ĠNo"],))


def test_after_a_special_token_it_is_what_this_tokenizer_makes_of_the_word_there(metaspace_always: Any) -> None:
    prompt = "Reply.</s>"
    yes, no = (ids(metaspace_always, prompt + word)[-1] for word in ("Yes", "No"))
    assert metaspace_always.convert_ids_to_tokens([yes, no]) == ["▁Yes", "▁No"]  # the premise
    assert chosen(metaspace_always, prompt) == ((yes,), (no,))


def test_labels_of_one_set_all_have_a_space_or_none_has(byte_level: Any) -> None:
    vocabulary = byte_level.get_vocab()
    assert "Ġ(" in vocabulary
    assert "Ġ)" not in vocabulary
    found = resolve(Labels(byte_level, typed(parse_labels("(,)"))), PROMPT)
    assert [own.tolist() for own in found.sequences] == [[vocabulary["Ġ("]], [vocabulary["Ġ"], vocabulary[")"]]]


def test_variants_are_taken_literally_and_are_all_there(byte_level: Any) -> None:
    vocabulary = byte_level.get_vocab()
    found = chosen(byte_level, PROMPT, "Yes= Yes|Yes,No=No")
    assert found == ((vocabulary["ĠYes"], vocabulary["Yes"]), (vocabulary["No"],))


def test_variants_of_a_label_that_are_one_token_count_once(word_level: Any) -> None:
    vocabulary = word_level.get_vocab()
    assert chosen(word_level, PROMPT, "Yes= Yes|Yes|yes,No") == (
        (vocabulary["Yes"], vocabulary["yes"]),
        (vocabulary["No"],),
    )


def test_equal_sets_are_stored_once(tokenizer: Any) -> None:
    labels = Labels(tokenizer, typed(parse_labels("Yes,No")))
    found = [resolve(labels, f"prompt {number} {PROMPT}") for number in range(50)]
    assert len({id(each) for each in found}) == len(set(found))
    assert labels.names == ("Yes", "No")


def test_a_label_unknown_to_the_vocabulary_is_refused(word_level: Any) -> None:
    with pytest.raises(LabelError, match="unknown"):
        chosen(word_level, PROMPT, "Zebra,No")


def test_two_labels_on_one_token_are_refused(word_level: Any) -> None:
    with pytest.raises(LabelError, match=r"'A' and 'B' are the same token 'Yes'"):
        chosen(word_level, PROMPT, "A= Yes,B=Yes")


def test_check_refuses_labels_that_fail_after_every_prompt(byte_level: Any) -> None:
    labels = Labels(byte_level, typed(parse_labels("Yes,No")))
    error = RowError("invalid_labels", "label 'Yes' has no tokens of its own")
    window = Window(0, np.arange(2), [], {0: error, 1: RowError("null_prompt", "")}, pa.table({}))
    with pytest.raises(LabelError, match="'Yes'"):
        labels.check(window)
    window.errors = {1: RowError("null_prompt", "")}
    labels.check(window)


words = st.sampled_from(
    ["Is", "the", "topic", "music", "Answer:", "x", "\n", "news.", "Ünïcode", "→", "12", "(", "  "]
)


class Family:
    """Tokenizers, with a short repr for Hypothesis."""

    def __init__(self, *members: Any) -> None:
        self.members = members


@pytest.fixture(scope="session")
def family(byte_level: Any, llama3_like: Any, metaspace: Any, llama2_like: Any, word_level: Any) -> Family:
    return Family(byte_level, llama3_like, metaspace, llama2_like, word_level)


@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(words, min_size=1, max_size=30),
    end=st.sampled_from(["", ":", "\n", "?\n\n", " ->", ")", " ", "  ", "\n ", "\t", " " * 40, " mus", " (", '"']),
    answers=st.lists(
        st.sampled_from(["Yes", " Yes", "No", "ic", "A", "1", " 1", "user topic", "é", " news, music", "Yes it"]),
        min_size=2,
        max_size=3,
        unique=True,
    ),
)
def test_every_answer_has_the_tokens_of_the_harness(
    family: Family, parts: list[str], end: str, answers: list[str]
) -> None:
    """As a label, among others or not, as a choice and as a target, behind the short tail as behind the whole
    prompt."""
    prompt = " ".join(parts) + end
    for tokenizer in family.members:
        context, whole = ids(tokenizer, prompt.rstrip(" \t")), ids(tokenizer, prompt)
        if not context or whole[: len(context)] != context:
            continue  # the white space has no tokens of its own
        for answer in answers:
            wanted = harness_tokens(tokenizer, prompt, answer)
            if not wanted or tokenizer.unk_token_id in wanted:
                continue
            choices = RowChoices(tokenizer, ScoreSettings(inputs=["a"], model="b", choices_column="c"), "c")
            targets = Targets(tokenizer, "t", literal=True)
            tail, literal = tail_of(prompt), [Label(each, (each,)) for each in answers]
            found = [
                *Labels(tokenizer, typed([Label(answer, (answer,))])).resolve_all([tail]),
                *Labels(tokenizer, typed(literal)).resolve_all([tail]),
                *targets.resolve_all([tail], values=[[answer]]),
            ]
            if prompt[-1:].isspace() or answer[0] == " ":  # else a choice gets a space
                found += choices.resolve_all([tail], values=[[[answer]]])
            for number, each in enumerate(found):
                if not isinstance(each, LabelError):  # as where one label begins another
                    place = answers.index(answer) if number == 1 else 0
                    assert each.labels.spellings[place][0].tolist() == wanted
                    assert list(each.moved) == whole[len(context) :]
                else:
                    assert number == 1


@given(st.text())
def test_a_tail_is_the_end_of_the_prompt(text: str) -> None:
    tail = tail_of(text)
    assert text.endswith(tail)
    assert len(tail.rstrip()) <= 32
    assert tail_of(tail) == tail
    assert len(tail) >= min(len(text), 6)


@pytest.mark.parametrize(
    ("labels", "right", "wrong", "unknown"),
    [
        ("Yes,No", ["Yes", " yes ", "TRUE", "1", True, 1, 1.0], ["No", "no", False, 0], ["", "Perhaps", 2, -1, 0.5]),
        ("No,Yes", ["No", "false", False, 0], ["YES", True, 1, "1.0"], ["?"]),
        ("Yes= Yes|yes|YES,No= No|no", ["Yes", "yes", "YES"], ["No", "no", "NO"], ["y"]),
        ("A,B,C", ["A", "a", True, 1], ["B", "C", False, 0], ["D"]),
        ("A,a,b", ["A"], ["a", "B"], ["x"]),
        ("1,0", ["1", 1, 1.0, "1.0", True, "Yes"], ["0", 0, 0.0, False], [2]),
        ("0,1", ["0", 0, 0.0], ["1", 1, 1.0], [2]),
        ("2,1,0", [2, 2.0, "2"], [1, 0, "0"], [3]),
        ("True,False", [True, "True", "true", 1], [False, "False", 0], ["t"]),
        ("None,Some", ["None"], ["Some"], []),
    ],
)
def test_a_right_answer_is_a_label_a_spelling_of_it_or_a_truth_value(
    byte_level: Any, labels: str, right: list[Any], wrong: list[Any], unknown: list[Any]
) -> None:
    known = Labels(byte_level, typed(parse_labels(labels)))
    assert [known.is_positive(answer) for answer in right] == [True] * len(right)
    assert [known.is_positive(answer) for answer in wrong] == [False] * len(wrong)
    for answer in (*unknown, None, float("nan"), float("inf")):
        assert known.is_positive(answer) is None


def harness_tokens(tokenizer: Any, context: str, continuation: str) -> list[int]:
    """The continuation's tokens as lm-evaluation-harness has them (`TemplateLM._encode_pair`), but line breaks stay
    with the context."""
    spaces = len(context) - len(context.rstrip(" \t"))
    if spaces > 0:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    return ids(tokenizer, context + continuation)[len(ids(tokenizer, context)) :]


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
def test_longer_labels_have_the_tokens_of_the_harness(
    name: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(name)
    words = st.sampled_from(["Yes", "No", "user", "topic", "history"])
    prompt = PROMPT + data.draw(st.sampled_from(["", " ", "\n", "\n\n", "  "]))
    phrases = st.lists(words, min_size=2, max_size=4).map(" ".join)
    if name != "word_level":  # it knows whole words alone
        phrases |= st.text("aeinorstyYN0159 ,.'-:\"é", min_size=4, max_size=40).map(str.strip).filter(bool)
    names = data.draw(st.lists(phrases, min_size=2, max_size=3, unique=True))
    assume(not any(one != other and other.startswith(one) for one in names for other in names))
    space = "" if prompt[-1].isspace() else " "
    wanted = [harness_tokens(tokenizer, prompt, space + each) for each in names]
    assume(not any(one[: len(other)] == other for one, other in permutations(wanted, 2)))
    found = resolve(Labels(tokenizer, typed([Label(each) for each in names])), prompt)
    assert [own.tolist() for own in found.sequences] == wanted


def test_a_label_that_begins_another_needs_an_end(byte_level: Any) -> None:
    labels = [Label("Yes"), Label("Yes user")]
    with pytest.raises(LabelError, match=r"'Yes' begins label 'Yes user'(.|\n)*--label-end") as caught:
        resolve(Labels(byte_level, typed(labels)), PROMPT)
    assert caught.value.exit_code == 2
    assert str(caught.value).count("\n") < 3
    found = resolve(Labels(byte_level, typed(labels), end="."), PROMPT)
    assert [own.tolist() for own in found.sequences] == [
        harness_tokens(byte_level, PROMPT, f" {label.name}.") for label in labels
    ]


def test_of_spellings_that_begin_one_another_the_shorter_one_counts_for_both(byte_level: Any) -> None:
    both = [Label("Yes", (" Yes", " Yes it is")), Label("No", (" No, never", " No, never more", " Nobody knows"))]
    found = resolve(Labels(byte_level, typed(both)), "Answer:")
    expected = [[" Yes"], [" No, never", " Nobody knows"]]
    tokens = [
        [ids(byte_level, f"Answer:{own}")[len(ids(byte_level, "Answer:")) :] for own in each] for each in expected
    ]
    assert [[own.tolist() for own in each] for each in found.spellings] == tokens
