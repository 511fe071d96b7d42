"""Builds the GPU kit: a folder that proves and measures prefill on a machine that has torch, but no network.

    python recipes/gpu_kit.py --wheel dist/prefillcli-0.1.0-py3-none-any.whl --output dist/gpu-kit

`make gpu-kit` runs it in .venv, whose packages say what each requires. Their wheels are downloaded for the machine's
Python, on x86-64 Linux, in the versions of recipes/constraints.txt.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
#: What the machine has, with all that these require.
PRESENT = {
    "torch", "transformers", "triton", "pyarrow", "numpy", "scipy", "typer", "rich", "tqdm", "jinja2", "pyyaml",
    "fsspec", "safetensors", "tokenizers", "huggingface-hub",
}  # fmt: skip
WANTED = ("prefillcli", "pytest", "hypothesis", "accelerate")
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
FILES = (
    "pyproject.toml",
    "benchmarks/*.py",
    "tests/*.py",
    "tests/unit/*.py",
    "tests/unit/walk/*.py",
    "tests/unit/plan/*.py",
)
MOST_BYTES = 50_000_000


def lacking(python: str) -> list[str]:
    """The packages that a machine with those that are `PRESENT` may lack, for this version of Python."""
    where = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    where |= {"platform_machine": "x86_64", "platform_system": "Linux", "os_name": "posix", "extra": ""}
    found, left = set(), list(WANTED)
    while left:
        for line in requires(left.pop()) or []:
            needed = Requirement(line)
            name = canonicalize_name(needed.name)
            if (needed.marker is None or needed.marker.evaluate(where)) and name not in PRESENT | found:
                found.add(name)
                left.append(name)
    return sorted((found | set(WANTED)) - {"prefillcli"})


def download(names: list[str], python: str, folder: Path) -> None:
    """Fetch one wheel of each package. Raises CalledProcessError where there is none."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run(  # noqa: S603
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--python-version", python, *platforms, "--dest", str(folder),
            "--constraint", str(ROOT / "recipes/constraints.txt"), "pip", *names,
        ],
        check=True,
    )  # fmt: skip


def build(wheel: Path, output: Path, python: str) -> int:
    """Make the kit anew; return its size in bytes."""
    shutil.rmtree(output, ignore_errors=True)
    (output / "wheels").mkdir(parents=True)
    download(lacking(python), python, output / "wheels")
    shutil.copy(wheel, output / "wheels")
    for pattern in FILES:
        for file in ROOT.glob(pattern):
            kept = output / file.relative_to(ROOT)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, kept)
    shutil.copy(ROOT / "recipes/gpu-kit.sh", output / "run.sh")
    return sum(file.stat().st_size for file in output.rglob("*"))


def main() -> None:
    """Exit code 1 if the kit is too large."""
    parser = argparse.ArgumentParser(description="Build the GPU kit.")
    parser.add_argument("--wheel", type=Path, required=True, help="prefill's own")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--python", default="3.12", help="version on the machine with the GPU")
    given = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", given.python):
        parser.error(f"--python {given.python}: give a version such as 3.12")
    size = build(given.wheel, given.output, given.python)
    print(f"{given.output}: {size / 1e6:.1f} MB for Python {given.python}")
    if size > MOST_BYTES:
        sys.exit(f"the kit has more than {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
