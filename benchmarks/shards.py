"""`python -m benchmarks.shards`: what a shard spends on the rows of the others, and how well the work is dealt.

Rows of users, each with a history of 8,000 characters behind which 1 to 60 posts of 400 lie, or short rows without
histories; in the order of the users, or in random order. Seconds are processor time, for a million rows. Work is in
characters, where what rows of one shard have in common counts once in a window. Merging is timed with made-up scores.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from prefillcli.data.output import Shard
from prefillcli.data.output.columns import OutputSchema
from prefillcli.data.output.sink import JoinedShards, ShardSink
from prefillcli.data.output.target import Job, Target
from prefillcli.data.prompts.builder import PromptBuilder, PromptSettings
from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Prompt, ScoredRow, Window
from prefillcli.data.windows import Dealer, ShardRows, WindowSize, windows
from prefillcli.models.files import sample_model
from prefillcli.plan.behind import LabelSet

WINDOW = 4_096
TEMPLATE = "{{ history }}{{ post }} Answer:"
WORDS = ["the", "fox", "likes", "a", "brown", "dog", "and", "runs", "over", "post", "number", "quickly"]


def _text(drawn: random.Random, characters: int) -> str:
    return " ".join(drawn.choices(WORDS, k=characters // 5))[:characters]


def _rows(count: int, history: int, *, shuffled: bool) -> pa.Table:
    drawn = random.Random(0)
    histories: list[str] = []
    posts: list[str] = []
    while len(posts) < count:
        own = _text(drawn, history)
        for _ in range(drawn.randint(1, 60) if history else 1):
            histories.append(own)
            posts.append(_text(drawn, 400))
    order = list(range(len(posts)))
    if shuffled:
        drawn.shuffle(order)
    chosen = order[:count]
    return pa.table({"history": [histories[at] for at in chosen], "post": [posts[at] for at in chosen]})


def _read(path: Path, tokenizer: Any, rows: int, shard: Shard | None, *, tokenise: bool) -> float:
    """Processor seconds for a million rows to read the windows, and to make prompts of them or to leave that out."""
    source = Source.open([str(path)], limit=rows)
    settings = PromptSettings(max_length=100_000, vocab_size=10**6, template=TEMPLATE)
    builder = PromptBuilder(tokenizer, settings, source.available)
    source.select(columns=builder.columns, carried=[])
    labels = Labels(tokenizer, parse_labels("Yes,No"))
    begun = time.process_time()
    for _ in windows(
        source,
        builder,
        labels,
        id_column=None,
        size=WindowSize(WINDOW),
        skip=None if tokenise else lambda index, rows: True,
        only=None if shard is None else ShardRows(shard, builder),
    ):
        pass
    seconds = time.process_time() - begun
    builder.close()
    return seconds * 1e6 / rows


def _work(table: pa.Table, count: int) -> Iterator[list[int]]:
    """The work of each shard, and as the last number what one process has, window by window."""
    dealer = Dealer(count)
    for start in range(0, len(table), WINDOW):
        piece = table.slice(start, WINDOW)
        histories, posts = piece["history"].to_pylist(), piece["post"].to_pylist()
        keys = [f"{h}\0{p}".encode() for h, p in zip(histories, posts, strict=True)]
        dealt = dealer.deal(keys, [len(key) for key in keys]).tolist()
        work = [0] * count
        for number, own in {(number, own) for number, own in zip(dealt, histories, strict=True)}:
            work[number] += len(own)
        for number, post in zip(dealt, posts, strict=True):
            work[number] += len(post)
        yield [*work, sum(map(len, set(histories))) + sum(map(len, posts))]


def _merge(folder: str, windows: int, shards: int) -> tuple[float, float]:
    """Processor seconds for a million rows to merge so many shards, and to merge a single one."""
    seconds = []
    for count in (shards, 1):
        output = f"{folder}/{count}.parquet"
        for number in range(count):
            _write_shard(output, Shard(number + 1, count), windows)
        begun = time.process_time()
        with JoinedShards(Target.parse(output)) as joined:
            joined.open(overwrite=False)
            joined.check()
            joined.write()
            joined.remove()
        seconds.append((time.process_time() - begun) * 1e6 / (windows * WINDOW))
    return seconds[0], seconds[1]


def _write_shard(output: str, shard: Shard, windows: int) -> None:
    labels, logprobs = ("Yes", "No"), np.log(np.array([0.6, 0.3]))
    job, schema = Job({"input": "made up"}), OutputSchema(labels=labels)
    with ShardSink.open(output, job, schema, shard=shard) as sink:
        for index in range(windows):
            whole = np.arange(index * WINDOW, (index + 1) * WINDOW)
            rows = whole[shard.number - 1 :: shard.count]
            prompts = [Prompt(row, np.zeros(9, np.int32), LabelSet(())) for row in rows.tolist()]
            scores = [ScoredRow(row, logprobs, 0, 9, 9, 0.1) for row in rows.tolist()]
            carried = pa.table({"": pa.nulls(len(rows))}).select([])
            sink.write(Window(index, rows, prompts, {}, carried, whole), scores, {}, temperature=1.0)
        sink.finish(windows)


def main(
    rows: Annotated[int, typer.Option(help="Of each input.")] = 16_384,
    tokenised: Annotated[int, typer.Option(help="The first rows of each input, of which prompts are made.")] = 512,
    rounds: Annotated[int, typer.Option(help="Of each time; the median counts.")] = 3,
) -> None:
    """Print a table of times and one of work."""
    tokenizer = AutoTokenizer.from_pretrained(sample_model())
    inputs = {
        "users in order": _rows(rows, 8_000, shuffled=False),
        "users in random order": _rows(rows, 8_000, shuffled=True),
        "short rows": _rows(rows, 0, shuffled=False),
    }
    times = Table("s per 1,000,000 rows", "read", "read and deal", "read and tokenise all")
    with tempfile.TemporaryDirectory() as folder:
        for name, table in inputs.items():
            path = Path(folder) / "rows.parquet"
            pq.write_table(table, path)
            ways = [(rows, None, False), (rows, Shard(1, 8), False), (tokenised, None, True)]
            seconds = [
                [_read(path, tokenizer, count, shard, tokenise=tokenise) for count, shard, tokenise in ways]
                for _ in range(rounds)
            ]
            times.add_row(name, *(f"{each:,.0f}" for each in np.median(seconds, axis=0)))
    with tempfile.TemporaryDirectory() as folder:
        merged, alone = _merge(folder, max(rows // WINDOW, 1), 8)
    shares = Table("shards", *(f"{name}: {what}" for name in inputs for what in ("largest", "sum")))
    for count in (2, 4, 8, 16, 64):
        cells = []
        for table in inputs.values():
            *work, alone = np.sum(list(_work(table, count)), axis=0).tolist()
            cells += [f"{max(work) / (sum(work) / count):.3f}", f"{sum(work) / alone:.3f}"]
        shares.add_row(str(count), *cells)
    console = Console(width=160)
    console.print(times)
    console.print(f"to merge 1,000,000 rows of 8 shards: {merged:,.1f} s; of one shard: {alone:,.1f} s")
    console.print(shares)
    console.print("largest: the largest share over the mean one; sum: all shares over the work of one process")


if __name__ == "__main__":
    typer.run(main)
