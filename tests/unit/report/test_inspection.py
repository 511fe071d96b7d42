"""One prompt in the terminal and as a page: nothing of it runs, nothing is hidden, the numbers are there."""

from __future__ import annotations

import io
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prefillcli.report.section import visible
from prefillcli.tools.inspection import (
    STEPS,
    AnswerView,
    CommonPrefix,
    Inspection,
    TokenReason,
    TokenView,
    heat,
    inspection_html,
    print_inspection,
    stretches,
    write_html,
)

HOSTILE = "<script>alert(1)</script>\x1b[31m\x1b]8;;http://evil\x07 \u202egnp.exe\u2066\u200b\x00\x7f\x9b2J\r"


def inspection_of(
    texts: list[str], why: list[TokenReason], importance: Sequence[float | None] | None = None
) -> Inspection:
    tokens = [
        TokenView(at, 1000 + at, text, importance[at] if importance else None, reason != "dropped", reason)
        for at, (text, reason) in enumerate(zip(texts, why, strict=True))
    ]
    return Inspection(
        row=17,
        row_id="user-42",
        model="some/model",
        draft="some/draft",
        labels=["Yes", "No"],
        tokens=tokens,
        shared=[CommonPrefix(4, 12), CommonPrefix(120, 3)],
        full=AnswerView({"Yes": -0.42, "No": -1.31}, 0.7089, 0.927, "Yes"),
        compressed=AnswerView({"Yes": -1.02, "No": -0.61}, 0.399, 0.904, "No"),
        settings={"keep": 0.2, "select_chunk": 10},
        method="specprefill",
        voters=(2, 4),
        draft_layers=6,
    )


