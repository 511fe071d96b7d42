"""The wheel in environments that have nothing else, away from the clone.

They are made by the lines of the README, with pip, pipx and uv.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIST = os.environ.get("DIST", "")
#: What the lines install torch from: a CPU's build, where pip finds one.
TORCH = os.environ.get("TORCH", "torch")


@dataclass(frozen=True)
class Place:
    """A folder with the installed environments."""

    folder: Path
    environment: dict[str, str]

    def sample(self, name: str) -> str:
        """The folder of a sample model."""
        (found,) = self.folder.glob(f"env/lib/python*/site-packages/prefillcli/samples/models/{name}")
        return str(found)

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command that is installed there."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, (done.stdout + done.stderr)[-4000:]
        return done


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The wheel of `DIST`, installed; skips without one."""
    if not DIST:
        pytest.skip("make test-install builds what is installed")
    folder = tmp_path_factory.mktemp("install")
    shutil.copytree(DIST, folder / "dist")
    (folder / "constraints.txt").write_text(TORCH)
    for name in ("env", "tools"):
        venv.create(folder / name, with_pip=True)
    path = [folder / "env/bin", folder / "tools/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PREFILL"))}
    environment |= {"PATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"}
    environment |= {f"{name}_CONSTRAINT": str(folder / "constraints.txt") for name in ("PIP", "UV")}
    environment |= {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), "PIP_NO_COMPILE": "0"}  # 0: it does not
    environment |= {"UV_TOOL_DIR": str(folder / "uv"), "UV_TOOL_BIN_DIR": str(folder / "uv/bin")}
    environment |= {"PIPX_HOME": str(folder / "pipx"), "PIPX_BIN_DIR": str(folder / "pipx/bin")}
    made = Place(folder, environment)
    made.run("tools/bin/pip", "install", "--quiet", "pipx", "uv")
    lines = re.findall(r"^((?:pip|pipx|uv) .*?) *(?:#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["pip", "pip", "pipx", "uv"]

    def install(some: Sequence[str]) -> None:
        for line in some:
            made.run("sh", "-c", line)

    with ThreadPoolExecutor() as pool:
        list(pool.map(install, [lines[:2], lines[2:]]))
    return made
