"""Several thousand rows of real text: the reviews cut into passages of one to four sentences, most of one.

python -m benchmarks.review_passages [FOLDER]

Besides `passages.parquet` it writes two nights for a first model (docs/exit.md): `today.parquet`, the passages of two
thirds of the reviews, and `night.parquet` for training, whose rows overlap: any one to four sentences in a row of the
other reviews and of the neutral ones.

Proving that at most 1 % of a class flip takes hundreds of rows of the class; there are fewer than a thousand reviews.
Every sentence of a review is in one passage at most. The prompt is that of `make demo-real`, without an example:
behind two of them the model calls 97 % of the passages negative, and so rare an answer proves nothing. `sentiment` is
that of the whole review: a passage may say nothing of it, or the opposite, so rows differ in how hard they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.review_rows import ask
from recipes.real_model import FOLDER, Review, reviews

SENTENCES, SHARES = (1, 2, 3, 4), (14, 4, 1, 1)  # of a passage, and how often in 20
LENGTHS = range(30, 1200)  # characters of a passage
WINDOWS = range(20, 1200)  # characters of a row for training
LABELS = ("positive", "negative")
NAME = "passages.parquet"

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=\S)")


def cut(text: str, rng: Random) -> Iterator[str]:
    """The passages of a review, in its order: each of one to four sentences, most of one."""
    sentences = _SENTENCE_END.split(text)
    at = 0
    while at < len(sentences):
        count = rng.choices(SENTENCES, SHARES)[0]
        passage = " ".join(sentences[at : at + count])
        at += count
        if len(passage) in LENGTHS:
            yield passage


def passage_table(shown: Sequence[Review], pool: Sequence[Review], seed: int = 0) -> pa.Table:
    """Columns `id`, `prompt`, `passage`, `review` (its number in the pool) and `sentiment`, in random order.

    No passage comes twice. The reviews `shown` are the examples of every prompt, and are not cut.
    """
    rng = Random(f"passages {seed}")
    found: dict[str, tuple[int, str]] = {}
    for number, review in enumerate(pool):
        if review not in shown:
            for passage in cut(review.text, rng):
                found.setdefault(passage, (number, review.sentiment))
    examples = "".join(f"{ask(each)} {each.sentiment}\n\n" for each in shown)
    rows = [(text, number, sentiment) for text, (number, sentiment) in found.items()]
    rng.shuffle(rows)
    return pa.table(
        {
            "id": [f"passage-{at:05d}" for at in range(len(rows))],
            "prompt": [examples + ask(Review(text, "")) for text, _, _ in rows],
            "passage": [text for text, _, _ in rows],
            "review": pa.array([number for _, number, _ in rows], pa.int32()),
            "sentiment": [sentiment for _, _, sentiment in rows],
        }
    )


def write_passages(folder: Path = FOLDER) -> Path:
    """The passages of all reviews of both splits, as FOLDER/passages.parquet."""
    table = passage_table([], [*reviews("Train", folder), *reviews("Test", folder)])
    path = folder / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def write_nights(folder: Path = FOLDER) -> tuple[Path, Path]:
    """FOLDER/night.parquet and FOLDER/today.parquet. No text is in both."""
    pool = [*reviews("Train", folder), *reviews("Test", folder)]
    table = passage_table([], pool)
    numbers = sorted(set(table["review"].to_pylist()))
    Random("split").shuffle(numbers)
    learnt = set(numbers[: len(numbers) // 3])
    today = table.filter(pc.invert(pc.is_in(table["review"], pa.array(learnt, pa.int32()))))
    asked = {pool[number].text for number in numbers if number not in learnt}
    others = [each for split in ("Train", "Test") for each in reviews(split, folder, neutral=True)]
    taught = [pool[number] for number in sorted(learnt)] + [each for each in others if each.sentiment == "neutral"]
    texts: dict[str, None] = {}
    for review in taught:
        sentences = _SENTENCE_END.split(review.text) if review.text not in asked else []
        texts |= {" ".join(sentences[at : at + count]): None for count in SENTENCES for at in range(len(sentences))}
    known = set(today["passage"].to_pylist())
    rows = [text for text in texts if len(text) in WINDOWS and text not in known]
    pq.write_table(pa.table({"prompt": [ask(Review(text, "")) for text in rows]}), folder / "night.parquet")
    pq.write_table(today, folder / "today.parquet")
    return folder / "night.parquet", folder / "today.parquet"


def main() -> None:
    """Write the rows, and say how many there are."""
    path = write_passages(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    write_nights(path.parent)
    truth = pq.read_table(path, columns=["sentiment"])["sentiment"].to_pylist()
    print(f"{len(truth):,} passages, {truth.count('positive'):,} of positive reviews: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
