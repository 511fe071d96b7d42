"""Write the sample data sets.

    python -m training.make_samples [--out samples]

Every file comes from one seed, other than the one the sample models were trained with: with the same
versions of pyarrow and Pillow, the same bytes.
"""

import argparse
import csv
import json
import re
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.needles import Case, post_case, prompt
from benchmarks.sample_text import ask, credit_case, label_case
from training.evaluate_samples import SAMPLES
from training.pictures import COLOURS, NOTHING, caption, draw_picture
from training.tickets import draw_ticket

SEED = "samples 2024"
USERS, POSTS = 12, 20
USER_LINES = (80, 228)  # of reading history: the shortest and the longest
APPLICANTS, APPLICANT_LINES = 40, (48, 226)
MESSAGES = 2000
POST_FILE, CREDIT_FILE = "post_recommendation.parquet", "credit_verification.jsonl"
LABEL_FILE = "labeling.parquet"
TICKET_FILE, TICKETS = "tickets.csv", 120
PICTURE_FILE, PICTURES = "pictures.parquet", 300

Record = dict[str, str | int]


def mentions(case: Case, word: str) -> int:
    """How often the history names a word."""
    return len(re.findall(rf"\b{re.escape(word)}\b", case.history))


def _spread(ends: tuple[int, int], number: int, count: int) -> int:
    """The `number`-th of `count` evenly spread whole numbers between two ends."""
    return ends[0] + (ends[1] - ends[0]) * number // (count - 1)


def post_rows() -> list[Record]:
    """Users with long histories, each with candidate posts of which half are on a topic read before."""
    rng = Random(f"{SEED} posts")
    records: list[Record] = []
    for user in range(USERS):
        case = post_case(rng, _spread(USER_LINES, user, USERS))
        words = rng.sample(case.present, POSTS // 2) + rng.sample(case.absent, POSTS // 2)
        rng.shuffle(words)
        for post, word in enumerate(words):
            question = ask(rng, case, word)
            records.append(
                {
                    "id": f"user-{user:02d}/post-{post:02d}",
                    "user": case.owner,
                    "post": question.subject,
                    "topic": word,
                    "mentions": mentions(case, word),
                    "profile": case.head,
                    "history": case.history,
                    "question": question.text,
                    "prompt": prompt(case, question),
                    "answer": question.answer,
                }
            )
    return records


def credit_rows() -> list[Record]:
    """Applicants with one long account history and one question each."""
    rng = Random(f"{SEED} credit")
    answers = ["Yes", "No"] * (APPLICANTS // 2)
    rng.shuffle(answers)
    records: list[Record] = []
    for number, answer in enumerate(answers):
        case = credit_case(rng, _spread(APPLICANT_LINES, number, APPLICANTS))
        word = rng.choice(case.present if answer == "Yes" else case.absent)
        question = ask(rng, case, word)
        records.append(
            {
                "id": f"applicant-{number:02d}",
                "applicant": case.owner,
                "creditor": word,
                "mentions": mentions(case, word),
                "prompt": prompt(case, question),
                "answer": question.answer,
            }
        )
    return records


def label_rows() -> list[Record]:
    """Short support tickets and news, one question each."""
    rng = Random(f"{SEED} labels")
    answers = ["Yes", "No"] * (MESSAGES // 2)
    rng.shuffle(answers)
    records: list[Record] = []
    for number, answer in enumerate(answers):
        case = label_case(rng, rng.randint(1, 3))
        question = ask(rng, case, rng.choice(case.present if answer == "Yes" else case.absent))
        records.append(
            {
                "id": f"message-{number:04d}",
                "kind": "ticket" if case.kind == "subjects" else "news",
                "subject": question.word,
                "text": case.history.rstrip("\n"),
                "prompt": prompt(case, question),
                "answer": question.answer,
            }
        )
    return records


def ticket_rows() -> list[Record]:
    """Support tickets, with the right answers to the typed questions of recipes/questions/triage.yaml."""
    rng = Random(f"{SEED} tickets")
    drawn = [draw_ticket(rng, untold=True) for _ in range(TICKETS)]
    return [
        {
            "id": f"ticket-{number:03d}",
            "text": ticket.text,
            "team": ticket.department,
            "level": ticket.urgency,
            "is_refund": "yes" if ticket.refund else "no",
        }
        for number, ticket in enumerate(drawn)
    ]


def picture_table() -> pa.Table:
    """Pictures of shapes, as `datasets` keeps them, with the right answers to recipes/questions/pictures.yaml."""
    rng = Random(f"{SEED} pictures")
    records = []
    for number in range(PICTURES):
        picture = draw_picture(rng)
        records.append(
            {
                "id": f"picture-{number:03d}",
                "photo": {"bytes": picture.png, "path": f"picture-{number:03d}.png"},
                "caption": caption(rng) or None,
                "kind": picture.kind,
                "count": picture.count,
                "size": picture.size,
                "word": picture.word,
                "has_word": "no" if picture.word == NOTHING else "yes",
                **{f"has_{each}": "yes" if each in picture.colours else "no" for each in COLOURS},
            }
        )
    features = {"info": {"features": {"photo": {"_type": "Image"}}}}
    return pa.Table.from_pylist(records).replace_schema_metadata({"huggingface": json.dumps(features)})


def write_samples(folder: Path) -> None:
    """Write the five files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(picture_table(), folder / PICTURE_FILE, compression="zstd", compression_level=19)
    for name, records in ((POST_FILE, post_rows()), (LABEL_FILE, label_rows())):
        table = pa.Table.from_pylist(records)
        pq.write_table(table, folder / name, compression="zstd", compression_level=19)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in credit_rows())
    (folder / CREDIT_FILE).write_text("".join(lines), encoding="utf-8", newline="\n")
    with (folder / TICKET_FILE).open("w", encoding="utf-8", newline="") as file:
        tickets = ticket_rows()
        table = csv.DictWriter(file, tickets[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(tickets)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=SAMPLES)
    write_samples(parser.parse_args().out)


if __name__ == "__main__":
    main()
