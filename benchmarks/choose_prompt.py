"""Which prompt tells positive from negative drug reviews best, chosen on the package's training file alone.

python -m benchmarks.choose_prompt [FOLDER] [CANDIDATE ...]

Every candidate scores the same reviews of the training file. The examples in its prompt are other reviews of that
file. Prints a table for docs/benchmarks.md; the candidate with the largest AUC is `CHOSEN`, which `make demo-real`
takes to the test file, with the threshold that was best here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.stats.evaluation import auc
from recipes.real_model import FOLDER, Review, gguf_file, reviews

ROWS = 160  # reviews that candidates are compared on
MOST_EXAMPLES = 8  # so many reviews are kept for examples
LONGEST_EXAMPLE = 400  # characters


class Candidate(NamedTuple):
    """A prompt: how a review is asked about, the answers for positive and negative ones, and how many examples."""

    asked: str
    labels: tuple[str, str]
    examples: int
    chat: bool = False

    @property
    def template(self) -> str:
        """For `prefill score --template`, over the columns `examples` and `review`."""
        return "{{ examples }}" + self.asked.replace("REVIEW", "{{ review }}")


SENTIMENT = "Review: REVIEW\nSentiment:"
CHAT = "Is this review of a drug positive or negative? Answer with one word.\n\nREVIEW"
CANDIDATES = {
    "sentiment, no example": Candidate(SENTIMENT, ("positive", "negative"), 0),
    "sentiment, 2 examples": Candidate(SENTIMENT, ("positive", "negative"), 2),
    "sentiment, 4 examples": Candidate(SENTIMENT, ("positive", "negative"), 4),
    "good or bad, no example": Candidate("Review: REVIEW\nThe drug is", ("good", "bad"), 0),
    "satisfied, Yes or No, no example": Candidate(
        "Review: REVIEW\nIs the patient satisfied? Answer:", ("Yes", "No"), 0
    ),
    "chat, no example": Candidate(CHAT, ("Positive", "Negative"), 0, chat=True),
}
CHOSEN = "sentiment, no example"
THRESHOLD = 0.5


def first_short(
    train: Sequence[Review], count: int, sentiments: Sequence[str] = ("positive", "negative")
) -> list[Review]:
    """The first short reviews of the training file, of these sentiments in turn."""
    found: list[Review] = []
    for number in range(count):
        sentiment = sentiments[number % len(sentiments)]
        found.append(
            next(
                each
                for each in train
                if each.sentiment == sentiment and len(each.text) < LONGEST_EXAMPLE and each not in found
            )
        )
    return found


def write_rows(candidate: Candidate, train: Sequence[Review], rows: Sequence[Review], path: Path) -> None:
    """The rows with what the template needs, and the right answer in the column `truth`."""
    answer = dict(zip(("positive", "negative"), candidate.labels, strict=True))
    shown = "".join(
        f"{candidate.asked.replace('REVIEW', each.text)} {answer[each.sentiment]}\n\n"
        for each in first_short(train, candidate.examples)
    )
    columns = {"examples": [shown] * len(rows), "review": [each.text for each in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns | {"truth": [answer[each.sentiment] for each in rows]}), path)


def command_of(candidate: Candidate, rows: Path, scores: Path, model: Path) -> list[str]:
    """`prefill score` with these rows."""
    command = ["score", str(rows), "--model", str(model), "--output", str(scores), "--overwrite"]
    command += ["--template", candidate.template, "--labels", ",".join(candidate.labels), "--truth", "truth"]
    return [*command, "--chat" if candidate.chat else "--no-chat"]


def main() -> int:
    """Returns the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    model, train = gguf_file(folder), reviews("Train", folder)
    most = first_short(train, MOST_EXAMPLES)
    rows = Random(0).sample([each for each in train if each not in most], ROWS)
    print("| prompt | AUC | best accuracy | at a threshold of | label mass |\n| --- | --- | --- | --- | --- |")
    found = {}
    for name in sys.argv[2:] or CANDIDATES:
        candidate = CANDIDATES[name]
        source, scores = folder / "choose.parquet", folder / "choose.scores.parquet"
        write_rows(candidate, train, rows, source)
        command = [sys.executable, "-m", "prefillcli", *command_of(candidate, source, scores, model), "--quiet"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - our own
        if done.returncode:
            return done.returncode
        table = pq.read_table(scores)
        score = table["score"].to_numpy()
        positive = np.asarray(table["truth"]) == candidate.labels[0]
        limits = np.unique(score)
        right = [float(np.mean((score >= limit) == positive)) for limit in limits]
        best = float(limits[int(np.argmax(right))])
        found[name] = {"auc": auc(score, positive) or 0.0, "accuracy": max(right), "threshold": best}
        mass = float(np.mean(table["label_mass"].to_numpy()))
        print(f"| {name} | {found[name]['auc']:.3f} | {max(right):.1%} | {best:.3f} | {mass:.2f} |", flush=True)
    print(json.dumps({"chosen": max(found, key=lambda name: found[name]["auc"]), "prompts": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
