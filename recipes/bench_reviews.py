"""What compression costs on a real model: the sentiment of drug reviews, sixteen examples before each.

python -m recipes.bench_reviews [FOLDER]

SmolLM2-135M is its own draft, so nothing becomes faster: `prefill bench` compares the answers at a keep rate of 0.3,
as it comes and with --paper. In the files `own.*` every row has examples of its own, in `shared.*` ten rows share
theirs. Defaults were chosen on the files `*.chosen`; what is compared are those held out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.real_model import FOLDER, Review, real_model, reviews

SHOTS, ROWS, TOGETHER = 16, 80, 10  # examples of a prompt; rows of a file; rows with the same examples
COMPARED = 40  # rows of a file
METHODS = "specprefill,random,ends,bm25"


def write_rows(folder: Path) -> dict[str, Path]:
    """The files by name. Reviews that are asked about are of the test split, examples of the training split.

    Both are halved: no review is in a file that defaults were chosen on and in one that was held out.
    """
    rng = Random(0)
    asked = _balanced(rng, reviews("Test", folder), 2 * ROWS)
    by_sentiment = [[each for each in asked if each.sentiment == name] for name in ("positive", "negative")]
    pool = reviews("Train", folder)
    rng.shuffle(pool)
    files = {}
    for number, half in enumerate(("chosen", "held")):
        rows = [each for own in by_sentiment for each in own[number * ROWS // 2 : (number + 1) * ROWS // 2]]
        rng.shuffle(rows)
        examples = pool[number * len(pool) // 2 : (number + 1) * len(pool) // 2]
        for kind, together in (("own", 1), ("shared", TOGETHER)):
            prompts: list[str] = []
            for at in range(0, ROWS, together):
                shots = "".join(f"{_ask(each)} {each.sentiment}\n\n" for each in _balanced(rng, examples, SHOTS))
                prompts += [shots + _ask(each) for each in rows[at : at + together]]
            table = pa.table({"prompt": prompts, "sentiment": [each.sentiment for each in rows]})
            files[f"{kind}.{half}"] = folder / f"{kind}.{half}.parquet"
            pq.write_table(table, files[f"{kind}.{half}"])
    return files


def _ask(review: Review) -> str:
    return f"Review: {review.text}\nSentiment:"


def _balanced(rng: Random, pool: list[Review], count: int) -> list[Review]:
    """`count` of the reviews in random order, half of them positive."""
    positive, negative = ([each for each in pool if each.sentiment == name] for name in ("positive", "negative"))
    found = rng.sample(positive, count // 2) + rng.sample(negative, count // 2)
    rng.shuffle(found)
    return found


def main() -> int:
    """Returns the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    model = str(real_model(folder))
    files = write_rows(folder)
    for name in ("shared.held", "own.held"):
        for setting, options in (
            ("default", ["--method", METHODS]),
            ("paper", ["--method", "specprefill", "--paper"]),
        ):
            command = [sys.executable, "-m", "prefillcli", "bench", str(files[name]), "--model", model, "--no-chat"]
            command += ["--draft", model, "--keep", "0.3", "--labels", "positive,negative", "--truth", "sentiment"]
            command += [
                "--limit",
                str(COMPARED),
                "--rounds",
                "0",
                "--output",
                str(folder / f"{name}.{setting}.json"),
                *options,
            ]
            done = subprocess.run(command, check=False)  # noqa: S603 - our own command line
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
