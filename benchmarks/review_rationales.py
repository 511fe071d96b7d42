"""Ten drug reviews with a rationale and evidence, by a real model, as a page of Markdown shows them.

python -m benchmarks.review_rationales [FOLDER]

SmolLM2-135M-Instruct (`recipes/real_model.py`) is too small to argue, but it can quote. So the four examples of the
prompt give a sentence of the review after the answer, and the template of the rationale asks for one. The sentences of
a review stand on lines of their own: each is a section. The reviews are the first ones of the package's test file that
are neither short nor long, whatever is written about them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.real_model import FOLDER, Review, real_model, reviews

ROWS = 10
LEAST, MOST = 150, 450  # characters of a review
SHOWN = 3  # sentences of a review
WORDS = "because it says:"
EXAMPLES = (
    (
        "Expensive, but it is the only thing that has ever helped my back.",
        "positive",
        "it is the only thing that has ever helped my back.",
    ),
    (
        "I was sick all day and it did nothing for my migraines.\nNever again.",
        "negative",
        "it did nothing for my migraines.",
    ),
    (
        "The first days were hard because I felt dizzy.\nNow I sleep through the night and feel like myself again.",
        "positive",
        "I sleep through the night and feel like myself again.",
    ),
    (
        "I gained 20 pounds and cried every day, so I stopped taking it.",
        "negative",
        "I gained 20 pounds and cried every day.",
    ),
)
"""Made-up reviews, their sentiment, and what of them is quoted."""


def main() -> int:
    """Score the reviews as a user would, and print the page. Returns the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    rows, scores = folder / "rationales.rows.parquet", folder / "rationales.parquet"
    write_rows(reviews("Test", folder), rows)
    (folder / "rationales.j2").write_text(template())
    command = ["score", rows, "-m", real_model(folder), *flags(folder / "rationales.j2"), "-o", scores]
    run = subprocess.run(  # noqa: S603 - our own command line
        [sys.executable, "-m", "prefillcli", *map(str, command)], stdout=subprocess.DEVNULL, check=False
    )
    if run.returncode == 0:
        print("\n\n".join(page(pq.read_table(rows).to_pylist(), pq.read_table(scores).to_pylist())))
    return run.returncode


def flags(jinja: Path) -> list[str | Path]:
    """The options of the job."""
    given: list[str | Path] = ["--template", jinja, "--no-chat", "--labels", "positive,negative"]
    given += ["--rationale", "48", "--rationale-template", f"{{{{ label }}}} {WORDS}", "--evidence"]
    return [*given, "--dtype", "float32", "--overwrite"]


def template() -> str:
    """The prompt. Its examples end in the model's stop token, so that it learns to end: a template may have those."""
    shown = [f"Review:\n{text}\nSentiment: {name} {WORDS} {quote}<|im_end|>\n\n" for text, name, quote in EXAMPLES]
    return "".join(shown) + "Review:\n{{ review }}\nSentiment:"


def write_rows(found: Sequence[Review], path: Path) -> None:
    """The first reviews of such a length, a sentence a line."""
    chosen = [each for each in found if LEAST <= len(each.text) <= MOST][:ROWS]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table(
            {
                "review": ["\n".join(sentences(each.text)) for each in chosen],
                "sentiment": [each.sentiment for each in chosen],
            }
        ),
        path,
    )


def sentences(text: str) -> list[str]:
    """The sentences of a text, roughly."""
    return re.split(r"(?<=[.!?])\s+", text)


def page(rows: Sequence[dict[str, Any]], scores: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Each review: its answer, what is written behind it, and what its sentences change."""
    for number, (row, scored) in enumerate(zip(rows, scores, strict=True), 1):
        lines, changes = row["review"].split("\n"), {each["section"]: each["change"] for each in scored["evidence"]}
        text = " ".join(scored["rationale"].split()) + (" ..." if scored["finish_reason"] == "length" else "")
        whole = changes.pop("review")
        yield (
            f"**{number}.** Rated {row['sentiment']}; score {scored['score']:.3f}, and {scored['score'] - whole:.3f} "
            f"without the review. **{scored['prediction']} {WORDS}** *{text}*"
        )
        table = ["| change | sentence |", "| ---: | --- |"]
        for section, change in list(changes.items())[:SHOWN]:
            table.append(f"| {change:+.3f} | {passage(section, lines)} |")
        yield "\n".join(table)


def passage(section: str, lines: Sequence[str]) -> str:
    """The text of a section that is named like `review, line 2`."""
    number = re.fullmatch(r"review, line (\d+)", section)
    if number is None:
        raise ValueError(f"not a line of a review: {section}")
    return lines[int(number[1]) - 1].replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
