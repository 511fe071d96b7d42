"""What a cell may hold: bytes, paths, data URLs, structs of `datasets`, lists."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest

from prefillcli.images import reading
from prefillcli.images.decoding import open_image
from prefillcli.images.image import ImageError, RowImage
from prefillcli.images.reading import read_images
from tests.unit.images.files import noise, saved

CAT, DOG = saved(noise(9, 7), "PNG"), saved(noise(5, 6, seed=1), "JPEG")
DATA_URL = f"data:image/png;base64,{base64.b64encode(CAT).decode()}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of images, with a secret beside it."""
    inside = tmp_path / "photos"
    (inside / "deep").mkdir(parents=True)
    (inside / "cat.png").write_bytes(CAT)
    (inside / "deep" / "dog.jpg").write_bytes(DOG)
    (inside / "a: cat, 50%.png").write_bytes(CAT)
    (tmp_path / "secret.png").write_bytes(CAT)
    (tmp_path / "photos of others").mkdir()
    (tmp_path / "photos of others" / "cat.png").write_bytes(CAT)
    (inside / "out.png").symlink_to("../secret.png")
    (inside / "out").symlink_to(tmp_path)
    (inside / "others").symlink_to("../photos of others")
    (inside / "in.png").symlink_to("deep/dog.jpg")
    (inside / "loop.png").symlink_to("loop.png")
    os.mkfifo(inside / "pipe.png")
    return inside


def read(value: object, root: Path | None = None, **options: Any) -> list[RowImage]:
    return read_images(value, root=None if root is None else str(root), max_pixels=1000, **options)


def test_every_kind_of_value_is_its_file(root: Path) -> None:
    for value, data in (
        (CAT, CAT),
        (bytearray(CAT), CAT),
        (memoryview(CAT), CAT),
        ("cat.png", CAT),
        ("deep/dog.jpg", DOG),
        ("in.png", DOG),
        ("a: cat, 50%.png", CAT),
        (DATA_URL, CAT),
        (f" {DATA_URL}\n", CAT),
        (DATA_URL.replace("data:", "DATA:").replace("/png", "/jpeg;charset=utf-8"), CAT),
        (DATA_URL.replace("+", "%2B").replace("/", "%2F").replace("data:image%2F", "data:image/"), CAT),
        ("\n".join([DATA_URL[:60], DATA_URL[60:]]), CAT),
        ({"bytes": CAT, "path": None}, CAT),
        ({"bytes": CAT, "path": "/not/here.png"}, CAT),
        ({"bytes": None, "path": "cat.png"}, CAT),
        ({"path": "cat.png"}, CAT),
    ):
        (found,) = read(value, root)
        assert found.data == data, value
        assert (found.width, found.height) == ((9, 7) if data is CAT else (5, 6))


def test_a_list_has_its_images_in_order_and_nothing_is_none(root: Path) -> None:
    values = ["deep/dog.jpg", None, CAT, {"bytes": None, "path": None}, DATA_URL, ""]
    assert [each.data for each in read(values, root)] == [DOG, CAT, CAT]
    for empty in (None, "", " \n", [], (), [None], {"bytes": None, "path": None}, {}):
        assert read(empty, root) == []
    with pytest.raises(ImageError, match=r"^image 2 of 3: 'no.png': No such file or directory$"):
        read([CAT, "no.png", DOG], root)
    with pytest.raises(ImageError, match="a list in a list"):
        read([[CAT]], root)


