"""Images in what a user looks at: small copies on pages and nowhere else, their place in a prompt, their cost."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from prefillcli.forecast.profile import Profile, this_machine
from prefillcli.images.thumbnails import MOST_BYTES
from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.report.run import versions
from prefillcli.rows.proof import hash_model
from prefillcli.tools.inspect import inspect_job
from tests.jobs.jobs import read_report, score, without_seconds
from tests.unit.images.files import noise, saved
from tests.unit.models.image_families import FAMILIES, load_whole, make_family, open_processor
from tests.unit.tools.profile.making import made_curve

SIZES = [(40, 30), (64, 64), (30, 90), (100, 50)]
FAMILY = "smolvlm"
HOSTILE = '"><img src=x onerror=alert(1)>&lt;.png'
SEEN = {"image_column": "photo", "ask": "nice=Is it nice?"}


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model that reads images."""
    return make_family(FAMILY, tmp_path_factory.mktemp("models") / FAMILY)


def photo(number: int) -> bytes:
    """A JPEG file that says where it was taken."""
    exif = Image.Exif()
    exif[0x010F] = "PRIVATE-CAMERA"
    exif.get_ifd(0x8825).update({1: "N", 2: (48.0, 51.0, 29.6)})
    return saved(noise(*SIZES[number % len(SIZES)], seed=number), "JPEG", exif=exif)


def rows(count: int, each: int = 1, **columns: list[Any]) -> str:
    """A file of rows with so many images each."""
    images = [[photo(each * row + at) for at in range(each)] for row in range(count)]
    table = pa.table({"text": [f"row {row}" for row in range(count)], "photo": images, **columns})
    pq.write_table(table, "rows.parquet")
    return "rows.parquet"


