"""Files of images in a folder or an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from prefillcli.errors import PrefillError
from prefillcli.images.image import ImageError
from prefillcli.images.reading import read_images
from prefillcli.rows import filesystems
from prefillcli.rows.input.image_files import read_image_file
from tests.s3_server import S3Server
from tests.unit.images.files import noise, saved

CAT, DOG = saved(noise(9, 7), "PNG"), saved(noise(5, 6), "JPEG")


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """A store in this process's memory, with a folder of images and a secret beside it."""
    found = fsspec.filesystem("memory")
    found.pipe_file("/bucket/photos/deep/dog.jpg", DOG)
    found.pipe_file("/bucket/secret.png", CAT)
    yield found
    found.rm("/bucket", recursive=True)


@pytest.mark.parametrize("root", ["memory://bucket/photos", "memory://bucket/photos/"])
def test_a_file_of_a_store_is_read(store: fsspec.AbstractFileSystem, root: str) -> None:
    (found,) = read_images("deep/dog.jpg", root=root, max_pixels=100, read_file=read_image_file)
    assert found.data == DOG
    for path in ("no.png", "deep", "deep/dog.jpg::memory://bucket/secret.png", "x::file:///etc/hostname"):
        with pytest.raises(ImageError, match=r"no such file|of URLs, only"):
            read_images(path, root=root, max_pixels=100, read_file=read_image_file)
    with pytest.raises(ImageError, match="must be relative"):
        read_images("../secret.png", root=root, max_pixels=100, read_file=read_image_file)


def test_s3_has_images_like_any_store(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = s3_server.new_bucket()
    for name, data in {"cat.png": CAT, "a b%20?c.png": CAT, "empty.png": b""}.items():
        s3_server.client.put_object(Bucket=bucket.name, Key=f"photos/{name}", Body=data)
    root = f"s3://{bucket.name}/photos"
    assert read_image_file(root, "cat.png") == read_image_file(root, "a b%20?c.png") == CAT
    with pytest.raises(ImageError, match=r"'empty.png': .*range"):
        read_image_file(root, "empty.png")
    for path in ("no.png", "deep", ""):
        with pytest.raises(ImageError, match="no such file"):
            read_image_file(root, path)


def test_a_folder_of_this_machine_may_be_a_url(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(CAT)
    for root in (str(tmp_path), f"file://{tmp_path}"):
        assert read_image_file(root, "cat.png") == CAT
        with pytest.raises(ImageError, match="No such file"):
            read_image_file(root, "no.png")


@pytest.mark.parametrize("failure", [TimeoutError("busy"), PermissionError("expired")])
def test_a_store_out_of_reach_stops_the_job_and_makes_no_bad_rows(
    store: fsspec.AbstractFileSystem, failure: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise failure

    monkeypatch.setattr(type(store), "cat_file", fail)
    with filesystems.impatiently(), pytest.raises(PrefillError, match="cannot read memory://bucket/photos"):
        read_image_file("memory://bucket/photos", "deep/dog.jpg")
