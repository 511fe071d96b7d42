"""How rows are dealt to shards: each to one of them, the same way every time, those that begin alike together."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.core.windows import (
    RUN_ROWS,
    Dealer,
    ShardRows,
    WindowSize,
    windows,
)
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.labels import Labels, parse_labels
from prefillcli.prompts.questions import typed
from prefillcli.prompts.settings import PromptSettings
from prefillcli.rows.input.source import Source
from prefillcli.rows.output import Shard
from prefillcli.rows.records import Window

Write = Callable[..., str]

KEYS = st.lists(st.lists(st.binary(max_size=200), max_size=60), max_size=5)


def deal(count: int, *window_keys: list[bytes]) -> list[list[int]]:
    dealer = Dealer(count)
    return [dealer.deal(keys, [len(key) for key in keys]).tolist() for keys in window_keys]


@given(KEYS, st.integers(1, 9))
def test_every_row_goes_to_one_shard_and_the_same_when_read_again(window_keys: list[list[bytes]], count: int) -> None:
    dealt = deal(count, *window_keys)
    assert [len(each) for each in dealt] == [len(keys) for keys in window_keys]
    assert all(0 <= number < count for each in dealt for number in each)
    assert dealt == deal(count, *window_keys)


def users(sizes: list[int], *, history: int, seed: int = 0) -> tuple[list[bytes], list[int]]:
    """Rows of users in random order, with what user each is of."""
    drawn = random.Random(seed)
    histories = [drawn.randbytes(history) for _ in sizes]
    owners = [user for user, size in enumerate(sizes) for _ in range(size)]
    drawn.shuffle(owners)
    return [histories[user] + drawn.randbytes(40) for user in owners], owners


@given(st.lists(st.integers(1, 30), min_size=8, max_size=40), st.integers(1, 4), st.integers(0, 9))
def test_rows_that_begin_alike_stay_together_wherever_they_lie(sizes: list[int], count: int, seed: int) -> None:
    keys, owners = users(sizes, history=3000, seed=seed)
    (dealt,) = deal(count, keys)
    shards = defaultdict(set)
    for owner, number in zip(owners, dealt, strict=True):
        shards[owner].add(number)
    assert all(len(numbers) == 1 for numbers in shards.values())


@pytest.mark.parametrize("count", [2, 3, 5, 8, 16])
def test_shards_have_about_the_same_work(count: int) -> None:
    drawn = random.Random(3)
    sizes = [drawn.randint(1, 60) for _ in range(40 * count)]
    keys, owners = users(sizes, history=2000)
    (dealt,) = deal(count, keys)
    work = [0] * count
    seen: set[tuple[int, int]] = set()
    for key, owner, number in zip(keys, owners, dealt, strict=True):
        work[number] += len(key) - (2000 if (owner, number) in seen else 0)
        seen.add((owner, number))
    assert max(work) < 1.05 * sum(work) / count
    assert len(seen) == len(sizes)  # no history is computed twice


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_short_rows_are_dealt_to_all_shards_evenly(count: int) -> None:
    keys = [random.Random(row).randbytes(100) for row in range(400)]
    (dealt,) = deal(count, keys)
    rows = np.bincount(dealt, minlength=count)
    assert rows.min() > 0
    assert rows.max() <= 1.3 * 400 / count


def test_a_group_that_is_too_large_for_a_run_is_shared_by_all() -> None:
    keys = [b"document" * 500 + b"%06d" % row for row in range(5 * RUN_ROWS)]
    (dealt,) = deal(3, keys)
    assert set(dealt) == {0, 1, 2}
    assert max(np.bincount(dealt)) <= 2 * RUN_ROWS


def test_balance_holds_over_windows() -> None:
    drawn = random.Random(5)
    window_keys = [[drawn.randbytes(drawn.choice((10, 4000))) for _ in range(3)] for _ in range(200)]
    work = [0] * 4
    for keys, dealt in zip(window_keys, deal(4, *window_keys), strict=True):
        for key, number in zip(keys, dealt, strict=True):
            work[number] += len(key)
    assert max(work) < 1.05 * sum(work) / 4


def test_a_user_whom_a_windows_end_cuts_stays_with_one_shard() -> None:
    history = random.Random(1).randbytes(3000)
    others = [[random.Random(10 * window + row).randbytes(500) for row in range(9)] for window in range(2)]
    for count in (2, 3, 5):
        first, second = deal(
            count, [*others[0], history + b"1", history + b"2"], [history + b"3", history + b"4", *others[1]]
        )
        assert {*first[-2:], *second[:2]} == {first[-1]}


# ---------------------------------------------------------------------------------------------------------- windows


def cut(tokenizer: Any, path: str, shard: Shard | None, **options: Any) -> list[Window]:
    source = Source.open([path], carried=["id"])
    template = "{{ history }}{{ post }} Answer:"
    builder = PromptBuilder(
        tokenizer, PromptSettings(max_length=500, vocab_size=10**6, template=template), source.available
    )
    source.select(columns=builder.columns, carried=["id"])
    labels = Labels(tokenizer, typed(parse_labels("Yes,No")))
    only = None if shard is None else ShardRows(shard, builder)
    return list(windows(source, builder, labels, id_column="id", only=only, **options))


def make_rows(write_jsonl: Write) -> str:
    rows: list[Any] = [
        {"id": f"r{row}", "history": f"Likes of {row % 7}: " + "fox dog " * 10, "post": f"number {row * 31 % 97}"}
        for row in range(300)
    ]
    rows[40]["post"] = None
    rows[41] = b"{"
    rows[250]["id"] = "r3"
    rows[251] = {"id": "r251", "history": {"deep": [1, "x"]}, "post": 5}
    return write_jsonl(rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_the_shards_of_a_window_are_that_window(byte_level: Any, write_jsonl: Write, count: int) -> None:
    path = make_rows(write_jsonl)
    options = {"size": WindowSize(100, batch_rows=40)}
    whole = cut(byte_level, path, None, **options)
    shards = [cut(byte_level, path, Shard(number + 1, count), **options) for number in range(count)]
    for window in whole:
        own = [each for windows in shards for each in windows if each.index == window.index]
        assert sorted(np.concatenate([each.rows for each in own])) == window.rows.tolist()
        assert all(each.whole_rows.tolist() == window.rows.tolist() for each in own)
        assert {row: error for each in own for row, error in each.errors.items()} == window.errors
        tokens = {prompt.row: prompt.tokens.tolist() for each in own for prompt in each.prompts}
        assert tokens == {prompt.row: prompt.tokens.tolist() for prompt in window.prompts}
        for each in own:
            ids = [json.loads(text) if text else None for text in each.carried["id"].to_pylist()]
            known = dict(zip(window.rows.tolist(), window.carried["id"].to_pylist(), strict=True))
            assert ids == [json.loads(text) if (text := known[row]) else None for row in each.rows.tolist()]


def test_a_shard_makes_prompts_of_its_own_rows_only(byte_level: Any, write_jsonl: Write) -> None:
    path = make_rows(write_jsonl)
    seen: list[tuple[int, list[int]]] = []

    def skip(index: int, rows: Any) -> bool:
        seen.append((index, rows.tolist()))
        return index == 0

    found = cut(byte_level, path, Shard(1, 3), size=WindowSize(100, batch_rows=40), skip=skip)
    assert [index for index, _ in seen] == [0, 1, 2]
    assert [(window.index, window.rows.tolist()) for window in found] == seen[1:]
    assert sum(len(rows) for _, rows in seen) < 200
