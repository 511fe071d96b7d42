"""Rows that may leave early: of the real model and real reviews, and of the deep sample models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.needles import post_case, prompt
from benchmarks.review_passages import write_nights, write_passages
from benchmarks.review_rows import SHORT, many_shot
from benchmarks.sample_text import CASES, ask
from benchmarks.score_runs import SAMPLES
from recipes.real_model import FOLDER, QWEN, joined_file, real_model, reviews

TOGETHER = 20  # rows behind one prefix
REVIEW_PREFIXES, SHOTS = 40, 28  # about 2,000 tokens of examples; reviews have about 100 tokens, passages about 30
READERS, LINES = 80, 100  # about 2,000 tokens of history
MESSAGES = 4_000
_FOLLOWS = "A passage of a patient's review of a medicine follows. "
SATISFIED = f"{_FOLLOWS}Is the patient satisfied with the medicine? Answer with Yes or No only.\n\n{{}}"
HOW_SATISFIED = (
    f"{_FOLLOWS}How satisfied is the patient with the medicine? "
    "Answer with 1 (dissatisfied), 2 (undecided) or 3 (satisfied) only.\n\n{}"
)


@dataclass(frozen=True, slots=True)
class ExitCase:
    """A model and rows for it. `rows` writes them into a folder, as the columns `prompt` and the true answer's.

    The first `learnt` rows are for learning; a multiple of those behind one prefix.
    """

    text: str
    model: Callable[[], Path]
    rows: Callable[[Path], Path]
    labels: str
    learnt: int
    max_flips: tuple[float, ...]
    chat: bool = False


def passages(folder: Path) -> Path:
    """Several thousand passages of reviews."""
    path = folder / "exits.passages.parquet"
    pq.write_table(pq.read_table(write_passages(FOLDER), columns=["prompt", "sentiment"]), path)
    return path


def asked(question: str, folder: Path) -> Path:
    """The passages, each in a chat with a question."""
    table = pq.read_table(write_passages(FOLDER), columns=["passage", "sentiment"])
    chats = [[{"role": "user", "content": question.format(each)}] for each in table["passage"].to_pylist()]
    path = folder / "exits.asked.parquet"
    pq.write_table(pa.table({"prompt": chats, "sentiment": table["sentiment"]}), path)
    return path


def qwen() -> Path:
    """The instruction model of 1.5B parameters."""
    return joined_file(QWEN, FOLDER)


def today(folder: Path) -> Path:
    """The passages of those reviews that teach no first model."""
    path = folder / "exits.today.parquet"
    pq.write_table(pq.read_table(write_nights(FOLDER)[1], columns=["prompt", "sentiment"]), path)
    return path


def shared_reviews(folder: Path) -> Path:
    """Reviews behind many examples, of which each twenty are the same."""
    rng = Random("reviews behind many examples")
    pool = [*reviews("Train", FOLDER), *reviews("Test", FOLDER)]
    rng.shuffle(pool)
    asked = pool[: REVIEW_PREFIXES * TOGETHER]
    examples = [each for each in reviews("Train", FOLDER) if len(each.text) <= SHORT]
    path = folder / "exits.shared.parquet"
    pq.write_table(many_shot(examples, asked, SHOTS, TOGETHER, rng), path)
    return path


def messages(folder: Path) -> Path:
    """Short texts with one question each, none of them a sample or seen in training."""
    rng = Random("messages for exits")
    rows = []
    for _ in range(MESSAGES):
        case = CASES["labeling"](rng, rng.randint(1, 3))
        question = ask(rng, case, rng.choice(case.present if rng.random() < 0.5 else case.absent))
        rows.append({"prompt": prompt(case, question), "answer": question.answer})
    return _write(folder / "exits.messages.parquet", rows)


def readers(folder: Path) -> Path:
    """Long histories with twenty questions each."""
    rng = Random("readers for exits")
    rows = []
    for _ in range(READERS):
        case = post_case(rng, LINES)
        for _ in range(TOGETHER):
            question = ask(rng, case, rng.choice(case.present if rng.random() < 0.5 else case.absent))
            rows.append({"prompt": prompt(case, question), "answer": question.answer})
    return _write(folder / "exits.readers.parquet", rows)


def _write(path: Path, rows: list[dict[str, str]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _deep() -> Path:
    return SAMPLES / "models" / "deep"


def _plain() -> Path:
    return SAMPLES / "models" / "deep-plain"


_SENTIMENT, _YES = "positive,negative", "Yes,No"
EXIT_CASES: Mapping[str, ExitCase] = {
    "passages": ExitCase(
        "SmolLM2-135M, passages of reviews",
        real_model, passages, _SENTIMENT, 2_000, (0.01, 0.02, 0.05),
    ),
    "today": ExitCase(
        "SmolLM2-135M, passages of other reviews than its first models were taught by",
        real_model, today, _SENTIMENT, 1_200, (0.02, 0.05),
    ),
    "satisfied": ExitCase(
        "Qwen2.5-Coder-1.5B-Instruct, whether the patient of a passage is satisfied",
        qwen, partial(asked, SATISFIED), _YES, 1_000, (0.02, 0.05), chat=True,
    ),
    "how-satisfied": ExitCase(
        "Qwen2.5-Coder-1.5B-Instruct, how satisfied the patient of a passage is",
        qwen, partial(asked, HOW_SATISFIED), "1,2,3", 1_000, (0.02, 0.05), chat=True,
    ),
    "shared": ExitCase(
        "SmolLM2-135M, 20 reviews each behind the same 28 examples",
        real_model, shared_reviews, _SENTIMENT, 400, (0.05, 0.1),
    ),
    "deep": ExitCase("deep sample, short texts", _deep, messages, _YES, 2_000, (0.01,)),
    "deep-plain": ExitCase("deep sample without exit loss, short texts", _plain, messages, _YES, 2_000, (0.01,)),
    "deep-shared": ExitCase(
        "deep sample, 20 questions each behind the same history", _deep, readers, _YES, 800, (0.02,)
    ),
}  # fmt: skip