def test_the_images_of_a_dataset_are_read(root: Path, tmp_path: Path) -> None:
    features = datasets.Features({"photo": datasets.Image(), "all": [datasets.Image()]})
    picture = noise(9, 7, seed=4)
    rows = {"photo": [picture, None], "all": [[picture, picture], []]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    first, second = pq.read_table(tmp_path / "a.parquet").to_pylist()
    for found in (*read(first["photo"]), *read(first["all"])):
        assert np.array_equal(np.asarray(open_image(found.data)), np.asarray(picture))
    assert len(read(first["all"])) == 2
    assert read(second["photo"]) == read(second["all"]) == []


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png", "deep/../../secret.png", "deep/../cat.png", "..", "/etc/passwd", "//etc/passwd", "out.png",
        "out/secret.png", "out/photos/../secret.png", "others/cat.png", "deep/../../photos of others/cat.png",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_folder(root: Path, path: str) -> None:
    for given in (path, str(root / "cat.png") if path.startswith("/etc") else path):
        with pytest.raises(ImageError, match=r"must be relative, and without \.\.|leads out of the folder of images"):
            read(given, root)


def test_a_folder_may_itself_be_a_link_and_end_in_a_slash(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert read("cat.png", tmp_path / "link")[0].data == CAT
    assert read_images("cat.png", root=f"{root}/", max_pixels=1000)[0].data == CAT
    assert read_images("etc/hostname", root="/", max_pixels=1000, read_file=lambda *_: CAT)[0].data == CAT


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no.png", "'no.png': No such file or directory"),
        ("deep", "'deep' is no file"),
        ("pipe.png", "'pipe.png' is no file"),
        ("cat.png/x", "'cat.png/x': Not a directory"),
        ("loop.png", "'loop.png': Too many levels of symbolic links"),
        ("a\0b", "'a\\x00b' is no path"),
        ("\ud800", "'\\ud800' is no path"),
        ("file:///etc/passwd", "'file:///etc/passwd': of URLs, only http, https and data name images"),
        ("s3://key:hidden@bucket/cat.png", "of URLs, only http, https and data name images"),
        ("http://host/cat.png?sig=hidden", "URLs are fetched with --allow-urls only"),
        ("HTTPS://me:hidden@host/cat.png", "URLs are fetched with --allow-urls only"),
        ("data:image/png,hidden", "a data URL that is not base64"),
        ("data:image/png;base64", "a data URL that is not base64"),
        ("data:image/png;base64,", "a file without content"),
        ("data:image/png;base64,hi*den", "a data URL whose base64 is broken"),
        ("data:image/png;base64,hidde", "a data URL whose base64 is broken"),
        ("data:image/png;base64,h\N{LATIN SMALL LETTER E WITH ACUTE}", "a data URL whose base64 is broken"),
        ("data:image/png;base64,YSBjYXQ=", "no PNG, JPEG, WebP or GIF file"),
        (b"", "a file without content"),
        (b"a cat", "no PNG, JPEG, WebP or GIF file"),
        (7, "neither bytes nor a text that names an image, but int"),
        (True, "neither bytes nor a text that names an image, but bool"),
        ({"bytes": "hidden"}, "'hidden': No such file or directory"),
        ({"url": "cat.png"}, "a struct of an image has bytes and path, and nothing else"),
        ({"bytes": 7}, "neither bytes nor a text that names an image, but int"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_what_is_no_image_is_said_in_short(root: Path, value: object, said: str) -> None:
    with pytest.raises(ImageError) as caught:
        read(value, root)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "hidden" not in str(caught.value) or "hidden': No such" in said
    assert str(root) not in str(caught.value)


def test_without_a_folder_paths_are_refused_and_the_rest_is_read() -> None:
    with pytest.raises(ImageError, match="no folder for paths: name one with --image-root"):
        read("cat.png")
    assert read([CAT, DATA_URL])[0].data == CAT


def test_a_large_file_is_not_read_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (root / "large.png").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ImageError, match="a file of more than 128 MiB"):
        read("large.png", root)
    monkeypatch.setattr(reading, "MAX_BYTES", 100)
    for value in (CAT, DATA_URL, "https://host/cat.png"):
        with pytest.raises(ImageError, match="of more than 0 MiB"):
            read(value, root, fetch=lambda url: CAT)


def test_a_store_is_asked_for_paths_that_stay_below_the_root() -> None:
    asked = []

    def read_file(root: str, path: str) -> bytes:
        asked.append((root, path))
        return CAT

    found = read_images("deep/cat.png", root="s3://bucket/photos", max_pixels=1000, read_file=read_file)
    assert found[0].data == CAT
    assert asked == [("s3://bucket/photos", "deep/cat.png")]
    for path in ("../cat.png", "/cat.png", "a/../cat.png"):
        with pytest.raises(ImageError, match="must be relative"):
            read_images(path, root="s3://bucket/photos", max_pixels=1000, read_file=read_file)
    assert len(asked) == 1


def test_a_file_that_cannot_be_opened_for_want_of_handles_is_no_bad_row(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        read("cat.png", root)