class _Images(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.found.append(dict(attrs))


def images_on(page: str) -> list[tuple[dict[str, str | None], bytes]]:
    """The images of a page: their attributes, and their files."""
    parser = _Images()
    parser.feed(Path(page).read_text())
    files = []
    for each in parser.found:
        kind, _, content = str(each["src"]).partition(",")
        assert kind == "data:image/jpeg;base64"
        files.append((each, base64.b64decode(content, validate=True)))
    return files


def test_the_page_shows_named_rows_with_few_small_copies_without_metadata(seeing: Path) -> None:
    asked = [{"name": f"q{at}", "type": "predicate", "instructions": f"Is it nice, {at}?"} for at in range(4)]
    Path("asked.json").write_text(json.dumps({"questions": asked}))
    line = score(rows(11, 4), model=seeing, image_column="photo", questions="asked.json", max_error_rate=0.0)
    assert line["status"] == "complete"
    found = images_on(line["page"])
    assert len(found) == 100  # 4 questions name 10 rows each, with 3 of their images
    for told, file in found:
        image = Image.open(io.BytesIO(file))
        assert len(file) <= MOST_BYTES
        assert [str(each) for each in image.size] == [told["width"], told["height"]]
        assert not image.getexif()
        assert str(told["alt"]).startswith("image ")
        assert b"PRIVATE" not in file
    assert "img-src data:" in Path(line["page"]).read_text()


def test_small_copies_are_on_the_page_alone(seeing: Path) -> None:
    given = rows(6, truth=["Yes", "No"] * 3)
    told = {"truth": "truth", "review_below": "1", "review": "review.csv", "keep_columns": "text"}
    line = score(given, "out.jsonl", model=seeing, **SEEN, **told)
    shown = images_on(line["page"])
    assert len(shown) == 6 + len(read_report(line["report"])["evaluations"]["answer"]["surest_wrong"])
    for name in (line["report"], "out.jsonl", "review.csv"):
        assert "base64" not in Path(name).read_text()
    line = score(given, "plain.jsonl", model=seeing, no_thumbnails=True, **SEEN, **told)
    assert images_on(line["page"]) == []
    assert without_seconds("plain.jsonl") == without_seconds("out.jsonl")


def test_each_row_has_its_own_images(seeing: Path) -> None:
    given = rows(16, key=[f"k{row}" for row in range(16)], truth=["Yes", "No"] * 8)
    line = score(given, model=seeing, id_column="key", truth="truth", sample=14, **SEEN)
    wrong = read_report(line["report"])["evaluations"]["answer"]["surest_wrong"]
    shown = re.findall(
        r">(k\d+)<div class=\"images\"><img [^>]*alt=\"image 1, (\d+) x (\d+)", Path(line["page"]).read_text()
    )
    assert len(shown) == 10 + len(wrong)
    for name, width, height in shown:
        assert (int(width), int(height)) == SIZES[int(name[1:]) % len(SIZES)]


def test_names_of_files_and_rows_are_texts_on_the_page(seeing: Path) -> None:
    Path(HOSTILE).write_bytes(photo(0))
    Path("rows.jsonl").write_text(json.dumps({"text": "a", "photo": HOSTILE, "key": HOSTILE}) + "\n")
    line = score("rows.jsonl", model=seeing, id_column="key", **SEEN)
    assert line["status"] == "complete", line
    ((told, _),) = images_on(line["page"])
    assert told.keys() == {"src", "width", "height", "alt", "title"}
    assert "<img src=x" not in Path(line["page"]).read_text()


def test_images_that_are_gone_when_the_page_is_made_do_not_fail_the_run(
    seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("prefillcli.judging.thumbnails.thumbnails_of", gone)
    line = score(rows(2), model=seeing, **SEEN)
    assert line["status"] == "complete"
    assert images_on(line["page"]) == []
    assert any("the disk is gone" in each for each in read_report(line["report"])["warnings"])


def image_tokens(seeing: Path, number: int) -> int:
    """The tokens of an image by transformers' own processor."""
    processor, written = open_processor(seeing), FAMILIES[FAMILY].written
    given = processor(images=[[Image.open(io.BytesIO(photo(number)))]], text=[written], add_special_tokens=False)
    return len(given["input_ids"][0])


def test_a_dry_run_tells_the_images_and_their_tokens(seeing: Path) -> None:
    images = [[photo(0)], [photo(1), photo(0)], [photo(2)], [b"no image"], []]
    pq.write_table(pa.table({"text": list("abcde"), "photo": images}), "rows.parquet")
    told = {"model": seeing, "image_column": "photo", "questions": "asked.json", "max_error_rate": 1.0}
    asked = [{"name": name, "type": "predicate", "instructions": f"Is it {name}?"} for name in ("red", "large")]
    Path("asked.json").write_text(json.dumps({"questions": asked}))
    score("rows.parquet", dry_run=True, **told)
    survey = read_report("out.dry-run.json")["survey"]
    tokens = 2 * sum(image_tokens(seeing, number) for number in (0, 1, 0, 2))  # of two questions
    share = tokens / survey["prompt_tokens"]
    assert survey["images"] == {"images": 4, "distinct": 3, "tokens": tokens, "share": share, "errors": 1}
    score("rows.parquet", **told)
    assert survey["prompt_tokens"] == read_report("out.run.json")["tokens"]["prompt"]


def predicted(seeing: Path, given: str, speed: float | None) -> float:
    """The seconds that a dry run predicts with a profile of this speed of the vision tower."""
    curve = made_curve().model_copy(update={"costs": (0.25, 0.0, 0.0), "points": [(0, 0.0, 3.0), (64, 16.0, 19.0)]})
    profile = Profile(
        model=hash_model(seeing), model_name="seeing", family="llama", dtype="float32", device="cpu",
        machine=this_machine("cpu"), budget_bytes=1 << 30, chunk_tokens=64, max_model_tokens=2048,
        completion=curve, versions=versions(), tower_speed=speed,
    )  # fmt: skip
    Path("profile.json").write_text(profile.sealed())
    score(given, model=seeing, dry_run=True, **SEEN)
    seconds = read_report("out.dry-run.json")["survey"]["plan"]["seconds"]
    assert isinstance(seconds, float)
    return seconds


def test_a_prediction_includes_the_vision_tower(seeing: Path) -> None:
    given = rows(3)
    text, slow, fast, unknown = (predicted(seeing, given, speed) for speed in (1e30, 1e6, 2e6, None))
    assert slow - text == pytest.approx(2 * (fast - text))
    operations = 1e6 * (slow - text)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        load_whole(seeing)(input_ids=torch.ones(1, 64, dtype=torch.long), logits_to_keep=1)
    assert operations / (unknown - text) == pytest.approx(counter.get_total_flops() / 19.0, rel=0.25)


def inspected(seeing: Path, **flags: Any) -> dict[str, Any]:
    """The summary of an inspected row."""
    given = {"inputs": ["rows.parquet"], "model": str(seeing), "quiet": True, "html": "row.html", **SEEN, **flags}
    return inspect_job(load_settings(InspectSettings, given, environment={}))


def test_inspect_shows_where_images_are_in_the_prompt(seeing: Path) -> None:
    rows(2, 3)
    line = inspected(seeing, row="1")
    processor = open_processor(seeing)
    messages = [{"role": "user", "content": [{"type": "image"}] * 3 + [{"type": "text", "text": "row 1"}]}]
    said = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pictures = [Image.open(io.BytesIO(photo(number))) for number in (3, 4, 5)]
    ids = processor(images=[pictures], text=[said], add_special_tokens=False)["input_ids"][0]
    first = len(processor.tokenizer(said.partition("<image>")[0], add_special_tokens=False)["input_ids"])
    for number, told in enumerate(line["images"], start=3):
        width, height = SIZES[number % len(SIZES)]
        tokens = image_tokens(seeing, number)
        assert told == {"width": width, "height": height, "tokens": tokens, "first": first}
        first += tokens
    assert processor.tokenizer.decode(ids[first : first + 3]) == "row"
    assert "base64" not in json.dumps(line)
    assert len(images_on("row.html")) == 3
    inspected(seeing, row="1", no_thumbnails=True)
    assert images_on("row.html") == []
