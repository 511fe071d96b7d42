"""A job whose rows have images of every kind, and files that are none: each is seen as transformers sees it, or is an
error row that says why."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers.image_utils import load_image

from tests.jobs.jobs import read_output, read_report, score
from tests.unit.images.files import images, noise, others, saved
from tests.unit.images.test_decoding import BOMBS
from tests.unit.models.image_families import load_whole, make_family, open_processor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about odd metadata
NO_FILES = {
    "../cat.png": "a path must be relative, and without ..",
    "/etc/hostname": "a path must be relative, and without ..",
    "out.png": "leads out of the folder of images",
    "no.png": "No such file or directory",
    "http://127.0.0.1:9/cat.png?sig=hidden": "its host has an address that is not public",
    "https://me:hidden@example.org/cat.png": "a name or a password",
    "data:image/png;base64,hidden!": "base64 is broken",
    "s3://key:hidden@bucket/cat.png": "only http, https and data name images",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, and pictures."""
    return make_family("smolvlm", tmp_path_factory.mktemp("smolvlm"))


def write_rows(values: dict[str, Any], path: str) -> None:
    """Rows with an image each, as `datasets` writes them."""
    cells = [value if isinstance(value, dict) else {"bytes": value, "path": None} for value in values.values()]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"id": [*values], "prompt": ["What is it?"] * len(values), "photo": pa.array(cells, kind)}
    pq.write_table(pa.table(columns), path)


def test_images_of_every_kind_are_seen_as_by_transformers(folder: Path) -> None:
    kinds = images()
    write_rows(kinds, "in.parquet")
    summary = score("in.parquet", model=folder, image_column="photo", id_column="id", labels="A,B", max_length=100_000)
    assert summary["rows"]["errors"] == 0

    processor, whole = open_processor(folder), load_whole(folder)
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    text = processor.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    (token,) = processor.tokenizer.encode("A", add_special_tokens=False)
    for row in read_output("out.parquet"):
        image = load_image(base64.b64encode(kinds[row["id"]]).decode())
        given = processor(text=[text], images=[[image]], return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            expected = whole(**given).logits[0, -1].log_softmax(-1)[token]
        assert row["prompt_tokens"] == given["input_ids"].shape[1]
        assert row["logprob_A"] == pytest.approx(float(expected), abs=1e-4), row["id"]


def test_what_is_no_image_is_an_error_row_and_the_others_are_scored(folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "rows"
    inside.mkdir()
    cat = saved(noise(9, 7), "PNG")
    (tmp_path / "cat.png").write_bytes(cat)
    (inside / "cat.png").write_bytes(cat)
    (inside / "out.png").symlink_to("../cat.png")
    bad = others() | BOMBS | {"cut off": images()["jpeg"][:-300]}
    named = {path: {"bytes": None, "path": path} for path in NO_FILES}
    good = {"by path": {"bytes": None, "path": "cat.png"}, "by bytes": {"bytes": cat, "path": "no.png"}, "none": None}
    write_rows(bad | named | good, str(inside / "in.parquet"))
    flags = {"model": folder, "image_column": "photo", "id_column": "id", "allow_urls": True, "max_error_rate": 1.0}
    score(inside / "in.parquet", **flags)

    rows = {row["id"]: row for row in read_output("out.parquet")}
    failed = {name: row["error_detail"] for name, row in rows.items() if row["error"] == "invalid_image"}
    assert failed.keys() == {*bad, *named}
    assert all(detail.startswith("column photo: ") for detail in failed.values())
    for path, said in NO_FILES.items():
        assert said in failed[path]
    assert all("pixels" in failed[name] for name in BOMBS)
    assert rows["by path"]["score"] == pytest.approx(rows["by bytes"]["score"], abs=1e-6)
    assert rows["none"]["prompt_tokens"] < rows["by path"]["prompt_tokens"]
    assert not any("hidden" in detail for detail in failed.values())
    assert read_report()["rows"]["errors_by_code"] == {"invalid_image": len(failed)}
