"""Rows with images for jobs, and what transformers' whole forward says of them."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from tests.jobs.jobs import Answer
from tests.unit.models.image_families import load_whole, make_family, open_processor

ROWS = 24
LABELS = ("y", "n")
COLUMNS = ("photo", "named", "held")  # with files, with paths and data URLs, with structs
SIZES = [(56, 40), (64, 64), (30, 90), (90, 30), (33, 33)]
BROKEN = {5: "photo", 14: "named", 20: "held"}  # rows, and the column that has no image there
TEXTS = ["Is it a shoe?", "Is it a hat? Look at it well, then say yes or no.", "Is it a shoe, or two of them?"]


def picture(number: int) -> Image.Image:
    width, height = SIZES[number % len(SIZES)]
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def file_of(number: int) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


def url_of(number: int) -> str:
    return "data:image/png;base64," + base64.b64encode(file_of(number)).decode()


def pictures_of(row: int) -> dict[str, int]:
    """The numbers of a row's pictures by column: of one row in eight none, of most one, of some two or three."""
    if row % 8 == 7:
        return {}
    columns = COLUMNS if row % 8 == 6 else COLUMNS[1:] if row % 8 == 4 else COLUMNS[row % 3 : row % 3 + 1]
    return {name: (row + at) % 7 for at, name in enumerate(columns)}


def columns() -> dict[str, list[Any]]:
    """The rows' columns. Pictures with paths are in files of this folder."""
    found: dict[str, list[Any]] = {name: [None] * ROWS for name in COLUMNS}
    for row in range(ROWS):
        for name, number in pictures_of(row).items():
            Path(f"{number}.png").write_bytes(file_of(number))
            found[name][row] = {
                "photo": file_of(number),
                "named": url_of(number) if row % 2 else f"{number}.png",
                "held": {"bytes": None, "path": f"{number}.png"}
                if row % 2
                else {"bytes": file_of(number), "path": None},
            }[name]
    wrong = {"photo": file_of(1)[:90], "named": "gone.png", "held": {"bytes": b"no image", "path": None}}
    for row, name in BROKEN.items():
        found[name][row] = wrong[name]
    texts = [TEXTS[row % len(TEXTS)] for row in range(ROWS)]
    return {"id": [f"r{row}" for row in range(ROWS)], "prompt": texts, **found}


def write_rows(path: str = "in.parquet", order: Sequence[int] = range(ROWS)) -> Path:
    """The rows in a Parquet file, whose structs are those of `datasets.Image`."""
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    kinds = {"photo": pa.binary(), "named": pa.string(), "held": image}
    table = pa.table({name: pa.array(own, kinds.get(name)) for name, own in columns().items()})
    pq.write_table(table.take(list(order)), path)
    return Path(path)


class Whole:
    """A tiny model of a family, and its answers under transformers' own processor and forward."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = make_family(family, folder)

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        return open_processor(self.folder), load_whole(self.folder)

    def given(self, messages: Sequence[Any], images: Sequence[Image.Image]) -> Any:
        """The processor's inputs for a chat with these images."""
        processor, _ = self._parts
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        own = [list(images)] if images else None
        return processor(text=[text], images=own, return_tensors="pt", add_special_tokens=False)

    def answer(self, messages: Sequence[Any], images: Sequence[Image.Image], labels: Sequence[str] = LABELS) -> Answer:
        """The answer to a chat with these images."""
        processor, model = self._parts
        given = self.given(messages, images)
        with torch.no_grad():
            last = torch.softmax(model(**given).logits[0, -1].double(), dim=-1)
        found = [float(last[processor.tokenizer.convert_tokens_to_ids(each)]) for each in labels]
        return Answer(
            score=found[0] / sum(found),
            logprobs=tuple(math.log(each) for each in found),
            label_mass=sum(found),
            best=int(np.argmax(found)),
            prompt_tokens=given["input_ids"].shape[1],
        )

    def of_pictures(self, text: str, numbers: Sequence[int]) -> Answer:
        """The answer to a text behind these pictures."""
        parts = [*({"type": "image"} for _ in numbers), {"type": "text", "text": text}]
        return self.answer([{"role": "user", "content": parts if numbers else text}], list(map(picture, numbers)))

    @cached_property
    def answers(self) -> dict[str, Answer]:
        """The answers to the rows that are not broken, by id."""
        return {
            f"r{row}": self.of_pictures(TEXTS[row % len(TEXTS)], list(pictures_of(row).values()))
            for row in range(ROWS)
            if row not in BROKEN
        }


def make_steady(folder: Path) -> None:
    """Change the layers of a saved model but the first so that they change little."""
    model = load_whole(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")) and ".layers.0." not in name:
                weight.mul_(0.02)
    model.save_pretrained(folder)