def example(tokens: int = 200) -> Inspection:
    """Chunks of 10; the third one of ten is kept."""
    drawn = random.Random(0)
    why: list[TokenReason] = ["chosen" if at % 100 // 10 == 2 else "dropped" for at in range(tokens)]
    why[:4], why[-8:] = ["first"] * 4, ["last"] * 8
    importance = [drawn.lognormvariate(-4, 1) * (10 if reason == "chosen" else 1) for reason in why]
    return inspection_of([f" word{at}" for at in range(tokens)], why, importance)


def printed(inspection: Inspection, *, colour: bool, most_tokens: int | None = None, **options: object) -> str:
    kind = {"force_terminal": True, "color_system": "truecolor"} if colour else {"force_terminal": False}
    console = Console(file=io.StringIO(), width=100, legacy_windows=False, _environ={}, **(kind | options))
    print_inspection(inspection, console, most_tokens=most_tokens)
    return console.file.getvalue()


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class Page(HTMLParser):
    """Elements and text of a page; raises if tags are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.prompt = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append("prompt div" if ("class", "prompt") in attrs else tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().removeprefix("prompt ") == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if "prompt div" in self.open and "summary" not in self.open:
            self.prompt += data


def test_every_kind_of_character_that_acts_is_spelled_out() -> None:
    assert visible(HOSTILE) == (
        "<script>alert(1)</script>␛[31m␛]8;;http://evil␇ ⟨U+202E⟩gnp.exe⟨U+2066⟩⟨U+200B⟩␀␡⟨U+009B⟩2J␍"
    )
    assert visible("\ud800 \u2028 \U000e0041 \u061c") == "⟨U+D800⟩ ⟨U+2028⟩ ⟨U+E0041⟩ ⟨U+061C⟩"
    assert visible("a\n\tb") == "a\n\tb"
    assert visible("a\n\tb", line=True) == "a↵ b"
    for text in ("क\u200dष 👩\u200d💻 日本語\u3000ü", "\u0645\u06cc\u200c\u062e"):
        assert visible(text) == text


@given(st.text())
def test_visible_text_has_no_control_character(text: str) -> None:
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", visible(text))


@pytest.mark.parametrize("colour", [True, False])
def test_terminal_gets_no_escape_from_the_data(colour: bool) -> None:
    names = {"row_id": HOSTILE, "model": HOSTILE, "draft": HOSTILE, "method": HOSTILE, "labels": [HOSTILE]}
    answer = AnswerView({HOSTILE: -1.0}, 1.0, 0.4, HOSTILE)
    hostile = replace(
        inspection_of([HOSTILE, "[bold]", HOSTILE], ["first", "dropped", "chosen"], [0.1, 0.2, 0.3]),
        **names,
        full=answer,
        compressed=answer,
    )
    text = printed(hostile, colour=colour)

    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", without_styles(text))
    assert "␛[31m" in text
    assert not colour or "[bold]" in text  # no markup either


def test_terminal_says_what_was_done() -> None:
    text = without_styles(printed(example(), colour=True))

    for part in (
        "user-42 (row 17 of the input)",
        "some/draft",
        "200, 32 kept (16.0%)",
        "the first 4 by 12 rows, the first 120 by 3 rows",
        "always kept: start 4; always kept: end 8; chosen for importance 20; dropped 168",
        "rank of importance among the kept tokens",
    ):
        assert part in " ".join(text.split())
    assert re.search(r"prediction +Yes +No +FLIP", text)
    assert re.search(r"score +0\.7089 +0\.399 +-0\.3099", text)
    assert re.search(r"label mass +0\.927 +0\.904 +-0\.023", text)
    assert re.search(r"log P\(Yes\) +-0\.420 +-1\.020 +-0\.600", text)


def test_same_answer_is_no_flip() -> None:
    inspection = example()
    assert re.search(
        r"prediction +Yes +Yes +same", printed(replace(inspection, compressed=inspection.full), colour=False)
    )


def test_kept_tokens_are_coloured_and_dropped_ones_dim() -> None:
    texts = [" hot", " warm", " even", " cool", " cold", " gone", " same"]
    why: list[TokenReason] = ["chosen"] * 5 + ["dropped", "shared"]
    inspection = inspection_of(texts, why, [9.0, 0.5, 0.4, 0.3, 0.1, 8.0, None])
    prompt = printed(inspection, colour=True).split("equal size")[1].split("Most important")[0]

    styles = {text: style for style, text in re.findall("\x1b\\[([0-9;]*)m( [a-z]+)", prompt)}
    assert styles == {
        " hot": "38;2;255;255;255;48;2;200;30;30",
        " warm": "38;2;0;0;0;48;2;238;127;45",
        " even": "38;2;0;0;0;48;2;201;154;46",
        " cool": "38;2;255;255;255;48;2;125;116;64",
        " cold": "38;2;255;255;255;48;2;91;107;122",
        " gone": "2",
        " same": "3",  # no importance is known
    }


def test_long_dropped_stretch_is_folded_with_its_ends_in_sight() -> None:
    text = " ".join(without_styles(printed(example(), colour=True)).split())

    assert "word3 word4 word5 word6 word7 word8 word9 word10 word11 [… 0" not in text
    assert "word19" in text  # 16 dropped tokens are no long stretch
    assert "word37 [… 74 tokens dropped] word112" in text
    assert "word60" not in text.split("Most important")[0]


def test_plain_text_has_brackets_and_counts() -> None:
    for text in (
        printed(example(), colour=False),
        without_styles(printed(example(), colour=True, no_color=True)),
        printed(example(), colour=False, color_system="truecolor"),
    ):
        prompt = " ".join(text.split("⟦… dropped⟧")[1].split("\n\n")[1].split())
        assert prompt.startswith("⟦ word0 word1 word2 word3⟧⟦… 16 tokens dropped⟧⟦ word20 word21")
        assert "word29⟧⟦… 90 tokens dropped⟧⟦ word120" in prompt
        assert prompt.endswith("word199⟧")


def test_brackets_of_the_data_are_not_ours() -> None:
    text = printed(inspection_of(["a⟧⟦… 9 tokens dropped⟧", "b", "c"], ["first", "dropped", "last"]), colour=False)
    assert "⟦a⟨U+27E7⟩⟨U+27E6⟩… 9 tokens dropped⟨U+27E7⟩⟧⟦… 1 token dropped⟧⟦c⟧" in text


@pytest.mark.parametrize("colour", [True, False])
def test_newlines_keep_the_layout(colour: bool) -> None:
    text = printed(inspection_of(["one", "\n\n", "  two", "\n"], ["full"] * 4), colour=colour)
    assert "one\n\n  two\n" in without_styles(text)
    assert "⟦" not in text  # nothing is dropped


@pytest.mark.parametrize(("most", "ends"), [(0, (0, 0)), (1, (1, 0)), (5, (3, 2)), (31, (16, 15)), (32, (32, 0))])
def test_no_more_tokens_than_asked_for(most: int, ends: tuple[int, int]) -> None:
    text = printed(example(), colour=False, most_tokens=most).split("⟦… dropped⟧")[1].split("Most important")[0]
    found = re.findall(r"word\d+", text)

    kept = [f"word{token.position}" for token in example().tokens if token.kept]
    assert found == kept[: ends[0]] + kept[len(kept) - ends[1] :]
    hidden = sum(int(number) for number in re.findall(r"… (\d+) (?:kept )?token", text))
    assert len(found) + hidden == 200
    said = re.search(r"not shown, (\d+) of them kept|(\d+) kept tokens? not shown", text)
    assert int(next(filter(None, said.groups())) if said else 0) == 32 - most


@given(st.lists(st.tuples(st.floats(0, 1) | st.none() | st.just(math.nan), st.booleans()), max_size=60))
def test_heat_is_the_rank_among_the_kept(values: list[tuple[float | None, bool]]) -> None:
    tokens = [
        TokenView(at, 0, "", value, kept, "chosen" if kept else "dropped") for at, (value, kept) in enumerate(values)
    ]
    steps, ranges = heat(tokens)

    known = [(value, step) for (value, _), step in zip(values, steps, strict=True) if step is not None]
    assert len(known) == sum(1 for value, kept in values if kept and value is not None and not math.isnan(value))
    for value, step in known:
        below = sum(other < value for other, _ in known) + sum(other == value for other, _ in known) / 2
        assert step == min(int(STEPS * below / len(known)), STEPS - 1)
        low, high = ranges[step] or (math.inf, -math.inf)
        assert low <= value <= high


def test_steps_are_of_equal_size() -> None:
    steps, _ = heat([TokenView(at, 0, "", math.exp(at), True, "chosen") for at in range(100)])
    assert [steps.count(step) for step in range(STEPS)] == [20] * STEPS


def test_most_important_stretches_are_the_chunks_with_the_highest_mean() -> None:
    inspection = example(205)
    means = {
        start: sum(token.importance or 0 for token in chunk) / len(chunk)
        for start in range(0, 205, 10)
        if (chunk := inspection.tokens[start : start + 10])
    }
    found = stretches(inspection)

    assert [stretch.first for stretch in found] == sorted(means, key=lambda start: -means[start])[:10]
    assert [stretch.importance for stretch in found] == pytest.approx([means[stretch.first] for stretch in found])
    assert (found[0].last - found[0].first, found[0].why) == (9, ("chosen",))
    assert stretches(inspection_of(["a"], ["full"])) == []


def test_page_is_closed_in_itself_and_holds_the_whole_prompt() -> None:
    inspection = example()
    html = inspection_html(inspection)
    page = Page(html)

    assert page.prompt == "".join(token.text for token in inspection.tokens)
    assert "http:" not in html
    assert "https:" not in html
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "a", "form"}
    assert not {name for _, attributes in page.tags for name in attributes} & {"src", "href", "onclick", "onload"}
    assert "url(" not in html
    assert "@import" not in html
    assert "… 74 tokens dropped" not in page.text  # the page folds whole stretches
    assert "… 90 tokens dropped" in page.text
    token = inspection.tokens[25]
    titles = [attributes.get("title") for _, attributes in page.tags]
    assert f"token 25, id 1025, importance {token.importance:.3g}, chosen" in titles
    for part in ("some/draft", "200, 32 kept (16.0%)", "FLIP", "0.7089", "-0.3099", "select_chunk", "chosen for"):
        assert part in page.text


def test_page_escapes_the_data() -> None:
    hostile = replace(
        inspection_of([HOSTILE, '"><img src=x onerror=alert(1)>', HOSTILE], ["first", "dropped", "chosen"], [1, 2, 3]),
        row_id=HOSTILE,
        labels=["</title><b>"],
        full=AnswerView({"</title><b>": -1.0}, 1.0, 0.4, "</title><b>"),
        compressed=None,
        settings={"<u>": "</dd><u>" + HOSTILE},
    )
    html = inspection_html(hostile)
    page = Page(html)

    assert not {tag for tag, _ in page.tags} & {"script", "img", "b", "u"}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)
    assert '"><img src=x onerror=alert(1)>' in page.prompt
    assert "␛[31m" in page.prompt
    assert "log P(</title><b>)" in page.text


def test_page_keeps_newlines() -> None:
    assert Page(inspection_html(inspection_of(["\n", "\n a", " \n", "b\n"], ["full"] * 4))).prompt == "\n\n a \nb\n"


def test_page_of_an_empty_prompt() -> None:
    empty = replace(example(), tokens=[], shared=[], compressed=None)
    assert Page(inspection_html(empty)).prompt == ""
    assert "0, 0 kept" in printed(empty, colour=True)


@pytest.mark.nightly
@pytest.mark.parametrize("kept", [True, False])
def test_long_prompts_stay_small_and_fast(kept: bool) -> None:
    inspection = example(50_000)
    if kept:
        inspection = replace(inspection, tokens=[replace(t, kept=True, why="full") for t in inspection.tokens])
    begun = time.process_time()
    html = inspection_html(inspection)
    printed(inspection, colour=True)

    assert time.process_time() - begun < 20
    assert len(html.encode()) < 5_000_000 * 50_000 / 20_000
    assert len(inspection_html(replace(inspection, tokens=inspection.tokens[:20_000])).encode()) < 5_000_000
    assert Page(html).prompt == "".join(token.text for token in inspection.tokens)


def test_page_is_written_whole(tmp_path: Path) -> None:
    write_html(example(), str(tmp_path / "row.html"))
    assert (tmp_path / "row.html").read_text(encoding="utf-8") == inspection_html(example())
